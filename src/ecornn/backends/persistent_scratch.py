"""What the persistent backend takes beside a call's results and gives back, for whoever foretells
memory: the buffers of `persistent_forward` and `persistent_backward`, by their sizes alone."""

from __future__ import annotations

from ecornn.backends.persistent_backward import recomputed_in
from ecornn.backends.persistent_calls import beside_output, padded, sizes_at_once
from ecornn.backends.persistent_forward import forward_pieces
from ecornn.backends.persistent_products import is_copied, is_many
from ecornn.backends.protocol import LayerCall, Scratch
from ecornn.kernels.persistent.choose import Request, candidates, measured, serves
from ecornn.kernels.persistent.device import chip, numbers_of, unavailable
from ecornn.kernels.persistent.tile import Tile
from ecornn.spec import GATES


def scratch_of(call: LayerCall) -> Scratch:
    """At the moment at which most is there. Small ones are left out: states between pieces of time,
    sums of columns, copies of weights that are not aligned."""
    return Scratch(_forward(call), *_backward(call))


def _forward(call: LayerCall) -> int:
    """The input's share of the gates, unless it is kept, and what is exchanged where the output
    cannot be."""
    steps, batch, hidden, size = _sizes(call)
    shares = 0
    if call.keep != "gates" or call.cell == "gru":
        rows = forward_pieces(call)[0].steps * batch
        shares = rows * GATES[call.cell] * hidden
    return call.directions * (shares * size + steps * batch * _exchanged_row(call))


def _exchanged_row(call: LayerCall) -> int:
    """Bytes of what is exchanged beside the output, for a step of a sequence."""
    hidden, size = call.h0_DBR.shape[-1], call.input_TBI.element_size()
    width, tile = padded(hidden, call.input_TBI.dtype), _tile(call)
    if tile is not None and tile.exchanged_bytes < size:
        beside = beside_output(tile, hidden)
        return 0 if beside is None else beside.width * tile.exchanged_bytes
    return 0 if width == hidden else width * size


def _tile(call: LayerCall) -> Tile | None:
    """Of a forward pass, if it was measured: what was not exchanges what the output is of. Found as
    the launches are, but that the driver is not asked."""
    batch, numbers = call.input_TBI.shape[1], numbers_of(call.input_TBI.dtype)
    if numbers is None or type(batch) is not int or not batch or unavailable():
        return None
    here = chip(call.input_TBI.device.index or 0)
    for size in sizes_at_once(batch):
        for together in range(call.directions, 0, -1):
            sizes = (call.cell, numbers, call.h0_DBR.shape[-1], size, together)
            ask = Request("forward", *sizes)
            known = measured(ask)
            if known is not None and serves(known, ask, here):
                return known.tile
            if next(candidates(ask, here), None) is not None:
                return None
    return None


def _backward(call: LayerCall) -> tuple[int, int]:
    """The gates, where they are computed again, their gradients, and, of several pieces of time,
    the weights' gradients in float32: beside the layer's gradients, and before there are any. The
    gates of the only piece are given back before."""
    steps, batch, hidden, size = _sizes(call)
    stored = 4 if call.cell in ("lstm", "gru") else 1
    again = stored == 4 and call.keep != "gates"
    pieces = recomputed_in(call) if again else []
    several = len(pieces) > 1
    rows = (pieces[0].steps if again else steps) * batch
    gates = call.directions * rows * stored * hidden
    width = padded(hidden, call.input_TBI.dtype)
    exchanged = 0 if width == hidden else call.directions * rows * GATES[call.cell] * width
    # and the states that entered the first steps, with the initial one
    entering = rows * hidden
    before = gates + entering + gates * again + exchanged
    of_weights, of_input, of_state = _copied(call, rows)
    if several:
        values = before + max(of_weights, of_input, of_state)
    else:  # these are there before the state's weights already where gates were made of them
        values = gates + max(entering + of_state, entering * again + max(of_weights, of_input))
    if several and call.cell == "gru":
        values += rows * 3 * hidden  # a product that is copied into the gates
    sums = sum(w.w_ih.numel() + w.w_hh.numel() for w in call.weights) if several else 0
    return values * size + sums * (4 - size), before * size


def _copied(call: LayerCall, rows: int) -> tuple[int, int, int]:
    """Of products backwards, the factor that is stored column by column, where one is: for the
    gradient of the input, of its weights and of the state's."""
    x, hidden = call.input_TBI, call.h0_DBR.shape[-1]
    inputs, gates = x.shape[2], GATES[call.cell] * hidden
    precision = numbers_of(x.dtype) or ""

    def copied(rows: int, columns: int, outer: int) -> int:
        return rows * columns if is_copied(x, rows, columns, outer, precision) else 0

    weights = copied(gates, inputs, rows) if is_many(rows, gates) else 0
    return weights, copied(rows, inputs, gates), copied(rows, hidden, gates)


def _sizes(call: LayerCall) -> tuple[int, int, int, int]:
    steps, batch = call.input_TBI.shape[:2]
    return steps, batch, call.h0_DBR.shape[-1], call.input_TBI.element_size()
