"""Operators under torch.func.

torch.library's autograd rules do not work under torch.func.grad ("must override the
setup_context staticmethod", torch 2.11 to 2.13); an autograd.Function with the same rules does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree


def transforms_active() -> bool:
    """Whether torch.func (vmap, grad, jvp …) is at work around this call."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def vmap_active() -> bool:
    """Whether values may be one for each of many samples."""
    return _any_level(torch._C._functorch.TransformType.Vmap)


def forward_mode_active() -> bool:
    """Whether forward-mode derivatives (dual numbers, torch.func.jvp) are being taken."""
    if torch.autograd.forward_ad._current_level >= 0:
        return True
    return _any_level(torch._C._functorch.TransformType.Jvp)


def _any_level(kind: Any) -> bool:
    if not transforms_active():
        return False
    return any(level.key() == kind for level in torch._C._functorch.get_interpreter_stack() or ())


def through_transforms(
    op: Any,
    setup: Callable[..., None],
    backward: Callable[..., Any],
    *,
    flat: Callable[[Any], tuple[Any, ...]],
    structured: Callable[[tuple[Any, ...]], Any],
) -> Callable[..., Any]:
    """`op` as a function that torch.func can differentiate and map, by the rules it already has.

    `flat` and `structured` turn the operator's result into a tuple of tensors and back.
    """

    class Through(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(spec: Any, *leaves: Any) -> tuple[Any, ...]:
            return flat(op(*pytree.tree_unflatten(list(leaves), spec)))

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
            spec, *leaves = inputs
            setup(ctx, tuple(pytree.tree_unflatten(leaves, spec)), structured(output))

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            found = backward(ctx, *_as_arguments(structured(grads)))
            return (None, *pytree.tree_leaves(found, is_leaf=lambda x: x is None))

    def call(*args: Any) -> Any:
        if not transforms_active():
            return op(*args)
        leaves, spec = pytree.tree_flatten(args)
        return structured(Through.apply(spec, *leaves))

    return call


def _as_arguments(grads: Any) -> tuple[Any, ...]:
    return grads if isinstance(grads, tuple) else (grads,)
