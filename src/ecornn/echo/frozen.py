"""Weights that were frozen when code was compiled for them, and are trained later.

torch 2.11 does not look again at whether the weights of a module have gradients: what was compiled
while they were frozen is used from then on, and the gradients are missing without a word. So it is
told by an argument which of them are (`telling_frozen`), and compiles anew. Code that is called
without being told, as of a model that the user has compiled by torch's own function, is not used
for weights that have gradients now (`unless_thawed`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn


class Thawed(UserWarning):
    """Gradients are asked for that compiled code does not make: it is not used."""


def telling_frozen(run: Callable[..., Any], part: nn.Module) -> Callable[..., Any]:
    """Around what was compiled of `alone`, whose first argument tells them apart."""
    places = [(m._parameters, name) for m in part.modules() for name in m._parameters]

    def called(*args: Any, **kwargs: Any) -> Any:
        # by their places: nobody but the model holds its weights
        weights = [own.get(name) for own, name in places]
        frozen = "".join(["01"[weight is not None and weight.requires_grad] for weight in weights])
        return run(frozen, *args, **kwargs)

    return called


def telling_nothing(run: Callable[..., Any]) -> Callable[..., Any]:
    """The same of a function, of whose weights nothing is known."""

    def called(*args: Any, **kwargs: Any) -> Any:
        return run("", *args, **kwargs)

    return called


def unless_thawed(
    compiled: Callable[..., Any], module: fx.GraphModule, inputs: Sequence[Any]
) -> Callable[..., Any]:
    """`compiled`, or the graph as it was traced where an input has a gradient now that it had not
    when it was compiled."""
    frozen = [k for k, value in enumerate(inputs) if _is_frozen(value)]
    if not frozen or not torch.is_grad_enabled():
        return compiled

    def run(*args: Any) -> Any:
        if any([args[k].requires_grad for k in frozen]):  # noqa: C419 a list is the faster
            warnings.warn(
                "weights have gradients now that were frozen when they were compiled, which this "
                "version of torch does not notice: this call runs as it is written; to have it "
                "compiled, call torch.compiler.reset() or use ecornn.compile",
                Thawed,
                stacklevel=2,
            )
            return module(*args)
        return compiled(*args)

    return run


def _is_frozen(value: Any) -> bool:
    differentiable = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    return differentiable and not value.requires_grad
