"""A layer backwards by the persistent kernel, piece by piece of time.

For each piece: the gates' pre-activations (kept, or recomputed by two large products), one launch
that gives the gates' gradients, and large products of those for everything else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ecornn.backends.persistent_calls import (
    Launch,
    Piece,
    aligned,
    column_sums,
    flags,
    launches,
    marked,
    padded,
    pieces,
    run,
    through_l2,
)
from ecornn.backends.persistent_gradients import AtOnce
from ecornn.backends.persistent_products import right_factor, weights_as_factor
from ecornn.backends.protocol import BackwardRequest, CallGrads, LayerCall, LayerResult, ResultGrads
from ecornn.backends.reference import problem_of
from ecornn.kernels.persistent.arguments import BackwardArguments
from ecornn.kernels.products import product_in
from ecornn.kernels.reference.backward import entering_states
from ecornn.kernels.reference.problem import DirectionWeights, Masks, input_of, masks
from ecornn.spec import GATES

#: The buffers of gates and of their gradients are together at most this part of T·B·8H.
SHARE = 0.2


def recomputed_in(call: LayerCall) -> list[Piece]:
    """The pieces of time in which an LSTM's or a GRU's gates are computed again."""
    x, hidden = call.input_TBI, call.h0_DBR.shape[-1]
    row_bytes = call.directions * x.shape[1] * 4 * hidden * x.element_size()
    return pieces(x.shape[0], row_bytes, SHARE, 2)  # gates and their gradients


class _Layer:
    """One call, what the forward pass left of it, and the gradients that arrive."""

    def __init__(self, call: LayerCall, result: LayerResult, grads: ResultGrads) -> None:
        self.call = call
        self.cell, self.directions = call.cell, call.directions
        self.hidden = call.h0_DBR.shape[-1]
        self.gates = GATES[call.cell]
        #: Gradients a unit has: a GRU's candidate has two.
        self.stored = 4 if call.cell in ("lstm", "gru") else 1
        self.x = call.input_TBI.contiguous()
        self.steps, self.batch = self.x.shape[0], self.x.shape[1]
        self.h0 = call.h0_DBR.contiguous()
        self.c0 = None if call.c0_DBH is None else call.c0_DBH.contiguous()
        self.output = result.output_TBO.contiguous()
        self.kept = [kept.contiguous() for kept in result.kept]
        self.cells = None if result.cells_TBE is None else result.cells_TBE.contiguous()
        self.grads = ResultGrads(*(None if g is None else g.contiguous() for g in grads))
        self.lengths = None if call.lengths_B is None else call.lengths_B.contiguous()
        self.resets = None if call.resets_TB is None else call.resets_TB.contiguous()
        self.weights = call.weights
        self.w_hh = [aligned(w.w_hh) for w in call.weights]
        self.biases = [
            None if w.b_ih is None or w.b_hh is None else (w.b_ih.contiguous(), w.b_hh.contiguous())
            for w in call.weights
        ]
        self._entering: tuple[tuple[int, int, int], Tensor] | None = None
        self.masks = [Masks(None, None)] * self.directions
        if call.lengths_B is not None or call.resets_TB is not None:
            self.masks = [masks(problem_of(call, d), self.steps) for d in range(self.directions)]

    def entering_h(self, d: int, start: int, stop: int) -> Tensor:
        """The states that entered the steps [start, stop) of direction d, as rows."""
        key = (d, start, stop)
        if self._entering is not None and self._entering[0] == key:
            return self._entering[1]
        found = self._find_entering(d, start, stop)
        if self.directions == 1:  # asked for twice, before and after the launch
            self._entering = (key, found)
        return found

    def forget(self) -> None:
        self._entering = None

    def _find_entering(self, d: int, start: int, stop: int) -> Tensor:
        own = self.output.narrow(2, d * self.hidden, self.hidden)
        plain = self.masks[d] == Masks(None, None)
        if plain and d == 0 and start > 0:
            return own[start - 1 : stop - 1].flatten(0, 1)
        if plain and d == 1 and stop < self.steps:
            return own[start + 1 : stop + 1].flatten(0, 1)
        problem = problem_of(self.call, d)
        found = entering_states(self.h0[d], own, problem, self.masks[d], start, stop)
        return found.flatten(0, 1)

    def input_rows(self, d: int, start: int, stop: int) -> Tensor:
        """Without what lies beyond the sequences' ends: 0 · NaN would reach the weights."""
        return input_of(self.x, self.masks[d], start, stop, self.x.dtype).flatten(0, 1)

    def recompute(self, d: int, start: int, stop: int, gates: Tensor) -> None:
        """Pre-activations of [start, stop) without biases, as the kernel reads them."""
        x, h, w = self.input_rows(d, start, stop), self.entering_h(d, start, stop), self.weights[d]
        if self.cell != "gru":
            torch.mm(x, w.w_ih.T, out=gates)
            torch.addmm(gates, h, w.w_hh.T, out=gates)
            return
        both, three = 2 * self.hidden, 3 * self.hidden
        gates[:, :three] = x @ w.w_ih.T
        gates[:, :both] += h @ w.w_hh[:both].T
        gates[:, three:] = h @ w.w_hh[both:].T

    def arguments(self, piece: Piece) -> BackwardArguments:
        a = BackwardArguments()
        size = self.output.element_size()
        tensors = (
            (a.output, self.output),
            (a.cells, self.cells),
            (a.d_output, self.grads.output_TBO),
            (a.d_cells, self.grads.cells_TBE),
        )
        for d in range(self.directions):
            a.weights[d] = self.w_hh[d].data_ptr()
            for place, tensor in tensors:
                if tensor is not None:
                    place[d] = tensor.data_ptr() + d * self.hidden * size
        a.h0 = self.h0.data_ptr()
        a.c0 = 0 if self.c0 is None else self.c0.data_ptr()
        a.d_h_n = 0 if self.grads.h_n_DBR is None else self.grads.h_n_DBR.data_ptr()
        a.d_c_n = 0 if self.grads.c_n_DBH is None else self.grads.c_n_DBH.data_ptr()
        a.lengths = 0 if self.lengths is None else self.lengths.data_ptr()
        a.resets = 0 if self.resets is None else self.resets.data_ptr()
        a.steps, a.first_step, a.total = piece.steps, piece.first_step, piece.total
        a.batch, a.hidden, a.output_row = self.batch, self.hidden, self.output.shape[2]
        a.flags = flags(self.call)
        return a


