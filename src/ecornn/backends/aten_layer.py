"""One recurrent layer by torch's own kernels, with lengths and any number of steps.

Shape suffixes: see `protocol`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ecornn.backends.aten_network import NetworkCall, run_network
from ecornn.backends.aten_rows import Run, costs_of, rows_of, run_rows
from ecornn.backends.protocol import LayerCall, LayerResult
from ecornn.kernels.reference import DirectionWeights

#: cuDNN fails beyond this many steps (pytorch#133751); longer sequences run in pieces.
CUDNN_MOST_STEPS = 65_535

#: Half-precision tensor cores want the inner dimension of a product in multiples of this.
TENSOR_CORE_MULTIPLE = 8


def run_layer(call: LayerCall) -> LayerResult:
    """One layer, recorded by autograd; with ends or resets each direction is a call of its own."""
    limited = call.input_TBI.is_cuda and call.input_TBI.shape[0] > CUDNN_MOST_STEPS
    if call.lengths_B is None and call.resets_TB is None and not limited:
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
    """One direction as a forward run, turned around within its ends where it is the reverse one."""
    lengths, steps = call.lengths_B, call.input_TBI.shape[0]
    if call.resets_TB is None and (lengths is None or call.input_TBI.is_cuda):
        # no need to read the lengths, which would make the host wait for the device
        turned = replace(call, input_TBI=_turned(call.input_TBI, lengths)) if reverse else call
        output, h_n, c_n = _run_in_pieces(turned) if lengths is None else _run_held(turned, lengths)
        output = _turned(output, lengths) if reverse else output
    else:
        rows = rows_of(call, reverse=reverse)
        output, h_n, c_n = run_rows(call, rows, _run_stretch, costs_of(call))
    if lengths is not None:
        rest = torch.zeros_like(h_n)
        if call.after_end == "frozen":
            rest = call.h0_DBR if reverse else h_n
        output = torch.where(_active(steps, lengths), output, rest)
    return output, h_n, c_n


def _run_stretch(call: LayerCall, lengths_B: Tensor | None) -> Run:
    """Forwards; output and h_n beyond an end are not defined, c_n is the one at the end."""
    if lengths_B is not None and call.cell == "lstm":
        active_TB1 = _active(call.input_TBI.shape[0], lengths_B)
        x, weights = _hold_cell_after_end(call.input_TBI, active_TB1, call.weights[0])
        call = replace(call, input_TBI=x, weights=(weights,))
    return _run_in_pieces(call)


def _run_in_pieces(call: LayerCall) -> Run:
    """A sequence beyond cuDNN's limit, one piece after another."""
    outputs = []
    h, c = call.h0_DBR, call.c0_DBH
    for piece in call.input_TBI.split(CUDNN_MOST_STEPS):
        output, h, c = _run_plain(replace(call, input_TBI=piece, h0_DBR=h, c0_DBH=c))
        outputs.append(output)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs), h, c


def _run_held(call: LayerCall, lengths_B: Tensor) -> Run:
    """All steps of all sequences, each one's last state at its own end."""
    # whatever lies beyond the end, NaN included, must not reach a product
    active_TB1 = _active(call.input_TBI.shape[0], lengths_B)
    x = torch.where(active_TB1, call.input_TBI, call.input_TBI.new_zeros(()))
    output, _, c_n = _run_stretch(replace(call, input_TBI=x), lengths_B)
    last_1BR = (lengths_B - 1).clamp(min=0).view(1, -1, 1).expand(1, -1, output.shape[-1])
    begun_1B1 = (lengths_B > 0).view(1, -1, 1)
    h_n = torch.where(begun_1B1, output.gather(0, last_1BR), call.h0_DBR)
    return output, h_n, c_n


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
    # drives a sigmoid to exactly 0 or 1 whatever the rest of the gate is, and stays finite
    most = torch.finfo(w.w_ih.dtype).max / 4
    for gate, value in enumerate((-most, most, 0.0, -most)):
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
    # whole rows by their number: copies of memory, where a gather over time goes value by value
    rows = turned_TB * batch + torch.arange(batch, device=x_TBF.device)
    flat = x_TBF.reshape(steps * batch, features).index_select(0, rows.flatten())
    return flat.view(steps, batch, features)
