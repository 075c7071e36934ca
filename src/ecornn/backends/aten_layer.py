"""One recurrent layer by torch's own kernels, with lengths and any number of steps.

Shape suffixes: see `protocol`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ecornn.backends.aten_network import NetworkCall, run_network
from ecornn.backends.protocol import LayerCall, LayerResult
from ecornn.kernels.reference import DirectionWeights

#: cuDNN fails beyond this many steps (pytorch#133751); longer sequences run in pieces.
CUDNN_MOST_STEPS = 65_535

#: Drives a sigmoid to exactly 0 or 1 in every dtype, and is finite in float16.
SATURATING = 1e4

#: Half-precision tensor cores want the inner dimension of a product in multiples of this.
TENSOR_CORE_MULTIPLE = 8

#: On the CPU a batch of mixed lengths runs in this many stretches of time, each without the
#: sequences that have ended: for even lengths 5/8 of the padded work. More stretches save little,
#: and each new shape costs oneDNN half a millisecond to prepare.
STRETCHES = 4
LEAST_STRETCH = 16

#: (output, h_n, c_n) of one direction: (T, B, R), (1, B, R), (1, B, H).
Run = tuple[Tensor, Tensor, Tensor | None]


def run_layer(call: LayerCall) -> LayerResult:
    """One layer, recorded by autograd; with lengths every direction is a call of its own."""
    limited = call.input_TBI.is_cuda and call.input_TBI.shape[0] > CUDNN_MOST_STEPS
    if call.lengths_B is None and not limited:
        output, h_n, c_n = _run_plain(call)
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


def _run_plain(call: LayerCall) -> Run:
    """The call as if it had no lengths."""
    weights = call.flat_weights()
    states = [call.h0_DBR] if call.c0_DBH is None else [call.h0_DBR, call.c0_DBH]
    return run_network(
        NetworkCall(
            cell=call.cell,
            input_TBI=call.input_TBI,
            h0=call.h0_DBR,
            c0=call.c0_DBH,
            weights=weights,
            bias=call.weights[0].b_ih is not None,
            layers=1,
            bidirectional=call.directions == 2,
            dropout=0.0,
            needs_grad=torch.is_grad_enabled()
            and any(t.requires_grad for t in (call.input_TBI, *states, *weights)),
        )
    )


def _run_direction(call: LayerCall, *, reverse: bool) -> Run:
    """One direction as a forward run: a reverse one on input turned around within its length."""
    steps, lengths = call.input_TBI.shape[0], call.lengths_B
    if reverse:
        call = replace(call, input_TBI=_turned(call.input_TBI, lengths))
    if lengths is None:
        output, h_n, c_n = _run_in_pieces(call)
    elif call.input_TBI.is_cuda:
        # reading the lengths would make the host wait for the device
        output, h_n, c_n = _run_held(call, lengths)
    else:
        output, h_n, c_n = _run_in_stretches(call, lengths)
    if reverse:
        output = _turned(output, lengths)
    if lengths is not None and call.after_end == "frozen":
        output = torch.where(_active(steps, lengths), output, call.h0_DBR if reverse else h_n)
    return output, h_n, c_n


def _run_in_pieces(call: LayerCall) -> Run:
    """A sequence beyond cuDNN's limit, one piece after another."""
    outputs = []
    h, c = call.h0_DBR, call.c0_DBH
    for piece in call.input_TBI.split(CUDNN_MOST_STEPS):
        output, h, c = _run_plain(replace(call, input_TBI=piece, h0_DBR=h, c0_DBH=c))
        outputs.append(output)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs), h, c