class _States:
    """The gradient of the states on its way back through the pieces."""

    def __init__(self, layer: _Layer) -> None:
        self.layer = layer
        self.d_h: Tensor | None = None
        self.d_c: Tensor | None = None
        self.before: tuple[Tensor | None, Tensor | None] = (None, None)
        self.h_initial: Tensor | None = None
        self.c_initial: Tensor | None = None
        if layer.resets is not None and layer.call.reset_to == "initial":
            self.h_initial = torch.zeros_like(layer.h0, dtype=torch.float32)
            self.c_initial = torch.zeros_like(self.h_initial)

    def pass_through(self, a: BackwardArguments, piece: Piece) -> None:
        """Put the states' gradients into a launch, and take those that leave it."""
        layer = self.layer
        # held until the next piece: memory given back now could be overwritten before the launch
        self.before = (self.d_h, self.d_c)
        a.d_h_in, a.d_c_in = (0 if t is None else t.data_ptr() for t in self.before)
        # the kernel rounds the result, unless more is to be added to it
        rounded = piece.last and self.h_initial is None
        dtype = layer.h0.dtype if rounded else torch.float32
        self.d_h = torch.empty_like(layer.h0, dtype=dtype)
        self.d_c = None if layer.c0 is None else torch.empty_like(self.d_h)
        places = (self.d_h.data_ptr(), 0 if self.d_c is None else self.d_c.data_ptr())
        if rounded:
            a.d_h0, a.d_c0 = places
        else:
            a.d_h_out, a.d_c_out = places
        if self.h_initial is not None and self.c_initial is not None:
            a.d_h_initial, a.d_c_initial = self.h_initial.data_ptr(), self.c_initial.data_ptr()

    def at_start(self) -> tuple[Tensor, Tensor | None]:
        assert self.d_h is not None
        if self.h_initial is None or self.c_initial is None:
            return self.d_h, self.d_c
        dtype = self.layer.h0.dtype
        d_h = (self.d_h + self.h_initial).to(dtype)
        return d_h, None if self.d_c is None else (self.d_c + self.c_initial).to(dtype)


class _WeightGrads:
    """Sums over the pieces, in float32 where there are several."""

    def __init__(self, dtype: torch.dtype, several: bool) -> None:
        self.dtype = dtype
        self.widened = several and dtype != torch.float32
        self.sums: dict[tuple[int, str], Tensor] = {}

    def product(self, d: int, name: str, rows: Tensor, columns: Tensor) -> None:
        dtype = torch.float32 if self.widened else self.dtype
        right = right_factor([columns], rows.shape[1])
        self.sums[d, name] = product_in(dtype, rows.T, right, self.sums.get((d, name)))

    def column_sums(self, d: int, rows: Tensor) -> None:
        value, found = column_sums(rows), self.sums.get((d, "biases"))
        self.sums[d, "biases"] = value if found is None else found.add_(value)

    def of(self, d: int, w: DirectionWeights, hidden: int, gru: bool) -> list[Tensor]:
        def state(found: Tensor) -> Tensor:
            # a GRU's back from (n, r, z)
            return torch.cat([found[hidden:], found[:hidden]]) if gru else found

        found = [self.sums[d, "w_ih"].to(self.dtype), state(self.sums[d, "w_hh"].to(self.dtype))]
        if w.b_ih is not None:
            to_input, to_state = self.sums[d, "biases"].to(self.dtype)
            if gru:
                to_input, to_state = to_input[hidden:], to_state[: 3 * hidden]
            found += [to_input, state(to_state)]
        return found


