"""Derivatives of derivatives, through the definition.

A fast kernel gives the first derivative. Whoever differentiates again gets it from the
definition in plain torch, which can be differentiated to any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ecornn.ops.batching import CALL_BATCH_DIMS


class SecondDerivative:
    """The autograd rule of a recurrence's backward operator.

    That operator's arguments are four gradients, what was kept (output, cells, kept), two constants
    (needs_input, samples), and the forward operator's arguments, of which the first `tensors` are
    tensors and the one at `weights` is a list of them. What was kept is a function of the others,
    and so gets no gradient of its own.
    """

    GRADS = 4
    KEPT = 5

    def __init__(
        self, define: Callable[..., tuple[Tensor, ...]], *, tensors: int, weights: int
    ) -> None:
        self.define, self.tensors, self.weights = define, tensors, weights

    def setup(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        grads, call = inputs[: self.GRADS], inputs[self.GRADS + self.KEPT :]
        at = self.weights
        ctx.save_for_backward(*grads, *call[:at], *call[at], *call[at + 1 : self.tensors])
        ctx.weights, ctx.kept = len(call[at]), len(inputs[self.GRADS + 2])
        ctx.samples = inputs[self.GRADS + self.KEPT - 1]
        ctx.constants = call[self.tensors :]
        ctx.set_materialize_grads(False)

    def backward(self, ctx: Any, dd_found: Sequence[Tensor | None]) -> Any:
        grads, call = ctx.saved_tensors[: self.GRADS], ctx.saved_tensors[self.GRADS :]
        stop = self.weights + ctx.weights
        d_grads, d_call = self._differentiate(
            grads, call, stop, ctx.constants, dd_found, ctx.samples
        )
        nothing_for = self.tensors - self.weights - 1 + len(ctx.constants)
        return (
            *d_grads,
            None,
            None,
            [None] * ctx.kept,
            None,
            None,
            *d_call[: self.weights],
            d_call[self.weights :],
            *(None,) * nothing_for,
        )

    def _differentiate(
        self,
        grads: Sequence[Tensor | None],
        call: Sequence[Tensor | None],
        stop: int,
        constants: tuple[Any, ...],
        dd_found: Sequence[Tensor | None],
        samples: int,
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        sources = [x for x in call[:stop] if x is not None]
        arrived = [i for i, g in enumerate(grads) if g is not None and g.dim() > 1]
        states = len(sources) - (stop - self.weights)
        dims = [1] * states + [None] * (stop - self.weights)
        tail_dims = CALL_BATCH_DIMS[self.weights + 1 :]

        def first_of_sample(
            s: int, d_outputs: Sequence[Tensor], values: Sequence[Tensor]
        ) -> tuple[Tensor, ...]:
            tail = [_part(x, s, samples, d) for x, d in zip(call[stop:], tail_dims, strict=True)]

            def outputs(*values: Tensor) -> tuple[Tensor, ...]:
                rest = iter(values)
                filled = [None if x is None else next(rest) for x in call[:stop]]
                at = self.weights
                found = self.define(*filled[:at], filled[at:], *tail, *constants)
                return tuple(found[i] for i in arrived)

            parts = [_part(x, s, samples, d) for x, d in zip(values, dims, strict=True)]
            pull = torch.func.vjp(outputs, *parts)[1]
            pulled: tuple[Tensor, ...] = pull(tuple(_part(g, s, samples, 1) for g in d_outputs))
            return pulled

        def first(d_outputs: tuple[Tensor, ...], *values: Tensor) -> tuple[Tensor, ...]:
            found = [first_of_sample(s, d_outputs, values) for s in range(samples)]
            if samples == 1:
                return found[0]
            columns = list(zip(*found, strict=True))
            return tuple(
                torch.stack(column) if d is None else torch.cat(column, d)
                for column, d in zip(columns, dims, strict=True)
            )

        found, pull = torch.func.vjp(first, tuple(grads[i] for i in arrived), *sources)[:2]
        dd = tuple(
            torch.zeros_like(x) if g is None or g.shape != x.shape else g
            for g, x in zip(dd_found, found, strict=True)
        )
        d_arrived, *d_sources = pull(dd)
        d_grads: list[Tensor | None] = [None] * len(grads)
        for i, d_grad in zip(arrived, d_arrived, strict=True):
            d_grads[i] = d_grad
        rest = iter(d_sources)
        return d_grads, [None if x is None else next(rest) for x in call[:stop]]


def _part(value: Any, s: int, samples: int, dim: int | None) -> Any:
    """The s-th of `samples` equal parts of the batch; what has none, or one for all, stays."""
    if value is None or dim is None or samples == 1 or value.shape[dim] == 1:
        return value
    size = value.shape[dim] // samples
    return value.narrow(dim, s * size, size)
