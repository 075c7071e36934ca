"""The contract of the persistent kernels in NumPy, for machines without a GPU.

It reads and writes the very memory that a launch's arguments point to, step by step, for the
sequences and directions of that launch. So everything around the kernels, pieces of time, carried
states, offsets, rows and which product is made of what, runs and is checked on a CPU. float32 only.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ecornn.kernels.persistent.arguments import (
    FROZEN_AFTER_END,
    RESET_TO_INITIAL,
    BackwardArguments,
    ForwardArguments,
)
from ecornn.kernels.persistent.gradients import TILE, GradientArguments, GradientTile
from ecornn.kernels.persistent.shares import ShareArguments
from ecornn.kernels.persistent.tile import Geometry, Tile
from ecornn.kernels.persistent.transposed import SIDE, TransposeArguments
from ecornn.spec import GATES

Array = NDArray[Any]
MARK = np.uint32(0xFFFFFFFF)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def view(address: int | None, *shape: int, kind: Any = ctypes.c_float) -> Array | None:
    if not address:
        return None
    size = int(np.prod(shape))
    return np.ctypeslib.as_array((kind * size).from_address(address)).reshape(shape)


class _Run:
    """What both passes share: one direction of one launch."""

    def __init__(self, a: Any, cell: str, d: int) -> None:
        self.a, self.cell, self.d = a, cell, d
        self.gates_count = GATES[cell]
        self.seqs = slice(a.first_sequence, a.end_sequence)
        lengths = view(a.lengths, a.batch, kind=ctypes.c_int64)
        self.length = np.full(a.batch, a.total) if lengths is None else np.minimum(lengths, a.total)
        self.resets = view(a.resets, a.total, a.batch, kind=ctypes.c_uint8)

    def rows(self, address: int | None, count: int, row: int, width: int) -> Array | None:
        """(count, batch, width) out of rows that are `row` long; the last one may be cut short."""
        if not address:
            return None
        size = (count * self.a.batch - 1) * row + width
        flat = np.ctypeslib.as_array((ctypes.c_float * size).from_address(address))
        strides = (self.a.batch * row * 4, row * 4, 4)
        return np.lib.stride_tricks.as_strided(flat, (count, self.a.batch, width), strides)

    def states(self, address: int | None) -> Array | None:
        found = view(address, 2, self.a.batch, self.a.hidden) if address else None
        if address and self.d == 0:
            found = view(address, 1, self.a.batch, self.a.hidden)
        return None if found is None else found[self.d]

    def cut(self, t: int) -> Array:
        boundary = t + self.d
        if self.resets is None or boundary >= self.a.total:
            return np.zeros(self.a.batch, dtype=bool)
        return (boundary < self.length) & (self.resets[boundary] != 0)

    def biases(self) -> tuple[Array, Array]:
        rows = self.gates_count * self.a.hidden
        b_ih, b_hh = view(self.a.b_ih[self.d], rows), view(self.a.b_hh[self.d], rows)
        zero = np.zeros(rows, np.float32)
        return (zero, zero) if b_ih is None or b_hh is None else (b_ih, b_hh)


def _narrow_rows(a: ForwardArguments, d: int) -> Array:
    """What is exchanged as float16, beside the output."""
    assert a.exchange[d] != a.output[d]
    assert a.exchange_row % 8 == 0
    size = a.total * a.batch * a.exchange_row
    flat = np.ctypeslib.as_array((ctypes.c_uint16 * size).from_address(a.exchange[d]))
    return flat.view(np.float16).reshape(a.total, a.batch, a.exchange_row)


def forward(a: ForwardArguments, tile: Tile, d: int) -> None:
    cell = tile.cell
    run = _Run(a, cell, d)
    h_size, rows = a.hidden, run.gates_count * a.hidden
    gates = view(a.gates[d], a.steps, a.batch, rows)
    weights = view(a.weights[d], rows, h_size)
    b_ih, b_hh = run.biases()
    output = run.rows(a.output[d], a.total, a.output_row, h_size)
    narrow = _narrow_rows(a, d) if tile.grid and tile.numbers == "scaled" else None
    exchange = None
    if narrow is None:
        exchange = run.rows(a.exchange[d], a.total, a.exchange_row, h_size)
    cells = run.rows(a.cells[d], a.total, a.output_row, h_size)
    kept = view(a.kept[d], a.total, a.batch, 4 * h_size) if a.kept[d] else None
    h0, c0 = run.states(a.h0), run.states(a.c0)
    assert gates is not None
    assert weights is not None
    assert output is not None
    assert h0 is not None
    h = run.states(a.h_in).copy()  # type: ignore[union-attr]
    carried = run.states(a.c_in)
    c = None if c0 is None else (c0 if carried is None else carried).copy()
    for local in range(a.steps):
        step = a.first_step + local
        t, row = (a.total - 1 - step, a.steps - 1 - local) if d else (step, local)
        cut = run.cut(t)[:, None]
        initial = bool(a.flags & RESET_TO_INITIAL)
        h_in = np.where(cut, h0 if initial else 0, h)
        c_in = None if c is None else np.where(cut, c0 if initial else 0, c)
        from_input, from_state = gates[row] + b_ih, h_in @ weights.T + b_hh
        h_new, c_new, pre = _cell(cell, from_input, from_state, h_in, c_in)
        active = (t < run.length)[:, None]
        h = np.where(active, h_new, h).astype(np.float32)
        c = None if c_new is None else np.where(active, c_new, c).astype(np.float32)
        shown = active | bool(a.flags & FROZEN_AFTER_END)
        s = run.seqs
        if narrow is not None:
            assert (narrow[t, s].view(np.uint16) == 0xFFFF).all()
            narrow[t, s, :h_size] = h[s] * 2.0**15
            narrow[t, s, h_size:] = 0
        elif a.exchange[d] == a.output[d] and exchange is not None:
            # where the output itself is exchanged, every place was marked and is written once
            assert (exchange[t, s].view(np.uint32) == MARK).all() or not a.marks_expected
        output[t, s] = np.where(shown, h, 0)[s]
        if cells is not None and c is not None:
            cells[t, s] = np.where(shown, c, 0)[s]
        if kept is not None:
            kept[t, s] = pre[s]
    run.states(a.h_out)[run.seqs] = h[run.seqs]  # type: ignore[index]
    for address, value in ((a.c_n, c), (a.c_out, c)):
        if address and value is not None:
            run.states(address)[run.seqs] = value[run.seqs]  # type: ignore[index]


def _cell(
    cell: str, x: Array, s: Array, h_in: Array, c_in: Array | None
) -> tuple[Array, Array | None, Array]:
    """(h, c, pre-activations)"""
    if cell == "lstm":
        i, f, g, o = np.split(x + s, 4, -1)
        c = sigmoid(f) * c_in + sigmoid(i) * np.tanh(g)
        return sigmoid(o) * np.tanh(c), c, x + s
    if cell == "gru":
        (xr, xz, xn), (sr, sz, sn) = np.split(x, 3, -1), np.split(s, 3, -1)
        n, z = np.tanh(xn + sigmoid(xr + sr) * sn), sigmoid(xz + sz)
        return n + z * (h_in - n), None, np.concatenate([xr + sr, xz + sz, xn, sn], -1)
    y = np.tanh(x + s) if cell == "rnn_tanh" else np.maximum(x + s, 0)
    return y, None, x + s


def backward(a: BackwardArguments, tile: Tile, d: int) -> None:
    cell = tile.cell
    run = _Run(a, cell, d)
    h_size, sections = a.hidden, run.gates_count
    stored = 4 if cell in ("lstm", "gru") else 1
    gates = view(a.gates[d], a.steps, a.batch, 4 * h_size) if a.gates[d] else None
    weights = view(a.weights[d], sections * h_size, h_size)
    output = run.rows(a.output[d], a.total, a.output_row, h_size)
    cells = run.rows(a.cells[d], a.total, a.output_row, h_size)
    d_output = run.rows(a.d_output[d], a.total, a.output_row, h_size)
    d_cells = run.rows(a.d_cells[d], a.total, a.output_row, h_size)
    d_gates = view(a.d_gates[d], a.steps, a.batch, stored * h_size)
    h0, c0 = run.states(a.h0), run.states(a.c0)
    assert weights is not None
    if cell == "gru":  # the gates' gradients stand as (n, r, z)
        weights = np.roll(weights, h_size, axis=0)
    assert output is not None
    assert d_gates is not None
    assert h0 is not None
    d_h = _first(run, a.d_h_in, a.d_h_n)
    d_c = _first(run, a.d_c_in, a.d_c_n)
    to_initial, s = [np.zeros_like(d_h), np.zeros_like(d_h)], run.seqs
    for local in range(a.steps):
        b = a.first_step + local
        t, row = (b, local) if d else (a.total - 1 - b, a.steps - 1 - local)
        before = t + 1 if d else t - 1
        active = (t < run.length)[:, None]
        cut = run.cut(t)[:, None]
        shown = active | bool(a.flags & FROZEN_AFTER_END)
        d_h = d_h + (0 if d_output is None else np.where(shown, d_output[t], 0))
        d_c = d_c + (0 if d_cells is None else np.where(shown, d_cells[t], 0))
        begins = (before >= run.length) if d else np.full(a.batch, before < 0)
        inside = min(max(before, 0), a.total - 1)
        states, initial = (cells, c0) if cell == "lstm" else (output, h0)
        entered = h0 if states is None else np.where(begins[:, None], initial, states[inside])
        reset = initial if a.flags & RESET_TO_INITIAL else 0
        entered = np.where(cut, reset, entered)
        pre = None
        if gates is not None:
            pre = gates[row] + _four_biases(run)
        grad, direct, d_c_in = _cell_backward(cell, pre, entered, output[t], d_h, d_c)
        grad = np.where(active, grad, 0)
        d_gates[row, s] = grad[s]
        through = grad[:, : sections * h_size] @ weights
        entering_h, entering_c = direct + through, d_c_in
        for k, value in enumerate((entering_h, entering_c)):
            to_initial[k] += np.where(cut & active, value, 0)
        d_h = np.where(active, np.where(cut, 0, entering_h), d_h)
        d_c = np.where(active, np.where(cut, 0, entering_c), d_c)
    for address, value in ((a.d_h_out, d_h), (a.d_c_out, d_c), (a.d_h0, d_h), (a.d_c0, d_c)):
        if address:
            run.states(address)[s] = value[s]  # type: ignore[index]
    for address, value in ((a.d_h_initial, to_initial[0]), (a.d_c_initial, to_initial[1])):
        if address:
            run.states(address)[s] += value[s]  # type: ignore[index]


def _first(run: _Run, carried: int | None, arriving: int | None) -> Array:
    found = run.states(carried) if carried else run.states(arriving) if arriving else None
    if found is None:
        return np.zeros((run.a.batch, run.a.hidden), np.float32)
    return found.copy()


def _four_biases(run: _Run) -> Array:
    """In the order of the pre-activations."""
    h = run.a.hidden
    b_ih, b_hh = run.biases()
    if run.cell == "gru":
        return np.concatenate([(b_ih + b_hh)[: 2 * h], b_ih[2 * h :], b_hh[2 * h :]])
    return b_ih + b_hh


def _cell_backward(
    cell: str, pre: Array | None, entered: Array, y: Array, d_h: Array, d_c: Array
) -> tuple[Array, Array, Array]:
    """(gates' gradients as the kernel stores them, of h directly, of the entering c)"""
    nothing = np.zeros_like(d_h)
    if cell == "lstm":
        assert pre is not None
        i, f, g, o = np.split(pre, 4, -1)
        i, f, g, o = sigmoid(i), sigmoid(f), np.tanh(g), sigmoid(o)
        shown = np.tanh(f * entered + i * g)
        d_c = d_c + d_h * o * (1 - shown**2)
        parts = (d_c * g * i * (1 - i), d_c * entered * f * (1 - f))
        parts += (d_c * i * (1 - g**2), d_h * shown * o * (1 - o))
        return np.concatenate(parts, -1), nothing, d_c * f
    if cell == "gru":
        assert pre is not None
        r, z, xn, sn = np.split(pre, 4, -1)
        r, z = sigmoid(r), sigmoid(z)
        n = np.tanh(xn + r * sn)
        d_n = d_h * (1 - z) * (1 - n**2)
        d_r, d_z = d_n * sn * r * (1 - r), d_h * (entered - n) * z * (1 - z)
        return np.concatenate([d_n * r, d_r, d_z, d_n], -1), d_h * z, nothing
    return d_h * (1 - y**2 if cell == "rnn_tanh" else y > 0), nothing, nothing


def gradients(a: GradientArguments, tile: GradientTile, blocks: int) -> None:
    """Block by block, by the same indices as the kernel: what no block makes stays as it was."""
    cell, h_size = tile.cell, a.hidden
    rows = GATES[cell] * h_size
    stored = (4 if cell in ("lstm", "gru") else 1) * h_size
    d_gates = view(a.d_gates, a.rows, stored)
    x, w_ih = view(a.input, a.rows, a.inputs), view(a.w_ih, rows, a.inputs)
    output, h0 = view(a.output, a.rows, a.output_row), view(a.h0, a.batch, h_size)
    assert d_gates is not None
    assert x is not None
    assert output is not None
    assert h0 is not None
    assert w_ih is not None
    if a.by_vectors:
        _assert_vectors((a.d_gates, a.input, a.output, a.h0, a.w_ih), (h_size, a.inputs))
    own = output[:, :h_size]
    entered = np.concatenate([own[a.batch :], h0] if a.reverse else [h0, own[: a.rows - a.batch]])
    to_input = d_gates[:, h_size:] if cell == "gru" else d_gates
    to_state = d_gates[:, : 3 * h_size] if cell == "gru" else d_gates
    d_w_ih, d_w_hh = view(a.d_w_ih, rows, a.inputs), view(a.d_w_hh, rows, h_size)
    d_b_ih, d_b_hh = view(a.d_b_ih, rows), view(a.d_b_hh, rows)
    d_input = view(a.d_input, a.rows, a.inputs)
    row_tiles, input_tiles = tiles(rows), tiles(a.inputs)
    weight_blocks = row_tiles * (input_tiles + tiles(h_size)) * tile.cluster
    assert blocks % tile.cluster == 0
    for block in range(0, min(blocks, weight_blocks), tile.cluster):
        across, down = divmod(block // tile.cluster, row_tiles)
        of_state = across >= input_tiles
        m = np.arange(rows)[down * TILE : (down + 1) * TILE]
        # a GRU's state gates back from (n, r, z)
        to = (m + 2 * h_size) % rows if cell == "gru" and of_state else m
        n0 = (across - input_tiles if of_state else across) * TILE
        right, grads = (entered, to_state) if of_state else (x, to_input)
        result, bias = (d_w_hh, d_b_hh) if of_state else (d_w_ih, d_b_ih)
        result[to, n0 : n0 + TILE] = grads[:, m].T @ right[:, n0 : n0 + TILE]  # type: ignore[index]
        if n0 == 0 and bias is not None:
            bias[to] = grads[:, m].sum(0)
    for block in range(weight_blocks, blocks):
        down, across = divmod(block - weight_blocks, input_tiles)
        m, n = (slice(at * TILE, (at + 1) * TILE) for at in (down, across))
        if down * TILE < a.rows:
            d_input[m, n] = to_input[m] @ w_ih[:, n]  # type: ignore[index]


def shares(a: ShareArguments, blocks: int) -> None:
    x, w_ih = view(a.input, a.rows, a.inputs), view(a.w_ih, a.gates, a.inputs)
    found = view(a.shares, a.rows, a.gates)
    assert x is not None
    assert w_ih is not None
    assert found is not None
    if a.by_vectors:
        _assert_vectors((a.input, a.w_ih), (a.inputs,))
    for block in range(blocks):
        m, n = (slice(at * TILE, (at + 1) * TILE) for at in divmod(block, tiles(a.gates)))
        found[m, n] = x[m] @ w_ih[n].T


def transposed(a: TransposeArguments, blocks: int) -> None:
    def rows_of(place: int, count: int, length: int, row: int) -> Any:
        whole = view(place, (count - 1) * row + length)
        return np.lib.stride_tricks.as_strided(whole, (count, length), (4 * row, 4))

    values = rows_of(a.values, a.rows, a.columns, a.values_row)
    found = rows_of(a.found, a.columns, a.rows, a.found_row)
    for block in range(blocks):
        down, across = divmod(block, -(-a.columns // SIDE))
        r, c = (slice(at * SIDE, (at + 1) * SIDE) for at in (down, across))
        found[c, r] = values[r, c].T


def tiles(size: int) -> int:
    return -(-size // TILE)


def _assert_vectors(addresses: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    """All rows begin at multiples of 16 bytes."""
    assert not any(address % 16 for address in addresses)
    assert not any(length % 4 for length in lengths)


class EmulatedLauncher:
    """Stands in for `launch.Launcher`."""

    #: The kernel that was launched last, by any of them: what may begin early comes after one that
    #: lets it.
    ahead = ""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.launches = self.early = 0

    def __call__(
        self,
        arguments: Any,
        blocks: int | None = None,
        stream: Any = None,
        *,
        early: bool = False,
    ) -> None:
        """On a stream that is not the current one it runs when somebody waits for that."""
        if stream is not None:
            stream.append(lambda: self(arguments, blocks))
            return
        self.launches += 1
        self.early += early
        assert not early or EmulatedLauncher.ahead == "shares"
        EmulatedLauncher.ahead = self.geometry.tile.kernel
        if isinstance(arguments, ShareArguments):
            assert blocks is not None
            shares(arguments, blocks)
            return
        if isinstance(arguments, TransposeArguments):
            assert blocks is not None
            transposed(arguments, blocks)
            return
        if isinstance(arguments, GradientArguments):
            assert blocks is not None
            gradients(arguments, self.geometry.tile, blocks)  # type: ignore[arg-type]
            return
        kernel = forward if isinstance(arguments, ForwardArguments) else backward
        arguments.marks_expected = self.geometry.tile.grid
        for z in range(self.geometry.directions):
            kernel(arguments, self.geometry.tile, arguments.first_direction + z)
