"""torch's own recurrent kernels: cuDNN on CUDA, oneDNN or ATen's loops on the CPU.

Shape suffixes: see `protocol`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ecornn.backends.protocol import (
    BackwardRequest,
    CallGrads,
    LayerCall,
    LayerResult,
    ResultGrads,
    present,
)
from ecornn.backends.samples import sample_by_sample
from ecornn.kernels.reference import DirectionWeights
from ecornn.spec import RnnSpec

#: cuDNN fails beyond this many steps (pytorch#133751); longer sequences run in pieces.
CUDNN_MOST_STEPS = 65_535

#: Drives a sigmoid to exactly 0 or 1 in every dtype, and is finite in float16.
SATURATING = 1e4

#: Half-precision tensor cores want the inner dimension of a product in multiples of this.
TENSOR_CORE_MULTIPLE = 8


class NetworkCall(NamedTuple):
    """A whole stack in one call of ATen, time first; `weights` as torch.nn lists them."""

    cell: str
    input_TBI: Tensor
    h0: Tensor  # (layers · D, B, R)
    c0: Tensor | None
    weights: list[Tensor]
    bias: bool
    layers: int
    bidirectional: bool
    dropout: float
    needs_grad: bool


def run_network(call: NetworkCall) -> tuple[Tensor, Tensor, Tensor | None]:
    """(output, h_n, c_n), recorded by autograd as torch.nn's own layers are."""
    weights = call.weights
    if call.input_TBI.is_cuda:
        weights = in_one_buffer(weights, call.bias, per_direction=_per_direction(call))
    common = (
        weights,
        call.bias,
        call.layers,
        call.dropout,
        # cuDNN has a backward pass only for calls marked as training; with no dropout the mark
        # changes nothing else
        call.needs_grad or call.dropout > 0,
        call.bidirectional,
        False,
    )
    h0 = call.h0.contiguous()
    if call.cell == "lstm":
        assert call.c0 is not None
        output, h_n, c_n = torch.lstm(call.input_TBI, (h0, call.c0.contiguous()), *common)
        return output, h_n, c_n
    run = {"gru": torch.gru, "rnn_tanh": torch.rnn_tanh, "rnn_relu": torch.rnn_relu}[call.cell]
    output, h_n = run(call.input_TBI, h0, *common)
    return output, h_n, None


def _per_direction(call: NetworkCall) -> int:
    return len(call.weights) // (call.layers * (2 if call.bidirectional else 1))


def in_one_buffer(weights: list[Tensor], bias: bool, per_direction: int) -> list[Tensor]:
    """Views of one buffer that holds the weights as they are now, in cuDNN's order.

    cuDNN wants every matrix and then every bias of the stack in one piece of memory, and torch
    warns and copies on each call where they are not. The parameters stay where they are, so
    that tying, pruning, sharding or swapping them needs no care; the copy costs one kernel.
    """
    is_bias = [bias and i % per_direction in (2, 3) for i in range(len(weights))]
    order = sorted(range(len(weights)), key=lambda i: (is_bias[i], i))
    pointer = weights[order[0]].data_ptr()
    storage = weights[order[0]].untyped_storage().data_ptr()
    for i in order:
        if weights[i].data_ptr() != pointer or not weights[i].is_contiguous():
            break
        pointer += weights[i].numel() * weights[i].element_size()
    else:
        if weights[order[0]].data_ptr() == storage:
            return weights
    flat = torch.cat([weights[i].reshape(-1) for i in order])
    views: list[Tensor] = [flat] * len(weights)
    pieces = flat.split([weights[i].numel() for i in order])
    for i, piece in zip(order, pieces, strict=True):
        views[i] = piece.view(weights[i].shape)
    return views


def run_layer(call: LayerCall) -> LayerResult:
    """One layer, recorded by autograd; with lengths every direction is a call of its own."""
    limited = call.input_TBI.is_cuda and call.input_TBI.shape[0] > CUDNN_MOST_STEPS
    if call.lengths_B is None and not limited:
        output, h_n, c_n = run_network(_network(call, call.input_TBI, call.h0_DBR, call.c0_DBH))
        return LayerResult(output, h_n, c_n, None, [])

    parts = [_run_direction(_only(call, d), reverse=d == 1) for d in range(call.directions)]
    outputs, h_ns, c_ns = zip(*parts, strict=True)
    return LayerResult(
        outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1),
        torch.cat(h_ns),
        torch.cat(c_ns) if call.cell == "lstm" else None,
        None,
        [],
    )


