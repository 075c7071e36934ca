"""A layer forwards by the persistent kernel, piece by piece of time: a product with the input, then
one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from ecornn.backends.persistent_calls import (
    Launch,
    Piece,
    aligned,
    beside_output,
    check_weights,
    flags,
    is_aligned,
    launches,
    marked,
    pieces,
    run,
    small_bytes,
    through_l2,
)
from ecornn.backends.protocol import LayerCall, LayerResult
from ecornn.kernels.persistent.arguments import ForwardArguments
from ecornn.spec import GATES

#: Where the gates are not kept, their buffer is at most this part of T·B·G·H.
SHARE = 0.5


class _Tensors:
    """Everything of one call that the launches read and write."""

    def __init__(self, call: LayerCall, every: list[Launch]) -> None:
        x, h0, directions = call.input_TBI, call.h0_DBR, call.directions
        steps, batch, hidden = x.shape[0], x.shape[1], h0.shape[-1]
        lstm = call.cell == "lstm"
        row = directions * hidden
        self.x = x.contiguous()
        self.h0, self.c0 = aligned(h0), None if call.c0_DBH is None else call.c0_DBH.contiguous()
        self.lengths = None if call.lengths_B is None else call.lengths_B.contiguous()
        self.resets = None if call.resets_TB is None else call.resets_TB.contiguous()
        self.weights = call.weights
        if not all(is_aligned(part) for part in call.flat_weights()):
            self.weights = tuple(w.map(aligned) for w in call.weights)
        beside = beside_output(every[0].launcher.geometry.tile, hidden) if every else None
        shares = through_l2(every) and beside is None
        self.output = marked((steps, batch, row), x) if shares else x.new_empty(steps, batch, row)
        self.exchange: list[Tensor] = []
        if beside is not None:
            shape = (steps, batch, beside.width)
            self.exchange = [marked(shape, x, beside.dtype) for _ in range(directions)]
        with_cells = lstm and (call.cell_states or call.keep != "none")
        self.cells = x.new_empty(steps, batch, row) if with_cells else None
        self.kept: list[Tensor] = []
        if call.keep == "gates" and call.cell == "gru":
            self.kept = [x.new_empty(steps, batch, 4 * hidden) for _ in call.weights]
        self.h_n = torch.empty_like(self.h0)
        self.c_n = None if self.c0 is None else torch.empty_like(self.c0)

    def arguments(self, call: LayerCall, piece: Piece) -> ForwardArguments:
        """What is the same for all launches of a piece, without its gates and carried states."""
        a = ForwardArguments()
        size = self.output.element_size()
        hidden = self.h0.shape[-1]
        for d, w in enumerate(self.weights):
            a.weights[d] = w.w_hh.data_ptr()
            if w.b_ih is not None and w.b_hh is not None:
                a.b_ih[d], a.b_hh[d] = w.b_ih.data_ptr(), w.b_hh.data_ptr()
            a.output[d] = self.output.data_ptr() + d * hidden * size
            a.exchange[d] = self.exchange[d].data_ptr() if self.exchange else a.output[d]
            if self.cells is not None:
                a.cells[d] = self.cells.data_ptr() + d * hidden * size
            if self.kept:
                a.kept[d] = self.kept[d].data_ptr()
        a.h0 = self.h0.data_ptr()
        a.c0 = 0 if self.c0 is None else self.c0.data_ptr()
        a.lengths = 0 if self.lengths is None else self.lengths.data_ptr()
        a.resets = 0 if self.resets is None else self.resets.data_ptr()
        a.steps, a.first_step, a.total = piece.steps, piece.first_step, piece.total
        a.batch, a.hidden = self.output.shape[1], hidden
        a.output_row = self.output.shape[2]
        a.exchange_row = (self.exchange[0] if self.exchange else self.output).shape[2]
        a.flags = flags(call)
        return a


def forward(call: LayerCall) -> LayerResult:
    check_weights(call)
    every = launches("forward", call)
    t = _Tensors(call, every)
    gate_rows = GATES[call.cell] * t.h0.shape[-1]
    steps, batch = t.output.shape[:2]
    every_piece = forward_pieces(call)
    buffers: list[Tensor] = []
    if len(every_piece) > 1:
        rows = every_piece[0].steps * batch
        buffers = [t.x.new_empty(rows, gate_rows) for _ in call.weights]
    h_in, c_in = t.h0, None
    for piece in every_piece:
        products = _input_products(t, piece, buffers)
        if _in_place(call):
            t.kept = [gates.view(steps, batch, gate_rows) for gates in products]
        a = t.arguments(call, piece)
        for d, gates in enumerate(products):
            a.gates[d] = gates.data_ptr()
        h_out = t.h_n if piece.last else torch.empty_like(t.h0)
        c_out = None
        a.h_in, a.h_out = h_in.data_ptr(), h_out.data_ptr()
        if t.c0 is not None and t.c_n is not None:
            a.c_in = 0 if c_in is None else c_in.data_ptr()
            c_out = None if piece.last else t.c0.new_empty(t.c0.shape, dtype=torch.float32)
            a.c_n, a.c_out = (t.c_n.data_ptr(), 0) if c_out is None else (0, c_out.data_ptr())
        run(every, a)
        h_in, c_in = h_out, c_out
    return LayerResult(t.output, t.h_n, t.c_n, t.cells, t.kept)


def _in_place(call: LayerCall) -> bool:
    """Kept gates of an LSTM stand where its gates' inputs stood."""
    return call.keep == "gates" and call.cell != "gru"


def forward_pieces(call: LayerCall) -> list[Piece]:
    """All of time in one where there is no buffer of gates to save."""
    x, gate_rows = call.input_TBI, GATES[call.cell] * call.h0_DBR.shape[-1]
    row_bytes = call.directions * x.shape[1] * gate_rows * x.element_size()
    share = 1.0 if _in_place(call) else SHARE
    return pieces(x.shape[0], row_bytes, share, small=small_bytes(call.keep))


def _input_products(t: _Tensors, piece: Piece, buffers: list[Tensor]) -> list[Tensor]:
    """The input's share of the gates of each direction, as rows."""
    if not buffers:
        rows = t.x.flatten(0, 1)
        return [torch.mm(rows, w.w_ih.T) for w in t.weights]
    found = []
    for d, w in enumerate(t.weights):
        start, stop = piece.times(descending=d == 1)
        gates = buffers[d][: piece.steps * t.x.shape[1]]
        found.append(torch.mm(t.x[start:stop].flatten(0, 1), w.w_ih.T, out=gates))
    return found
