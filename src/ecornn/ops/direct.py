"""The recurrence in eager mode, without the dispatcher.

Through a custom operator written in Python a small layer's call was bound by the host, not by the
GPU, and took more than twice as long on an H200's machine; this calls the backend itself. What
compilers, exporters and torch.func need of the operator is not needed here, and a second derivative
still goes through it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ecornn.backends.persistent_plain import PlainLayer
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
        (x, h0, c0, *rest), n = ctx.saved_tensors, ctx.weights
        weights, more, (output, cells, *kept) = rest[:n], rest[n : n + _MORE], rest[n + _MORE :]
        if all(grad is None for grad in grads):
            return (None,) * (1 + _WEIGHTS + n)
        if not torch.is_grad_enabled():
            ctx.maybe_clear_saved_tensors()  # unless the graph is retained
        del rest
        result = LayerResult(output, h0, None, cells if ctx.cells_exist else None, kept)
        call = (x, h0, c0, weights, *more, *ctx.constants)
        return (None, *layer_gradients(call, result, grads, needs_input=ctx.needs_input_grad[1]))


def layer_gradients(
    arguments: tuple[Any, ...], result: LayerResult, grads: tuple[Any, ...], *, needs_input: bool
) -> tuple[Tensor | None, ...]:
    """Of the input, the states and each weight; those that can be differentiated where that will be
    done. The list of what the result kept may be emptied."""
    if not torch.is_grad_enabled():
        arrived = ResultGrads(*(None if g is None or g.dim() == 1 else g for g in grads))
        ask = BackwardRequest(needs_input, last=True)
        direct = by_name(arguments[-2]).backward(read_call(*arguments), result, arrived, ask)
        return (direct.input_TBI, direct.h0_DBR, direct.c0_DBH, *direct.weights)
    output, _, _, cells, kept = result
    cells = output.new_empty(0) if cells is None else cells
    found = differentiable_backward(*grads, output, cells, kept, needs_input, 1, *arguments)
    d_input, d_h0, *others = found
    d_c0 = others.pop(0) if arguments[2] is not None else None
    return (d_input if needs_input else None, d_h0, d_c0, *others)


class PlainRoute(NamedTuple):
    """How plain calls of one size run: the layer, and the operator's constants."""

    layer: PlainLayer
    constants: tuple[Any, ...]
    layers: int = 1


def plain_route(arguments: tuple[Any, ...]) -> PlainRoute | None:
    """For calls like this one, given as the operator's arguments; None if they are not served."""
    call = read_call(*arguments)
    if arguments[-2] != "persistent" or not PlainLayer.serves(call):
        return None
    return PlainRoute(PlainLayer(call), arguments[_WEIGHTS + 1 + _MORE :])


def run_plain_route(
    route: PlainRoute,
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    weights: list[Tensor],
    lengths: Tensor | None = None,
    *,
    needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(output, h_n, c_n); the tensors must be such that the layer `fits`, and lengths be there if
    the route was found with some: contiguous, int64, on the device and within the steps."""
    if needs_grad:
        found: tuple[Tensor, Tensor, Tensor | None]
        found = _Plain.apply(route, x, h0, c0, lengths, *weights)
        return found
    result = route.layer.forward(x, h0, c0, tuple(weights), lengths)
    return result[:3]


class _Plain(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, route: PlainRoute, x: Any, h0: Any, c0: Any, lengths: Any, *weights: Any
    ) -> Any:
        output, h_n, c_n, cells, kept = route.layer.forward(x, h0, c0, weights, lengths)
        ctx.save_for_backward(x, h0, c0, lengths, output, cells, kept, *weights)
        ctx.route = route
        ctx.set_materialize_grads(False)
        return output, h_n, c_n

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, h0, c0, lengths, output, cells, kept, *weights = ctx.saved_tensors
        layer, constants, _ = ctx.route
        needed = ctx.needs_input_grad
        if all(grad is None for grad in grads):
            return (None,) * len(needed)
        # under autocast its products would be in autocast's numbers
        special = torch.is_grad_enabled() or torch._C._is_any_autocast_enabled()
        short = layer.has_backward and not special
        # hooks on saved tensors may have given any of them another form
        if short and layer.fits(x, h0, c0, weights, output, cells, kept, lengths):
            result = [output, cells, kept]
            del output, cells, kept
            ctx.maybe_clear_saved_tensors()  # unless the graph is retained
            direct = layer.backward(
                grads,
                (x, h0, c0, weights),
                result,
                needs_input=needed[1],
                needs_states=needed[2] or needed[3],
                lengths=lengths,
            )
            return (None, direct.input_TBI, direct.h0_DBR, direct.c0_DBH, None, *direct.weights)
        gates = [] if kept is None else [kept.view(layer.steps, layer.batch, -1)]
        left = LayerResult(output, h0, None, cells, gates)
        arguments = (x, h0, c0, weights, None, lengths, None, None, *constants)
        d_x, d_h0, d_c0, *d_weights = layer_gradients(
            arguments, left, (*grads, None), needs_input=needed[1]
        )
        return (None, d_x, d_h0, d_c0, None, *d_weights)
