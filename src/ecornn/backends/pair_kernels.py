"""The launches of two layers that run at once: which kernel, which pieces, and where each piece's
memory is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ecornn.backends.overlap import Op, cut
from ecornn.backends.persistent_calls import Matched, beside_output
from ecornn.kernels.persistent.arguments import (
    BACKWARD,
    FORWARD,
    BackwardArguments,
    ForwardArguments,
)
from ecornn.kernels.persistent.device import numbers_of
from ecornn.kernels.persistent.launch import Launcher
from ecornn.kernels.persistent.shares import (
    SHARES,
    ShareArguments,
    is_small_product,
    share_blocks,
    share_launcher,
)


class Pass:
    """One pass of both layers: the kernel, the pieces of time in the order in which they come, and
    what each stream is given."""

    def __init__(
        self,
        launcher: Launcher,
        schedule: Callable[[int], list[Op]],
        sizes: tuple[int, int, int],
        count: int,
        *,
        in_turns: bool = False,
    ) -> None:
        """`sizes`: steps, batch and hidden; `count` of pieces."""
        tile, group = launcher.geometry.tile, launcher.geometry.group_batch
        steps, self.batch, self.hidden = sizes
        self.launcher, self.marked = launcher, tile.grid
        self.backward = tile.kernel == "backward"
        self.pieces = cut(steps, count)
        self.schedule = schedule(len(self.pieces))
        times = [piece.times(descending=self.backward) for piece in self.pieces]
        #: By piece: its rows in (T · B, …).
        self.rows = [slice(start * self.batch, stop * self.batch) for start, stop in times]
        #: And in the buffer of the gates' shares, which is so long.
        self.share_rows, self.buffer_rows, self.in_turns = self.rows, steps * self.batch, in_turns
        if in_turns:
            size = self.pieces[0].steps * self.batch
            places = (slice(k % 2 * size, (k % 2 + 1) * size) for k in range(len(times)))
            self.share_rows = [
                slice(place.start, place.start + rows.stop - rows.start)
                for place, rows in zip(places, self.rows, strict=True)
            ]
            self.buffer_rows = 2 * size
        #: Of a forward pass; each layer has its own.
        self.beside = None if self.backward else beside_output(tile, self.hidden)
        exchanged = self.hidden if self.beside is None else self.beside.width
        if self.backward:
            exchanged *= 4 if tile.cell in ("lstm", "gru") else 1
        #: By piece: the arguments' integers, in their order.
        self.integers = [
            (
                *(piece.steps, piece.first_step, piece.total, self.batch, self.hidden),
                *(self.hidden, exchanged, 0, self.batch, 0, group, 0),
            )
            for piece in self.pieces
        ]


class InputProduct:
    """The input's share of some steps' gates, into memory that is there; rows by rows."""

    def __init__(self, x: Tensor, rows: int, gates: int, inputs: int) -> None:
        self._sizes, self._matching = (rows, gates, inputs), Matched(x.dtype)
        self._launch: Launcher | None = None
        if is_small_product(x.element_size(), rows, gates, inputs):
            numbers = numbers_of(x.dtype)
            assert numbers is not None
            self._launch, self._blocks = share_launcher(numbers, x.device.index), 0
            self._blocks = share_blocks(rows, gates)
            self._by_vectors = inputs % (16 // x.element_size()) == 0

    def __call__(self, given: Tensor, w_ih: Tensor, found: Tensor) -> None:
        if self._launch is None:
            with self._matching():
                torch.mm(given, w_ih.t(), out=found)
            return
        xs, w = given.data_ptr(), w_ih.data_ptr()
        by_vectors = self._by_vectors and (xs | w) % 16 == 0
        packed = SHARES.pack(xs, w, found.data_ptr(), *self._sizes, by_vectors)
        self._launch(ShareArguments.from_buffer_copy(packed), self._blocks)


def _place(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _part(tensor: Tensor | None, layer: int) -> int:
    """A layer's part of a tensor whose first dimension is the two layers; of one that has them
    share it, the whole."""
    if tensor is None:
        return 0
    own: int = tensor.data_ptr()
    return own + layer * (tensor.nbytes // 2) if tensor.shape[0] == 2 else own


class ForwardPlaces(NamedTuple):
    """Where one layer's memory begins, and the bytes of a value."""

    gates: int
    gate_row: int  # values
    w_hh: int
    b_ih: int
    b_hh: int
    exchange: int
    output: int
    cells: int
    kept: int
    h0: int
    c0: int
    h_n: int
    c_n: int
    carried: int
    size: int

    @staticmethod
    def of(
        layer: int,
        own: tuple[Sequence[Tensor], Tensor, Tensor],
        buffers: tuple[Tensor, Tensor | None, Tensor | None],
        states: tuple[Tensor | None, ...],
    ) -> ForwardPlaces:
        """`own`: weights, what is exchanged and the output; `buffers`: gates, cells and what is
        kept, `states`: h0, c0, h_n, c_n and c between pieces, of both layers."""
        weights, exchange, output = own
        gates, cells, kept = buffers
        b_ih, b_hh = (w.data_ptr() for w in weights[2:]) if len(weights) > 2 else (0, 0)
        return ForwardPlaces._make(
            (
                *(_part(gates, layer), gates.shape[-1], weights[1].data_ptr(), b_ih, b_hh),
                *(exchange.data_ptr(), output.data_ptr()),
                *(_part(cells, layer), _part(kept, layer)),
                *(_part(state, layer) for state in states),
                output.element_size(),
            )
        )


