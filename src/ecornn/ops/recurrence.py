"""`ecornn::recurrence`: one recurrent layer as one operator, and `ecornn::recurrence_backward`.

The operator takes the layer's input and weights rather than finished gate inputs: only so can a
backend form the gates piece by piece and recompute them in the backward pass, instead of keeping
4·T·B·H of them. The plan arrives as constants (`backend`, `keep`), so that a tracer sees one
deterministic node with known output sizes. Where nobody asked for one, `keep` is "auto" in a traced
graph: the states are kept, unless whoever compiles it puts another mode there, in both operators.

Outputs that a cell does not have (c_n of a GRU), or that were not asked for, are empty tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ecornn.backends.protocol import (
    BackwardRequest,
    CallGrads,
    LayerCall,
    LayerResult,
    ResultGrads,
)
from ecornn.backends.reference import define
from ecornn.backends.registry import by_name
from ecornn.kernels.reference import DirectionWeights
from ecornn.ops.batching import SAMPLES, vmap_backward, vmap_forward
from ecornn.ops.checks import check_lengths_within
from ecornn.ops.higher_order import SecondDerivative
from ecornn.ops.keeping import backward_flops_of, flops_of, gate_shapes, settled
from ecornn.ops.transforms import through_transforms, transforms_active

_CALL = (
    "Tensor input, Tensor h0, Tensor? c0, Tensor[] weights, Tensor? resets, Tensor? lengths, "
    "Tensor? zoneout_h, Tensor? zoneout_c, str cell, str layout, str reset_to, str after_end, "
    "bool cell_states, str backend, str keep"
)
_OUTPUTS = "Tensor output, Tensor cells, Tensor[] kept"
#: Positions in the argument list of the forward operator.
_TENSORS = 8
_WEIGHTS = 3


def read_call(
    input: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    weights: Sequence[Tensor],
    resets: Tensor | None,
    lengths: Tensor | None,
    zoneout_h: Tensor | None,
    zoneout_c: Tensor | None,
    cell: str,
    layout: str,
    reset_to: str,
    after_end: str,
    cell_states: bool,
    backend: str,
    keep: str,
) -> LayerCall:
    """The operator's arguments as the value that backends are given."""
    names = layout.split(",")
    directions = tuple(
        DirectionWeights(**dict(zip(names, weights[i : i + len(names)], strict=True)))
        for i in range(0, len(weights), len(names))
    )
    return LayerCall(
        cell,
        input,
        h0,
        c0,
        directions,
        resets,
        lengths,
        zoneout_h,
        zoneout_c,
        reset_to,
        after_end,
        cell_states,
        settled(keep),
    )


def stands_for_none(value: Tensor) -> bool:
    """Outputs have three dimensions, also where the batch is empty."""
    return value.dim() == 1


Outputs = tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]


def _as_outputs(result: LayerResult) -> Outputs:
    empty = result.output_TBO.new_empty
    return (
        result.output_TBO,
        result.h_n_DBR,
        empty(0) if result.c_n_DBH is None else result.c_n_DBH,
        empty(0) if result.cells_TBE is None else result.cells_TBE,
        result.kept,
    )


@torch.library.custom_op(
    "ecornn::recurrence",
    mutates_args=(),
    schema=f"({_CALL}) -> (Tensor, Tensor, Tensor, Tensor, Tensor[])",
)
def recurrence(*args: Any) -> Outputs:
    call = read_call(*args)
    check_lengths_within(call.lengths_B, call.input_TBI.shape[0])
    backend = args[-2]
    output, h_n, c_n, cells, kept = _as_outputs(by_name(backend).forward(call))
    found = owned((output, h_n, c_n, cells, *kept), (call.input_TBI, call.h0_DBR, call.c0_DBH))
    return found[0], found[1], found[2], found[3], found[4:]


def owned(found: Sequence[Tensor], given: Sequence[Tensor | None]) -> list[Tensor]:
    """The same values, each contiguous in memory of its own, as an operator must return them: a
    frozen state may be the one that came in, and gradients may be views of one buffer."""
    taken = {t.untyped_storage().data_ptr() for t in given if t is not None}
    result = []
    for value in found:
        value = value.contiguous()
        if value.numel() and value.untyped_storage().data_ptr() in taken:
            value = value.clone()
        taken.add(value.untyped_storage().data_ptr())
        # detached: torch.stack may return a view, which could not be changed in place later
        result.append(value.detach())
    return result


@recurrence.register_fake
def _(*args: Any) -> Outputs:
    call = read_call(*args)
    x, h0, c0 = call.input_TBI, call.h0_DBR, call.c0_DBH
    steps, batch = x.shape[0], x.shape[1]
    hidden = h0.shape[-1] if c0 is None else c0.shape[-1]
    lstm = call.cell == "lstm"
    shapes = gate_shapes(call) if call.keep == "gates" else []
    with_cells = lstm and (call.cell_states or call.keep != "none")
    return (
        x.new_empty(steps, batch, call.directions * h0.shape[-1]),
        x.new_empty(h0.shape),
        x.new_empty(c0.shape) if c0 is not None else x.new_empty(0),
        x.new_empty(steps, batch, call.directions * hidden) if with_cells else x.new_empty(0),
        [x.new_empty(shape) for shape in shapes],
    )


