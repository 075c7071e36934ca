"""Gradients that autograd takes for constants, and which must not be differentiated again: a second
derivative would lack their part without a word.

torch's own `once_differentiable` does not serve: it raises only where what arrives has a gradient,
and is not asked where a derivative by one certain tensor is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ecornn.errors import NotDifferentiableTwice


class _OnlyOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, why: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.why = why
        return tuple(one.detach() for one in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotDifferentiableTwice(ctx.why)


def only_once(
    gradients: Sequence[Tensor | None], sources: Sequence[Tensor], why: str
) -> tuple[Tensor | None, ...]:
    """The same gradients, as functions of `sources` that raise where they are differentiated."""
    there = [one for one in gradients if one is not None]
    if not there:
        return (*gradients,)
    found = iter(_OnlyOnce.apply(why, len(there), *there, *sources))
    return tuple(None if one is None else next(found) for one in gradients)


def stands_for(sources: Sequence[Tensor], why: str) -> Tensor:
    """A tensor without numbers that is a function of `sources`, as one of them: it holds none of
    their memory."""
    stand_in: Tensor
    (stand_in,) = _OnlyOnce.apply(why, 1, torch.empty(0), *sources)
    return stand_in
