"""Two layers of a stack at the same time, as `overlap` orders them; like `persistent_plain`, with
as little work on the host as it takes.

The second layer's shares of the gates stand where the first's stood, which were read by then, or
where both are kept; where they are large, two pieces' are there in turns. h is handed from piece to
piece by the output, an LSTM's c in float32.

Shape suffixes: see `protocol`; S the two layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ecornn.backends.overlap import ALL, KERNEL, PRODUCT, SIDE, WAIT, WEIGHTS, Op
from ecornn.backends.pair_kernels import (
    BackwardPlaces,
    ForwardPlaces,
    InputProduct,
    Pass,
    backward_arguments,
    forward_arguments,
)
from ecornn.backends.persistent_calls import Matched, check_weights, is_readable, marked
from ecornn.backends.persistent_gradients import GateGradients
from ecornn.backends.protocol import LayerCall
from ecornn.kernels.persistent.arguments import BackwardArguments, ForwardArguments
from ecornn.kernels.persistent.device import failure_flag
from ecornn.kernels.persistent.streams import Fork
from ecornn.spec import GATES


class PairResult(NamedTuple):
    """The second layer's output and both layers' last states; then what the backward pass reads."""

    output_TBR: Tensor
    h_n_SBR: Tensor
    c_n_SBH: Tensor | None
    between_TBR: Tensor  # the first layer's output
    cells_STBH: Tensor | None
    kept: Tensor | None  # (S, T · B, 4 · H)


class PairGrads(NamedTuple):
    input_TBI: Tensor | None
    h0_SBR: Tensor | None
    c0_SBH: Tensor | None
    weights: list[Tensor]  # of both layers, the first's first


class PlainPair:
    """Calls of one size. `first`: the first layer's call, `weights` of the second; `backward` is
    None where no gradient is wanted."""

    def __init__(
        self,
        first: LayerCall,
        second: Sequence[Tensor],
        forward: Pass,
        backward: Pass | None,
    ) -> None:
        x, self.hidden = first.input_TBI, first.h0_DBR.shape[-1]
        self.cell, self.device = first.cell, x.device.index
        self._matching = Matched(x.dtype)
        self.steps, self.batch, self.inputs = x.shape
        self.rows, self.lstm, self.keep = self.steps * self.batch, first.cell == "lstm", first.keep
        self._shape = (self.steps, self.batch, self.hidden)
        between = x.new_empty(1).expand(self._shape)  # for its shape alone
        self._check(first, second, between)
        self._weight_shapes = [w.shape for w in (*first.flat_weights(), *second)]
        self._forward, self._backward = forward, backward
        self.passes = [run for run in (forward, backward) if run is not None]
        gates = GATES[self.cell] * self.hidden
        self._gate_row = gates
        own = [piece.steps * self.batch for piece in forward.pieces]
        firsts = own if forward.in_turns else [self.rows]
        #: By layer and piece; of the first layer one alone where it is made for all of time.
        self._products = (
            [InputProduct(x, rows, gates, self.inputs) for rows in firsts],
            [InputProduct(x, rows, gates, self.hidden) for rows in own],
        )
        if backward is not None:
            self._gradients = [GateGradients(self.cell, t, self.hidden) for t in (x, between)]
            self._stored = 4 if self.cell in ("lstm", "gru") else 1

    def _check(self, first: LayerCall, second: Sequence[Tensor], between: Tensor) -> None:
        check_weights(first)
        names = ("w_ih", "w_hh", "b_ih", "b_hh")
        own = replace(first.weights[0], **dict(zip(names, second, strict=False)))
        check_weights(replace(first, input_TBI=between, weights=(own,)))

    def fits(
        self,
        x: Tensor,
        h0: Tensor,
        c0: Tensor | None,
        weights: Sequence[Tensor],
        *results: Tensor | None,
    ) -> bool:
        """As `PlainLayer.fits`."""
        return is_readable(h0, weights, self._weight_shapes, (x, c0, *results))

    def forward(
        self, x: Tensor, h0: Tensor, c0: Tensor | None, weights: Sequence[Tensor]
    ) -> PairResult:
        flag, run = failure_flag(), self._forward
        flag.check()
        kept = x.new_empty(2, self.rows, 4 * self.hidden) if self.keep == "gates" else None
        in_place = self.lstm and kept is not None
        gates = kept if in_place else x.new_empty(1, run.buffer_rows, self._gate_row)
        assert gates is not None
        if not run.in_turns:  # before all else: the device is busy with it while the host goes on
            self._products[0][0](x.view(self.rows, self.inputs), weights[0], gates[0])
        outputs = [self._output(x, run.marked and run.beside is None) for _ in range(2)]
        exchanged = outputs
        if run.beside is not None:
            row = (self.rows, run.beside.width)
            exchanged = [marked(row, x, run.beside.dtype) for _ in range(2)]
        with_cells = self.lstm and self.keep != "none"
        cells = x.new_empty(2, *self._shape) if with_cells else None
        h_n, c_n = torch.empty_like(h0), None if c0 is None else torch.empty_like(c0)
        # an LSTM's c between pieces
        carried = None
        if c0 is not None and len(run.pieces) > 1:
            carried = x.new_empty(2, len(run.pieces) - 1, *h0.shape[1:], dtype=torch.float32)
        own = len(weights) // 2
        places = [
            ForwardPlaces.of(
                layer,
                (weights[layer * own : (layer + 1) * own], exchanged[layer], outputs[layer]),
                (gates, cells, kept),
                (h0, c0, h_n, c_n, carried),
            )
            for layer in range(2)
        ]

        def product(op: Op) -> None:
            if op.piece != ALL:
                given = outputs[0] if op.layer == 1 else x
                rows = given.view(self.rows, -1)[run.rows[op.piece]]
                place = gates[-op.layer][run.share_rows[op.piece]]
                self._products[op.layer][op.piece](rows, weights[op.layer * own], place)

        def arguments(op: Op) -> ForwardArguments:
            return forward_arguments(places[op.layer], run, op.piece, flag.address)

        self._follow(run, {PRODUCT: product}, arguments)
        return PairResult(outputs[1], h_n, c_n, outputs[0], cells, kept)

    def _output(self, x: Tensor, exchanged: bool) -> Tensor:
        return marked(self._shape, x) if exchanged else x.new_empty(self._shape)

    def backward(
        self,
        grads: tuple[Tensor | None, Tensor | None, Tensor | None],
        call: tuple[Tensor, Tensor, Tensor | None, Sequence[Tensor]],
        result: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
        *,
        needs_input: bool,
        needs_states: bool,
    ) -> PairGrads:
        """`grads` of output, h_n and c_n; `call`: input, states and weights; `result`: both layers'
        outputs, the first's first, cells and what was kept."""
        flag, run = failure_flag(), self._backward
        assert run is not None
        flag.check()
        (x, h0, c0, weights), (between, output, cells, kept) = call, result
        d_output, d_h_n, d_c_n = (None if d is None else d.contiguous() for d in grads)
        shape = (2, self.rows, self._stored * self.hidden)
        d_gates = marked(shape, x) if run.marked else x.new_empty(shape)
        d_between = torch.empty_like(between)
        d_h0, d_c0 = torch.empty_like(h0), None if c0 is None else torch.empty_like(c0)
        # of h and of c between pieces
        between_pieces = (2, 2, len(run.pieces) - 1, *h0.shape[1:])
        carried = x.new_empty(between_pieces, dtype=torch.float32)
        own = len(weights) // 2
        parts = (weights[:own], weights[own:])
        outputs, d_outputs, inputs = (between, output), (d_between, d_output), (x, between)
        places = [
            BackwardPlaces.of(
                layer,
                (parts[layer][1], outputs[layer], d_outputs[layer]),
                (d_gates, cells, kept),
                (h0, c0, d_h_n, d_c_n, d_h0, d_c0, carried),
            )
            for layer in range(2)
        ]
        d_input: Tensor | None = None
        d_weights: list[Tensor] = []

        def product(op: Op) -> None:
            rows = run.rows[op.piece]
            self._to_first(d_gates[1][rows], parts[1][0], d_between.view(-1, self.hidden)[rows])

        def of_weights(op: Op) -> None:
            nonlocal d_input
            layer = op.layer
            given = (d_gates[layer], inputs[layer], h0[layer : layer + 1])
            d_input, found = self._gradients[layer](
                *given, parts[layer], outputs[layer], needs_input=needs_input and layer == 0
            )
            d_weights[:0] = found  # the second layer's come first

        def arguments(op: Op) -> BackwardArguments:
            return backward_arguments(places[op.layer], run, op.piece, flag.address)

        self._follow(run, {PRODUCT: product, WEIGHTS: of_weights}, arguments)
        if not needs_states:
            return PairGrads(d_input, None, None, d_weights)
        return PairGrads(d_input, d_h0, d_c0, d_weights)

    def _to_first(self, d_gates: Tensor, w_ih: Tensor, found: Tensor) -> None:
        """The gradient of what the first layer gave the second, of some rows."""
        with self._matching():
            torch.mm(self._gradients[1].to_input(d_gates), w_ih, out=found)

    def _follow(
        self,
        run: Pass,
        others: dict[str, Callable[[Op], None]],
        arguments: Callable[[Op], ForwardArguments | BackwardArguments],
    ) -> None:
        """Give each stream what the schedule says; `others` than kernels and waits."""
        fork = Fork(self.device)
        try:
            for op in run.schedule:
                if op.kind == KERNEL:
                    run.launcher(arguments(op), stream=fork.stream if op.stream == SIDE else None)
                elif op.kind != WAIT:
                    others[op.kind](op)
                elif op.stream == SIDE:
                    fork.side_waits()
                else:
                    fork.main_waits()
        finally:
            fork.close()
