"""The recurrence, backwards: explicit derivatives of `forward`, chunk by chunk of time.

What the forward pass kept is the output and, for the LSTM, the cell states; the gates come from
one large product a chunk (keep="states") or were kept too (keep="gates"). Only the state's
gradient runs through the loop over time; every weight gradient is one large product a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ecornn.kernels.reference import cells
from ecornn.kernels.reference.forward import at, gate_inputs, gate_states, initial_or_zero
from ecornn.kernels.reference.problem import (
    DirectionWeights,
    Masks,
    Problem,
    chunks,
    input_of,
    masks,
    working_dtype,
)


class DirectionGrads(NamedTuple):
    x_TBI: Tensor | None
    h0_BR: Tensor
    c0_BH: Tensor | None
    weights: DirectionWeights


class OutputGrads(NamedTuple):
    """Gradients that arrive from outside; None stands for zero."""

    output_TBR: Tensor | None
    h_n_BR: Tensor | None
    c_n_BH: Tensor | None
    cells_TBH: Tensor | None


@dataclass
class _Chunk:
    """Everything of one range of steps that does not depend on the gradient from later steps."""

    x: Tensor
    h_in: Tensor
    c_in: Tensor | None
    raw: Tensor | None  # the state's product, where a layer norm needs it
    gates: tuple[Tensor, ...]
    hidden_norm: cells.Norm | None = None
    cell_norm: cells.Norm | None = None
    cell_tanh: Tensor | None = None
    # per step, filled by the loop in running order
    d_from_input: list[Tensor] = field(default_factory=list)
    d_from_state: list[Tensor] = field(default_factory=list)
    d_raw: list[Tensor] = field(default_factory=list)
    d_projected: list[Tensor] = field(default_factory=list)
    d_normed_cell: list[Tensor] = field(default_factory=list)


def split(value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(where the mask holds, where it does not), zero elsewhere. Chosen and not multiplied: what a
    reset or an end cuts off may be infinite."""
    zero = value.new_zeros(())
    return torch.where(mask, value, zero), torch.where(mask, zero, value)