@torch.library.custom_op(
    "ecornn::recurrence_backward",
    mutates_args=(),
    schema=(
        "(Tensor? d_output, Tensor? d_h_n, Tensor? d_c_n, Tensor? d_cells, "
        f"{_OUTPUTS}, bool needs_input, int samples, {_CALL}) -> Tensor[]"
    ),
)
def recurrence_backward(
    d_output: Tensor | None,
    d_h_n: Tensor | None,
    d_c_n: Tensor | None,
    d_cells: Tensor | None,
    output: Tensor,
    cells: Tensor,
    kept: list[Tensor],
    needs_input: bool,
    samples: int,
    *args: Any,
) -> list[Tensor]:
    call, backend = read_call(*args), args[-2]
    # an output that stands empty for "there is none" may get an equally empty gradient
    arrived = (d_output, d_h_n, d_c_n, d_cells)
    grads = ResultGrads(*(None if g is None or stands_for_none(g) else g for g in arrived))
    if call.cell == "lstm" and stands_for_none(cells) and backend != "aten":
        # nothing was kept, because nobody said at the forward pass that a gradient would be taken
        again = by_name(backend).forward(replace(call, keep="states"))
        output, _, _, cells, kept = _as_outputs(again)
    # h_n and c_n are not read by backends: the output and the cell states hold them
    result = LayerResult(output, call.h0_DBR, None, None if stands_for_none(cells) else cells, kept)
    ask = BackwardRequest(needs_input, samples)
    found = _flat_grads(by_name(backend).backward(call, result, grads, ask), call.input_TBI)
    return owned(found, (*grads, output, cells, call.input_TBI, call.h0_DBR, call.c0_DBH))


def _flat_grads(grads: CallGrads, x: Tensor) -> list[Tensor]:
    """[input, h0, c0 where the cell has one, *weights]; an input gradient nobody needs is empty."""
    d_input = x.new_empty(0) if grads.input_TBI is None else grads.input_TBI
    d_c0 = [] if grads.c0_DBH is None else [grads.c0_DBH]
    return [d_input, grads.h0_DBR, *d_c0, *grads.weights]


@recurrence_backward.register_fake
def _(*args: Any) -> list[Tensor]:
    needs_input, samples = args[SAMPLES - 1], args[SAMPLES]
    call = read_call(*args[SAMPLES + 1 :])
    each = (samples,) if samples > 1 else ()
    x = call.input_TBI
    return _flat_grads(
        CallGrads(
            x.new_empty(x.shape) if needs_input else None,
            x.new_empty(call.h0_DBR.shape),
            None if call.c0_DBH is None else x.new_empty(call.c0_DBH.shape),
            [x.new_empty(*each, *w.shape) for w in call.flat_weights()],
        ),
        x,
    )


@register_flop_formula(torch.ops.ecornn.recurrence, get_raw=True)
def _(*args: Any, out_val: Any = None, **_: Any) -> int:
    return flops_of(read_call(*args))


@register_flop_formula(torch.ops.ecornn.recurrence_backward, get_raw=True)
def _(*args: Any, out_val: Any = None, **_: Any) -> int:
    return backward_flops_of(read_call(*args[SAMPLES + 1 :]), args[-2])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    result, _, _, cells, kept = output
    weights = inputs[_WEIGHTS]
    tensors = (*inputs[:_WEIGHTS], *weights, *inputs[_WEIGHTS + 1 : _TENSORS])
    ctx.save_for_backward(*tensors, result, cells, *kept)
    ctx.weights = len(weights)
    ctx.constants = inputs[_TENSORS:]
    ctx.under_transforms = transforms_active()
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, d_output: Any, d_h_n: Any, d_c_n: Any, d_cells: Any, d_kept: Any) -> Any:
    saved, n = ctx.saved_tensors, ctx.weights
    tensors = (*saved[:_WEIGHTS], list(saved[_WEIGHTS : _WEIGHTS + n]), *saved[_WEIGHTS + n :])
    inputs, (output, cells, *kept) = tensors[:_TENSORS], tensors[_TENSORS:]
    nothing = (None,) * (_TENSORS - _WEIGHTS - 1 + len(ctx.constants))
    if d_output is None and d_h_n is None and d_c_n is None and d_cells is None:
        return (None, None, None, [None] * n, *nothing)
    needs_input = _input_needs_grad(ctx)
    found = differentiable_backward(
        *(d_output, d_h_n, d_c_n, d_cells),
        *(output, cells, kept),
        *(needs_input, 1),
        *inputs,
        *ctx.constants,
    )
    d_input, d_h0, *rest = found
    d_c0 = rest.pop(0) if inputs[2] is not None else None
    return (d_input if needs_input else None, d_h0, d_c0, rest, *nothing)


def _input_needs_grad(ctx: Any) -> bool:
    # the input is the first argument of the operator; torch.func's form has a tree spec before it
    first, *rest = ctx.needs_input_grad
    return bool(rest[0] if ctx.under_transforms else first)


recurrence.register_autograd(_backward, setup_context=_setup)


def define_outputs(*args: Any) -> tuple[Tensor, ...]:
    """The definition's differentiable outputs for the operator's arguments."""
    return _as_outputs(define(read_call(*args)))[:4]


_second = SecondDerivative(define_outputs, tensors=_TENSORS, weights=_WEIGHTS)
recurrence_backward.register_autograd(_second.backward, setup_context=_second.setup)

#: The operators as torch.func sees them; outside of it they are the operators themselves.
differentiable_backward = through_transforms(
    recurrence_backward, _second.setup, _second.backward, flat=tuple, structured=list
)
differentiable_recurrence = through_transforms(
    recurrence,
    _setup,
    _backward,
    flat=lambda result: (*result[:4], *result[4]),
    structured=lambda result: (*result[:4], list(result[4:])),
)


@recurrence.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    return vmap_forward(recurrence, info.batch_size, in_dims, args)


@recurrence_backward.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    return vmap_backward(recurrence_backward, info.batch_size, in_dims, args)