def forward_arguments(p: ForwardPlaces, run: Pass, piece: int, failed: int) -> ForwardArguments:
    row, share = run.rows[piece].start, run.share_rows[piece].start
    state = run.batch * run.hidden
    first, last = piece == 0, piece == len(run.pieces) - 1
    # the states that the piece before left: h as its last output, c in float32
    h_in = p.h0 if first else p.output + (row - run.batch) * run.hidden * p.size
    c_in = 0 if first or not p.c0 else p.carried + (piece - 1) * state * 4
    c_out = 0 if last or not p.c0 else p.carried + piece * state * 4
    packed = FORWARD.pack(
        # gates, weights, b_ih, b_hh, exchange, output, cells, kept, for two directions
        *(p.gates + share * p.gate_row * p.size, 0, p.w_hh, 0, p.b_ih, 0, p.b_hh, 0),
        *(p.exchange, 0, p.output, 0, p.cells, 0, p.kept, 0),
        # h0, c0, h_in, c_in, h_out, c_n, c_out, lengths, resets, failed; the last h_out stays
        *(p.h0, p.c0, h_in, c_in, p.h_n, p.c_n if last else 0, c_out, 0, 0, failed),
        *run.integers[piece],
    )
    return ForwardArguments.from_buffer_copy(packed)


class BackwardPlaces(NamedTuple):
    d_gates: int
    gate_row: int  # values
    w_hh: int
    output: int
    d_output: int
    cells: int
    kept: int
    kept_row: int
    h0: int
    c0: int
    d_h_n: int
    d_c_n: int
    d_h0: int
    d_c0: int
    carried: int
    size: int

    @staticmethod
    def of(
        layer: int,
        own: tuple[Tensor, Tensor, Tensor | None],
        buffers: tuple[Tensor, Tensor | None, Tensor | None],
        states: tuple[Tensor | None, ...],
    ) -> BackwardPlaces:
        """`own`: w_hh, the output and its gradient; `buffers`: the gates' gradients, cells and what
        was kept, `states`: h0, c0, d_h_n, d_c_n, d_h0, d_c0 and the gradients between pieces, of
        both layers."""
        w_hh, output, d_output = own
        d_gates, cells, kept = buffers
        return BackwardPlaces._make(
            (
                *(_part(d_gates, layer), d_gates.shape[-1], w_hh.data_ptr(), output.data_ptr()),
                *(_place(d_output), _part(cells, layer), _part(kept, layer)),
                0 if kept is None else kept.shape[-1],
                *(_part(state, layer) for state in states),
                output.element_size(),
            )
        )


def backward_arguments(p: BackwardPlaces, run: Pass, piece: int, failed: int) -> BackwardArguments:
    row, state = run.rows[piece].start, run.batch * run.hidden * 4
    between = len(run.pieces) - 1
    first, last = piece == 0, piece == between
    # gradients of h at every boundary, then those of c
    h_in, h_out = p.carried + (piece - 1) * state, p.carried + piece * state
    c_in, c_out = h_in + between * state, h_out + between * state
    d_gates = p.d_gates + row * p.gate_row * p.size
    kept = p.kept + row * p.kept_row * p.size if p.kept else 0
    entering: tuple[Any, ...] = (0, 0) if first else (h_in, c_in if p.c0 else 0)
    # d_h_out, d_c_out, d_h0, d_c0
    leaving: tuple[Any, ...] = (0, 0, p.d_h0, p.d_c0)
    if not last:
        leaving = (h_out, c_out if p.c0 else 0, 0, 0)
    packed = BACKWARD.pack(
        # gates, b_ih, b_hh, weights, exchange, d_gates, output, cells, d_output, d_cells
        *(kept, 0, 0, 0, 0, 0, p.w_hh, 0, d_gates, 0, d_gates, 0),
        *(p.output, 0, p.cells, 0, p.d_output, 0, 0, 0),
        # h0, c0, d_h_n, d_c_n, d_h_in, d_c_in
        *(p.h0, p.c0, p.d_h_n, p.d_c_n, *entering, *leaving),
        # d_h_initial, d_c_initial, lengths, resets, failed
        *(0, 0, 0, 0, failed),
        *run.integers[piece],
    )
    return BackwardArguments.from_buffer_copy(packed)