def _run_in_stretches(call: LayerCall, lengths_B: Tensor) -> Run:
    """Longest sequences first, so that those still running are always the first rows."""
    order = lengths_B.argsort(descending=True, stable=True)
    in_order = bool((order[1:] > order[:-1]).all())
    call = call if in_order else _rows(call, order)
    ends = lengths_B[order]

    steps, batch, _ = call.input_TBI.shape
    h, c = call.h0_DBR, call.c0_DBH
    outputs: list[Tensor] = []
    ended_h: list[Tensor] = []
    ended_c: list[Tensor] = []
    start = 0
    for stop in stretch_ends(ends.tolist()):
        running = int((ends > start).sum())
        ended_h.append(h[:, running:])
        h = h[:, :running]
        if c is not None:
            ended_c.append(c[:, running:])
            c = c[:, :running]
        left = (ends[:running] - start).clamp(max=stop - start)
        stretch = replace(call, input_TBI=call.input_TBI[start:stop, :running], h0_DBR=h, c0_DBH=c)
        ragged = int(left[-1]) < stop - start
        output, h, c = _run_held(stretch, left) if ragged else _run_plain(stretch)
        outputs.append(F.pad(output, (0, 0, 0, batch - running)))
        start = stop
    if start < steps:
        outputs.append(h.new_zeros(steps - start, batch, h.shape[-1]))
    output = torch.cat(outputs)
    h_n = torch.cat([h, *reversed(ended_h)], 1)
    c_n = None if c is None else torch.cat([c, *reversed(ended_c)], 1)
    if in_order:
        return output, h_n, c_n
    back = order.argsort()
    return (
        output.index_select(1, back),
        h_n.index_select(1, back),
        None if c_n is None else c_n.index_select(1, back),
    )


def stretch_ends(descending_ends: list[int]) -> list[int]:
    """Where to stop and drop the sequences that have ended: at quantiles of the lengths."""
    ascending = descending_ends[::-1]
    batch = len(ascending)
    found: list[int] = []
    for k in range(1, STRETCHES + 1):
        end = ascending[batch * k // STRETCHES - 1] if batch * k >= STRETCHES else 0
        if end >= (found[-1] if found else 0) + LEAST_STRETCH:
            found.append(end)
    longest = ascending[-1] if ascending else 0
    if longest > 0 and (not found or found[-1] < longest):
        found.append(longest)
    return found


def _rows(call: LayerCall, order: Tensor) -> LayerCall:
    return replace(
        call,
        input_TBI=call.input_TBI.index_select(1, order),
        h0_DBR=call.h0_DBR.index_select(1, order),
        c0_DBH=None if call.c0_DBH is None else call.c0_DBH.index_select(1, order),
    )


def _run_held(call: LayerCall, lengths_B: Tensor) -> Run:
    """All steps of all sequences in one call; zeros beyond each end."""
    active_TB1 = _active(call.input_TBI.shape[0], lengths_B)
    # whatever lies beyond the end, NaN included, must not reach a product
    x = torch.where(active_TB1, call.input_TBI, call.input_TBI.new_zeros(()))
    weights = call.weights[0]
    if call.cell == "lstm":
        x, weights = _hold_cell_after_end(x, active_TB1, weights)
    output, _, c_n = _run_in_pieces(replace(call, input_TBI=x, weights=(weights,)))
    last_1BR = (lengths_B - 1).clamp(min=0).view(1, -1, 1).expand(1, -1, output.shape[-1])
    begun_1B1 = (lengths_B > 0).view(1, -1, 1)
    h_n = torch.where(begun_1B1, output.gather(0, last_1BR), call.h0_DBR)
    return torch.where(active_TB1, output, output.new_zeros(())), h_n, c_n


def _hold_cell_after_end(
    x_TBI: Tensor, active_TB1: Tensor, w: DirectionWeights
) -> tuple[Tensor, DirectionWeights]:
    """Make the cell state of an ended sequence stand still, inside kernels that know no lengths.

    One more input feature is 1 beyond the end; its weights shut the input and output gates and
    open the forget gate, so c_t = 1·c_{t-1} + 0 and h_t = 0, and no gradient passes.
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


def _active(steps: int, lengths_B: Tensor) -> Tensor:
    time_T1 = torch.arange(steps, device=lengths_B.device).unsqueeze(1)
    return (time_T1 < lengths_B.unsqueeze(0)).unsqueeze(-1)


def _turned(x_TBF: Tensor, lengths_B: Tensor | None) -> Tensor:
    """Each sequence reversed within its length; its own inverse."""
    if lengths_B is None:
        return x_TBF.flip(0)
    steps, batch, features = x_TBF.shape
    time_T1 = torch.arange(steps, device=x_TBF.device).unsqueeze(1)
    ends_1B = lengths_B.unsqueeze(0)
    turned_TB = torch.where(time_T1 < ends_1B, ends_1B - 1 - time_T1, time_T1)
    # whole rows by their number: three times as fast as a gather over time
    rows = turned_TB * batch + torch.arange(batch, device=x_TBF.device)
    flat = x_TBF.reshape(steps * batch, features).index_select(0, rows.flatten())
    return flat.view(steps, batch, features)
