"""Second derivatives for kernels that autograd records by itself but only once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class _Covered(torch.autograd.Function):
    """Outputs of a native kernel, unchanged. A first derivative goes to the native kernel; where
    a derivative of the derivative will be taken (create_graph), it goes to the definition."""

    @staticmethod
    def forward(
        ctx: Any, definition: Callable[..., tuple[Tensor, ...]], n: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.definition = definition
        ctx.save_for_backward(*tensors[n:])
        ctx.outputs = n
        ctx.set_materialize_grads(False)
        # detached: fresh outputs of this function, which may be changed in place as torch.nn's can
        return tuple(t.detach() for t in tensors[:n])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        inputs = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return (None, None, *grads, *(None,) * len(inputs))
        # aliases, so that each input gets its own share alone even where one is computed from
        # another or given twice
        aliases = [x.view_as(x) for x in inputs]
        outputs = ctx.definition(*aliases)
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None]
        wanted = [x for x in aliases if x.requires_grad]
        found = iter(
            torch.autograd.grad(
                [o for o, _ in pairs],
                wanted,
                [g for _, g in pairs],
                create_graph=True,
                allow_unused=True,
            )
        )
        shares = [next(found) if x.requires_grad else None for x in aliases]
        return (None, None, *(None,) * ctx.outputs, *shares)


def differentiable_again(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    definition: Callable[..., tuple[Tensor, ...]],
) -> tuple[Tensor, ...]:
    """The same outputs, which can be differentiated more than once: `definition` computes them
    from `inputs` by operators that can."""
    covered: tuple[Tensor, ...] = _Covered.apply(definition, len(outputs), *outputs, *inputs)
    return covered