def _only(call: LayerCall, d: int) -> LayerCall:
    c0 = None if call.c0_DBH is None else call.c0_DBH[d : d + 1]
    return replace(call, h0_DBR=call.h0_DBR[d : d + 1], c0_DBH=c0, weights=(call.weights[d],))


def _network(call: LayerCall, x: Tensor, h0: Tensor, c0: Tensor | None) -> NetworkCall:
    weights = call.flat_weights()
    return NetworkCall(
        cell=call.cell,
        input_TBI=x,
        h0=h0,
        c0=c0,
        weights=weights,
        bias=call.weights[0].b_ih is not None,
        layers=1,
        bidirectional=call.directions == 2,
        dropout=0.0,
        needs_grad=torch.is_grad_enabled()
        and any(t.requires_grad for t in (x, h0, *weights, *(() if c0 is None else (c0,)))),
    )


def _run_direction(call: LayerCall, *, reverse: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """One direction as a forward run: a reverse one on input turned around within its length."""
    x, lengths = call.input_TBI, call.lengths_B
    steps = x.shape[0]
    turn_TB1 = _turned(steps, lengths, x.device) if reverse else None
    if turn_TB1 is not None:
        x = _along_time(x, turn_TB1)
    active_TB1 = None
    if lengths is not None:
        active_TB1 = (
            torch.arange(steps, device=x.device).unsqueeze(1) < lengths.unsqueeze(0)
        ).unsqueeze(-1)
        # whatever lies beyond the end, NaN included, must not reach a product
        x = torch.where(active_TB1, x, x.new_zeros(()))
        if call.cell == "lstm":
            x, weights = _hold_cell_after_end(x, active_TB1, call.weights[0])
            call = replace(call, weights=(weights,))

    output, h_n, c_n = _in_pieces(call, x)
    if lengths is not None:
        last_1BR = (lengths - 1).clamp(min=0).view(1, -1, 1).expand(1, -1, output.shape[-1])
        h_n = torch.where((lengths > 0).view(1, -1, 1), output.gather(0, last_1BR), call.h0_DBR)
    if turn_TB1 is not None:
        output = _along_time(output, turn_TB1)
    if active_TB1 is not None:
        rest = torch.zeros_like(h_n)
        if call.after_end == "frozen":
            rest = call.h0_DBR if reverse else h_n
        output = torch.where(active_TB1, output, rest)
    return output, h_n, c_n


def _in_pieces(call: LayerCall, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    most = CUDNN_MOST_STEPS if x.is_cuda else x.shape[0]
    h, c = call.h0_DBR, call.c0_DBH
    outputs = []
    for piece in x.split(most):
        output, h, c = run_network(_network(call, piece, h, c))
        outputs.append(output)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs), h, c


def _hold_cell_after_end(
    x_TBI: Tensor, active_TB1: Tensor, w: DirectionWeights
) -> tuple[Tensor, DirectionWeights]:
    """Make the cell state of an ended sequence stand still, inside kernels that know no lengths.

    One more input feature is 1 beyond the end; its weights shut the input and output gates and
    open the forget gate, so c_t = 1·c_{t-1} + 0 and h_t = 0 exactly, and no gradient passes.
    """
    extra = 1
    if x_TBI.is_cuda:
        extra = TENSOR_CORE_MULTIPLE - x_TBI.shape[-1] % TENSOR_CORE_MULTIPLE
    ended = (~active_TB1).to(x_TBI.dtype)
    hidden = w.w_ih.shape[0] // 4
    column = w.w_ih.new_zeros(4, hidden, extra)
    for gate, value in enumerate((-SATURATING, SATURATING, 0.0, -SATURATING)):
        column[gate, :, 0] = value
    x = torch.cat([x_TBI, F.pad(ended, (0, extra - 1))], -1)
    return x, replace(w, w_ih=torch.cat([w.w_ih, column.view(4 * hidden, extra)], 1))


def _turned(steps: int, lengths: Tensor | None, device: torch.device) -> Tensor:
    """Index over time that reverses each sequence within its length; its own inverse."""
    time_T1 = torch.arange(steps, device=device).unsqueeze(1)
    if lengths is None:
        return (steps - 1 - time_T1).unsqueeze(-1)
    ends_1B = lengths.unsqueeze(0)
    return torch.where(time_T1 < ends_1B, ends_1B - 1 - time_T1, time_T1).unsqueeze(-1)


def _along_time(x_TBF: Tensor, index_TB1: Tensor) -> Tensor:
    return x_TBF.gather(0, index_TB1.expand(x_TBF.shape))


class Aten:
    name = "aten"
    summary = "torch's own kernels: cuDNN on CUDA, oneDNN or ATen on the CPU"

    def unavailable(self) -> str | None:
        return None

    def refuse(self, spec: RnnSpec) -> str | None:
        wanted = (
            (spec.resets, "its kernels have no resets inside a sequence"),
            (spec.layer_norm, "its kernels have no layer norm"),
            (spec.zoneout, "its kernels have no zoneout"),
            (spec.cell_states, "its kernels return only the last cell state"),
            (
                spec.keep != "auto",
                f"keep={spec.keep!r} was asked for, and its kernels decide themselves what to keep",
            ),
            (spec.forward_mode, "its kernels have no forward-mode derivative"),
            (spec.transformed, "torch.func transforms cannot see through its kernels"),
            (
                spec.device not in ("cpu", "cuda"),
                f"it is tested on cpu and cuda, not on {spec.device}",
            ),
        )
        return next((reason for asked, reason in wanted if asked), None)

    def keeps(self, spec: RnnSpec) -> str:
        return "none"

    def forward(self, call: LayerCall) -> LayerResult:
        with torch.no_grad(), torch.autocast(call.input_TBI.device.type, enabled=False):
            return run_layer(call)

    def backward(
        self, call: LayerCall, result: LayerResult, grads: ResultGrads, ask: BackwardRequest
    ) -> CallGrads:
        """Runs the layer again: what ATen's kernels keep is opaque, so an op cannot return it."""
        if ask.samples > 1:
            return sample_by_sample(self, call, result, grads, ask)
        with autograd_inside_an_operator(call.input_TBI.device.type):
            return _run_again(call, grads, ask.needs_input)


def _run_again(call: LayerCall, grads: ResultGrads, needs_input: bool) -> CallGrads:
    x = call.input_TBI.detach().requires_grad_(needs_input)
    h0 = call.h0_DBR.detach().requires_grad_()
    c0 = None if call.c0_DBH is None else call.c0_DBH.detach().requires_grad_()
    weights = tuple(w.map(lambda t: t.detach().requires_grad_()) for w in call.weights)
    again = run_layer(replace(call, input_TBI=x, h0_DBR=h0, c0_DBH=c0, weights=weights))
    outputs = (again.output_TBO, again.h_n_DBR, again.c_n_DBH)
    pairs = zip(outputs, grads[:3], strict=True)
    arrived = [(o, g) for o, g in pairs if o is not None and g is not None]
    inputs = ([x] if needs_input else []) + [h0] + ([] if c0 is None else [c0])
    found = iter(
        torch.autograd.grad(
            [o for o, _ in arrived],
            inputs + [part for w in weights for part in present(w)],
            [g for _, g in arrived],
            materialize_grads=True,
        )
    )
    return CallGrads(
        next(found) if needs_input else None,
        next(found),
        None if c0 is None else next(found),
        list(found),
    )


@contextmanager
def autograd_inside_an_operator(device: str) -> Iterator[None]:
    """Let autograd record within an operator's own run, where the dispatcher switched it off."""
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        exclude = exclude.remove(getattr(torch._C.DispatchKey, key))
    include = torch._C._dispatch_tls_local_include_set()
    with (
        torch._C._ForceDispatchKeyGuard(include, exclude),
        torch.enable_grad(),
        torch.autocast(device, enabled=False),
    ):
        yield