class _Loop:
    """The state's gradient on its way from the last step to the first."""

    def __init__(self, w: DirectionWeights, problem: Problem, mask: Masks) -> None:
        self.w, self.problem, self.active, self.cut = w, problem, mask.active_TB1, mask.cut_TB1
        self.d_h: Tensor
        self.d_c: Tensor | None
        self.d_h_initial: Tensor | float = 0.0
        self.d_c_initial: Tensor | float = 0.0

    def initial(self) -> tuple[Tensor, Tensor | None]:
        """Gradients of the initial states, once all steps are undone."""
        if self.problem.reset_to != "initial":
            return self.d_h, self.d_c
        d_c = None if self.d_c is None else self.d_c + self.d_c_initial
        return self.d_h + self.d_h_initial, d_c

    def step(
        self, chunk: _Chunk, k: int, t: int, d_output: Tensor | None, d_cells: Tensor | None
    ) -> None:
        """Undo step t, the chunk's k-th: takes (d_h, d_c) after the step to those before it."""
        w, cell = self.w, self.problem.cell
        d_h = self.d_h if d_output is None else self.d_h + d_output[k]
        d_c = self.d_c if self.d_c is None or d_cells is None else self.d_c + d_cells[k]
        d_h_frozen: Tensor | float = 0.0
        d_c_frozen: Tensor | float = 0.0
        if self.active is not None:
            d_h, d_h_frozen = split(d_h, self.active[t])
            if d_c is not None:
                d_c, d_c_frozen = split(d_c, self.active[t])

        d_h_in: Tensor | float = 0.0
        if (keep_h := at(self.problem.zoneout_h, t)) is not None:
            d_h_in, d_h = keep_h * d_h, (1 - keep_h) * d_h
        d_y = d_h
        if w.w_hr is not None:
            chunk.d_projected.append(d_h)
            d_y = d_h @ w.w_hr

        gates = tuple(gate[k] for gate in chunk.gates)
        d_c_in = None
        if cell == "lstm":
            d_from_input, d_c_in = self._lstm(chunk, k, t, gates, d_y, d_c)
            d_from_state = d_from_input
        elif cell == "gru":
            d_from_input, d_from_state, d_direct = cells.gru_backward(gates, chunk.h_in[k], d_y)
            d_h_in = d_h_in + d_direct
        else:
            d_from_input = d_from_state = cells.rnn_backward(cell, gates, d_y)

        d_raw = d_from_state
        if w.norm_hh is not None:
            norm = cells.Norm(*(value[k] for value in chunk.hidden_norm or ()))
            d_raw = cells.layer_norm_backward(d_from_state * w.norm_hh, norm)
        d_h_in = d_h_in + d_raw @ w.w_hh
        chunk.d_from_input.append(d_from_input)
        chunk.d_from_state.append(d_from_state)
        chunk.d_raw.append(d_raw)

        if self.cut is not None:
            to_initial, d_h_in = split(d_h_in, self.cut[t])
            self.d_h_initial = self.d_h_initial + to_initial
            if d_c_in is not None:
                to_initial, d_c_in = split(d_c_in, self.cut[t])
                self.d_c_initial = self.d_c_initial + to_initial
        self.d_h = d_h_in + d_h_frozen
        self.d_c = None if d_c_in is None else d_c_in + d_c_frozen

    def _lstm(
        self,
        chunk: _Chunk,
        k: int,
        t: int,
        gates: tuple[Tensor, ...],
        d_y: Tensor,
        d_c: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        assert chunk.cell_tanh is not None
        assert chunk.c_in is not None
        assert d_c is not None
        tanh = chunk.cell_tanh[k]
        d_normed = d_y * gates[3] * (1 - tanh * tanh)
        d_cell = d_normed
        if self.w.norm_c is not None:
            chunk.d_normed_cell.append(d_normed)
            norm = cells.Norm(*(value[k] for value in chunk.cell_norm or ()))
            d_cell = cells.layer_norm_backward(d_normed * self.w.norm_c, norm)
        d_c_kept: Tensor | float = 0.0
        if (keep_c := at(self.problem.zoneout_c, t)) is not None:
            d_c_kept, d_c = keep_c * d_c, (1 - keep_c) * d_c
        d_pre, d_c_in = cells.lstm_backward(gates, chunk.c_in[k], d_y * tanh, d_cell + d_c)
        return d_pre, d_c_in + d_c_kept


class _WeightSums:
    """Weight gradients, one product a chunk, summed over chunks.

    With `samples` > 1 the batch is that many groups, and each gets weight gradients of its own,
    in a leading dimension: per-sample gradients for the price of one batched product.
    """

    def __init__(self, w: DirectionWeights, samples: int, reverse: bool) -> None:
        self.w, self.samples, self.reverse = w, samples, reverse
        self.sums: dict[str, Tensor] = {}

    def _add(self, name: str, value: Tensor) -> None:
        self.sums[name] = self.sums[name] + value if name in self.sums else value

    def _by_sample(self, values_TBF: Tensor) -> Tensor:
        """(samples, T · B of a sample, F)"""
        steps, batch, features = values_TBF.shape
        size = batch // self.samples if batch else 0
        grouped = values_TBF.view(steps, self.samples, size, features)
        return grouped.transpose(0, 1).reshape(self.samples, steps * size, features)

    def _vector(self, name: str, values_TBF: Tensor) -> None:
        found = self._by_sample(values_TBF).sum(1)
        self._add(name, found if self.samples > 1 else found[0])

    def _matrix(self, name: str, rows_TBF: Tensor, columns_TBF: Tensor) -> None:
        if self.samples > 1:
            rows, columns = self._by_sample(rows_TBF), self._by_sample(columns_TBF)
            self._add(name, rows.transpose(1, 2) @ columns)
        else:
            self._add(name, rows_TBF.flatten(0, 1).T @ columns_TBF.flatten(0, 1))

    def _in_time_order(self, values: list[Tensor]) -> Tensor:
        # the loop ran against the forward pass's direction
        return torch.stack(values if self.reverse else values[::-1])

    def chunk(self, chunk: _Chunk) -> Tensor:
        """Add a finished chunk; returns the gradient of x·w_ihᵀ."""
        w = self.w
        d_from_input = self._in_time_order(chunk.d_from_input)
        d_from_state = self._in_time_order(chunk.d_from_state)
        if w.b_ih is not None:
            self._vector("b_ih", d_from_input)
            self._vector("b_hh", d_from_state)
        if chunk.hidden_norm is not None:
            self._vector("norm_hh", d_from_state * chunk.hidden_norm.normalized)
        if chunk.cell_norm is not None:
            d_normed = self._in_time_order(chunk.d_normed_cell)
            self._vector("norm_c", d_normed * chunk.cell_norm.normalized)
            self._vector("norm_c_bias", d_normed)
        if w.w_hr is not None and chunk.cell_tanh is not None:
            unprojected = chunk.gates[3] * chunk.cell_tanh
            self._matrix("w_hr", self._in_time_order(chunk.d_projected), unprojected)
        self._matrix("w_hh", self._in_time_order(chunk.d_raw), chunk.h_in)

        d_product = d_from_input
        if w.norm_ih is not None:
            norm = cells.layer_norm(chunk.x @ w.w_ih.T)
            self._vector("norm_ih", d_from_input * norm.normalized)
            d_product = cells.layer_norm_backward(d_from_input * w.norm_ih, norm)
        self._matrix("w_ih", d_product, chunk.x)
        return d_product


def entering_states(
    initial: Tensor, states: Tensor, problem: Problem, mask: Masks, start: int, stop: int
) -> Tensor:
    """The state that entered each step of [start, stop), from the states that left the steps."""
    steps = states.shape[0]
    first = initial.unsqueeze(0)
    if problem.reverse:
        entering = states[start + 1 : stop + 1]
        if stop == steps:
            entering = torch.cat([entering, first])
        if mask.active_TB1 is not None:
            # a sequence that ends inside is entered at its own last step
            begun = mask.active_TB1[start + 1 : stop + 1]
            if stop == steps:
                begun = torch.cat([begun, torch.zeros_like(mask.active_TB1[:1])])
            entering = torch.where(begun, entering, first)
    elif start == 0:
        entering = torch.cat([first, states[: stop - 1]])
    else:
        entering = states[start - 1 : stop - 1]
    if mask.cut_TB1 is not None:
        reset = initial_or_zero(first, problem)
        entering = torch.where(mask.cut_TB1[start:stop], reset, entering)
    return entering


def _open_chunk(
    x: Tensor,
    h_in: Tensor,
    c_in: Tensor | None,
    kept: tuple[Tensor | None, Tensor | None],
    w: DirectionWeights,
    cell: str,
) -> _Chunk:
    """Recompute, in large operators, all that the loop over these steps will read."""
    pre, raw = kept
    if raw is None and (pre is None or w.norm_hh is not None):
        raw = h_in @ w.w_hh.T
    if pre is None:
        assert raw is not None
        pre = cells.preactivations(cell, gate_inputs(x, w), gate_states(raw, w))
    chunk = _Chunk(x, h_in, c_in, raw, cells.activate(cell, pre))
    if w.norm_hh is not None:
        assert raw is not None
        chunk.hidden_norm = cells.layer_norm(raw)
    if cell == "lstm":
        assert c_in is not None
        c_new = cells.lstm_cell_state(chunk.gates, c_in)
        if w.norm_c is not None and w.norm_c_bias is not None:
            chunk.cell_norm = cells.layer_norm(c_new)
            c_new = chunk.cell_norm.normalized * w.norm_c + w.norm_c_bias
        chunk.cell_tanh = c_new.tanh()
    return chunk


class Kept(NamedTuple):
    """What the forward pass left for the backward pass."""

    output_TBR: Tensor
    cells_TBH: Tensor | None
    pre_TBK: Tensor | None = None
    raw_TBG: Tensor | None = None


def backward(
    grads: OutputGrads,
    x_TBI: Tensor,
    h0_BR: Tensor,
    c0_BH: Tensor | None,
    weights: DirectionWeights,
    problem: Problem,
    kept: Kept,
    *,
    needs_x: bool = True,
    samples: int = 1,
) -> DirectionGrads:
    steps, dtype = x_TBI.shape[0], x_TBI.dtype
    working = working_dtype(dtype)
    w = weights.to(working)
    mask = masks(problem, steps)
    loop = _Loop(w, problem, mask)
    loop.d_h = _arriving(grads.h_n_BR, h0_BR, working)
    loop.d_c = None if c0_BH is None else _arriving(grads.c_n_BH, c0_BH, working)

    def part(values: Tensor | None, start: int, stop: int) -> Tensor | None:
        return None if values is None else values[start:stop].to(working)

    def grad_part(grad: Tensor | None, start: int, stop: int) -> Tensor | None:
        found = part(grad, start, stop)
        if found is None or mask.active_TB1 is None or problem.after_end == "frozen":
            return found
        return split(found, mask.active_TB1[start:stop])[0]

    def entering(initial: Tensor, states: Tensor | None, start: int, stop: int) -> Tensor:
        assert states is not None
        return entering_states(initial, states, problem, mask, start, stop).to(working)

    sums = _WeightSums(w, samples, problem.reverse)
    d_x: list[Tensor] = []
    elements = x_TBI.shape[1] * w.w_ih.shape[0]
    for start, stop in chunks(steps, elements, descending=not problem.reverse):
        chunk = _open_chunk(
            input_of(x_TBI, mask, start, stop, working),
            entering(h0_BR, kept.output_TBR, start, stop),
            None if c0_BH is None else entering(c0_BH, kept.cells_TBH, start, stop),
            (part(kept.pre_TBK, start, stop), part(kept.raw_TBG, start, stop)),
            w,
            problem.cell,
        )
        d_output = grad_part(grads.output_TBR, start, stop)
        d_cells = grad_part(grads.cells_TBH, start, stop)
        for t in range(start, stop) if problem.reverse else reversed(range(start, stop)):
            loop.step(chunk, t - start, t, d_output, d_cells)
        d_product = sums.chunk(chunk)
        if needs_x:
            d_x.append((d_product @ w.w_ih).to(dtype))

    d_h0, d_c0 = loop.initial()
    return DirectionGrads(
        torch.cat(d_x if problem.reverse else d_x[::-1]) if needs_x else None,
        d_h0.to(dtype),
        None if d_c0 is None else d_c0.to(dtype),
        DirectionWeights(**{name: value.to(dtype) for name, value in sums.sums.items()}),
    )


def _arriving(grad: Tensor | None, like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(like, dtype=dtype) if grad is None else grad.to(dtype)
