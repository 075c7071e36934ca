"""The recurrence in eager mode, without the dispatcher.

Through a custom operator written in Python a small layer's call was bound by the host, not by the
GPU, and took more than twice as long on an H200's machine; this calls the backend itself. What
compilers, exporters and torch.func need of the operator is not needed here, and a second derivative
still goes through it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ecornn.backends.protocol import BackwardRequest, LayerResult, ResultGrads
from ecornn.backends.registry import by_name
from ecornn.ops.recurrence import differentiable_backward, read_call

#: The operator's argument list begins with three tensors, the weights, and four more tensors.
_WEIGHTS = 3
_MORE = 4


def run_directly(arguments: tuple[Any, ...], *, needs_grad: bool) -> tuple[Tensor, ...]:
    """(output, h_n, c_n, cells) as the operator gives them."""
    if needs_grad:
        x, h0, c0, weights, *rest = arguments
        found: tuple[Tensor, ...] = _Recurrence.apply(tuple(rest), x, h0, c0, *weights)
        return found
    result = by_name(arguments[-2]).forward(read_call(*arguments))
    return _outputs(result)


def _outputs(result: LayerResult) -> tuple[Tensor, ...]:
    empty = result.output_TBO.new_empty
    return tuple(empty(0) if value is None else value for value in result[:4])


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rest: tuple[Any, ...], *tensors: Any) -> Any:
        x, h0, c0, *weights = tensors
        call = read_call(x, h0, c0, weights, *rest)
        result = by_name(rest[-2]).forward(call)
        output, h_n, c_n, cells = _outputs(result)
        ctx.save_for_backward(*tensors, *rest[:_MORE], output, cells, *result.kept)
        ctx.constants, ctx.weights = rest[_MORE:], len(weights)
        ctx.cells_exist = result.cells_TBE is not None
        ctx.set_materialize_grads(False)
        return output, h_n, c_n, cells

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        saved, n = ctx.saved_tensors, ctx.weights
        x, h0, c0 = saved[:_WEIGHTS]
        weights, rest = list(saved[_WEIGHTS : _WEIGHTS + n]), saved[_WEIGHTS + n :]
        more, (output, cells, *kept) = rest[:_MORE], rest[_MORE:]
        if all(grad is None for grad in grads):
            return (None,) * (1 + _WEIGHTS + n)
        inputs = (x, h0, c0, weights, *more)
        needs_input = ctx.needs_input_grad[1]
        if torch.is_grad_enabled():
            found = differentiable_backward(
                *grads, output, cells, kept, needs_input, 1, *inputs, *ctx.constants
            )
            d_input, d_h0, *others = found
            d_c0 = others.pop(0) if c0 is not None else None
            return (None, d_input if needs_input else None, d_h0, d_c0, *others)
        call = read_call(*inputs, *ctx.constants)
        result = LayerResult(output, h0, None, cells if ctx.cells_exist else None, kept)
        arrived = ResultGrads(*(None if g is None or g.dim() == 1 else g for g in grads))
        direct = by_name(ctx.constants[-2]).backward(
            call, result, arrived, BackwardRequest(needs_input)
        )
        return (None, direct.input_TBI, direct.h0_DBR, direct.c0_DBH, *direct.weights)