def backward(
    call: LayerCall, result: LayerResult, grads: ResultGrads, ask: BackwardRequest
) -> CallGrads:
    layer, every = _Layer(call, result, grads), launches("backward", call)
    x, hidden, batch, stored = layer.x, layer.hidden, layer.batch, layer.stored
    recomputes = stored == 4 and not layer.kept
    wide = stored * hidden
    # kept gates leave only the gradients' buffer, which is not cut
    whole = [Piece(0, layer.steps, layer.steps)]
    every_piece = recomputed_in(call) if recomputes else whole
    rows = every_piece[0].steps * batch
    gates = [x.new_empty(rows, wide) for _ in call.weights] if recomputes else []
    states = _States(layer)
    sums = _WeightGrads(x.dtype, len(every_piece) > 1)
    # both directions add to the input's gradient, and reach a time in different pieces
    adds = layer.directions == 2 and len(every_piece) > 1
    d_input: Tensor | None = None
    alone = layer.directions == 1 and len(every_piece) == 1 and layer.masks[0] == Masks(None, None)
    at_once = alone and AtOnce.serves(layer.cell, x, hidden)
    for piece in every_piece:
        a = layer.arguments(piece)
        states.pass_through(a, piece)
        _give_gates(layer, a, piece, gates)
        d_gates: list[Tensor] = []  # those of the piece before are given back first
        d_gates = _undo(layer, every, a, piece)
        if piece.last:  # nobody reads these any more, and the gradients may have their memory
            gates.clear()
            layer.kept.clear()
            if ask.last:
                result.kept.clear()
        if d_input is None and ask.needs_input and not at_once:
            d_input = torch.zeros_like(x) if adds else torch.empty_like(x)
        if at_once:
            weights = [part.contiguous() for part in call.flat_weights()]
            given = (d_gates[0], x, layer.h0, weights, layer.output)
            found = AtOnce(layer.cell, x, hidden)(*given, needs_input=ask.needs_input)
            return CallGrads(found[0], *states.at_start(), found[1])
        for d in range(layer.directions):
            start, stop = piece.times(descending=d == 0)
            if d_input is not None:
                own = d_input[start:stop].flatten(0, 1)
                _input_grad(layer, own, d_gates[d], d, add=adds or d == 1)
            _weight_grads(layer, sums, d_gates[d], d, start, stop)
    # before the weights' gradients are rounded into new memory
    del d_gates
    layer.forget()
    d_h0, d_c0 = states.at_start()
    gru = layer.cell == "gru"
    return CallGrads(
        d_input,
        d_h0,
        d_c0,
        [g for d, w in enumerate(call.weights) for g in sums.of(d, w, hidden, gru)],
    )


def _give_gates(layer: _Layer, a: BackwardArguments, piece: Piece, again: list[Tensor]) -> None:
    """A launch reads what was kept, or what is computed again here, into `again`."""
    for d in range(layer.directions):
        start, stop = piece.times(descending=d == 0)
        if again:
            layer.recompute(d, start, stop, again[d][: piece.steps * layer.batch])
            a.gates[d] = again[d].data_ptr()
            if (biases := layer.biases[d]) is not None:
                a.b_ih[d], a.b_hh[d] = (b.data_ptr() for b in biases)
        elif layer.kept:
            a.gates[d] = layer.kept[d][start].data_ptr()


def _undo(layer: _Layer, every: list[Launch], a: BackwardArguments, piece: Piece) -> list[Tensor]:
    """Run the kernel over a piece; the gates' gradients of each direction, as rows."""
    x, wide = layer.x, layer.stored * layer.hidden
    width = padded(layer.hidden, x.dtype)
    exchanged = through_l2(every)
    shape = (piece.steps * layer.batch, wide)
    shares = exchanged and width == layer.hidden
    found = [marked(shape, x) if shares else x.new_empty(shape) for _ in layer.weights]
    exchange = found
    if exchanged and not shares:
        shape = (piece.steps * layer.batch, layer.gates * width)
        exchange = [marked(shape, x) for _ in layer.weights]
    a.exchange_row = exchange[0].shape[1]
    for d in range(layer.directions):
        a.d_gates[d], a.exchange[d] = found[d].data_ptr(), exchange[d].data_ptr()
    run(every, a)
    return found


def _input_grad(layer: _Layer, d_input: Tensor, d_gates: Tensor, d: int, *, add: bool) -> None:
    to_input = d_gates[:, layer.hidden :] if layer.cell == "gru" else d_gates
    weights = weights_as_factor(layer.weights[d].w_ih, d_gates.shape[0])
    if add:
        torch.addmm(d_input, to_input, weights, out=d_input)
    else:
        torch.mm(to_input, weights, out=d_input)


def _weight_grads(
    layer: _Layer, sums: _WeightGrads, d_gates: Tensor, d: int, start: int, stop: int
) -> None:
    to_input = to_state = d_gates
    if layer.cell == "gru":
        to_input, to_state = d_gates[:, layer.hidden :], d_gates[:, : 3 * layer.hidden]
    sums.product(d, "w_ih", to_input, layer.input_rows(d, start, stop))
    sums.product(d, "w_hh", to_state, layer.entering_h(d, start, stop))
    if layer.weights[d].b_ih is not None:
        sums.column_sums(d, d_gates)
