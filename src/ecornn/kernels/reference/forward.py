"""The recurrence, forwards: one direction of one layer, written to be read.

Out of place throughout, so that autograd, vmap and functional transforms see through it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ecornn.kernels.reference import cells
from ecornn.kernels.reference.problem import (
    DirectionWeights,
    Masks,
    Problem,
    chunks,
    input_of,
    masks,
    working_dtype,
)


class DirectionResult(NamedTuple):
    """Tensors that do not exist for the cell, or were not asked to be kept, are None."""

    output_TBR: Tensor
    h_n_BR: Tensor
    c_n_BH: Tensor | None
    cells_TBH: Tensor | None
    #: Kept for the backward pass with keep="gates": pre-activations, and with layer norm the
    #: state's product before it is normalized.
    pre_TBK: Tensor | None
    raw_TBG: Tensor | None


def gate_inputs(x_TBI: Tensor, w: DirectionWeights) -> Tensor:
    """The input's contribution to the gates, for any number of steps at once."""
    gates = x_TBI @ w.w_ih.T
    if w.norm_ih is not None:
        gates = cells.layer_norm(gates).normalized * w.norm_ih
    return gates if w.b_ih is None else gates + w.b_ih


def gate_states(raw: Tensor, w: DirectionWeights) -> Tensor:
    """The state's contribution to the gates, from its product with w_hh."""
    gates = raw if w.norm_hh is None else cells.layer_norm(raw).normalized * w.norm_hh
    return gates if w.b_hh is None else gates + w.b_hh


def cell_output(c: Tensor, w: DirectionWeights) -> Tensor:
    """What an LSTM's output gate is multiplied with."""
    if w.norm_c is not None and w.norm_c_bias is not None:
        c = cells.layer_norm(c).normalized * w.norm_c + w.norm_c_bias
    return c.tanh()


def at(mask: Tensor | None, t: int) -> Tensor | None:
    """Step t of a mask over time, which may be the same for all steps."""
    if mask is None:
        return None
    return mask[t if mask.shape[0] > 1 else 0]


def initial_or_zero(initial: Tensor, problem: Problem) -> Tensor:
    """What a state becomes where it is reset."""
    return initial if problem.reset_to == "initial" else torch.zeros_like(initial)


class _Step(NamedTuple):
    """What one step makes: the states that leave it, and what its gates were computed from."""

    h: Tensor
    c: Tensor | None
    pre: Tensor
    raw: Tensor


def step(
    from_input: Tensor,
    h_in: Tensor,
    c_in: Tensor | None,
    w: DirectionWeights,
    cell: str,
    keep_h: Tensor | None,
    keep_c: Tensor | None,
) -> _Step:
    """One step of one direction, from the states that enter it."""
    raw = h_in @ w.w_hh.T
    pre = cells.preactivations(cell, from_input, gate_states(raw, w))
    gates = cells.activate(cell, pre)
    c = None
    if c_in is not None:
        c = cells.lstm_cell_state(gates, c_in)
        h = gates[3] * cell_output(c, w)
        if keep_c is not None:
            c = keep_c * c_in + (1 - keep_c) * c
    else:
        h = cells.gru_output(gates, h_in) if cell == "gru" else gates[0]
    if w.w_hr is not None:
        h = h @ w.w_hr.T
    if keep_h is not None:
        h = keep_h * h_in + (1 - keep_h) * h
    return _Step(h, c, pre, raw)


def forward(
    x_TBI: Tensor,
    h0_BR: Tensor,
    c0_BH: Tensor | None,
    weights: DirectionWeights,
    problem: Problem,
    keep: str = "none",
) -> DirectionResult:
    steps, dtype = x_TBI.shape[0], x_TBI.dtype
    working = working_dtype(dtype)
    w = weights.to(working)
    mask = masks(problem, steps)
    h0 = h0_BR.to(working)
    c0 = None if c0_BH is None else c0_BH.to(working)

    h, c = h0, c0
    made: list[_Step] = []
    elements = x_TBI.shape[1] * w.w_ih.shape[0]
    for start, stop in chunks(steps, elements, descending=problem.reverse):
        from_input = gate_inputs(input_of(x_TBI, mask, start, stop, working), w)
        for t in reversed(range(start, stop)) if problem.reverse else range(start, stop):
            h_in, c_in = h, c
            if mask.cut_TB1 is not None:
                h_in = torch.where(mask.cut_TB1[t], initial_or_zero(h0, problem), h)
                if c is not None and c0 is not None:
                    c_in = torch.where(mask.cut_TB1[t], initial_or_zero(c0, problem), c)
            keep_h, keep_c = at(problem.zoneout_h, t), at(problem.zoneout_c, t)
            new = step(from_input[t - start], h_in, c_in, w, problem.cell, keep_h, keep_c)
            # h leaves the step in the model's dtype: what the next step multiplies is exactly
            # what the backward pass finds in the output.
            h_new, c_new = new.h.to(dtype).to(working), new.c
            if mask.active_TB1 is not None:
                h_new = torch.where(mask.active_TB1[t], h_new, h)
                if c_new is not None and c is not None:
                    c_new = torch.where(mask.active_TB1[t], c_new, c)
            h, c = h_new, c_new
            made.append(new._replace(h=h, c=c) if keep == "gates" else _Step(h, c, h, h))

    kept = ("pre", "raw") if w.norm_hh is not None else ("pre",)
    return _result(made, problem, mask, kept if keep == "gates" else (), dtype)


def _result(
    made: list[_Step], problem: Problem, mask: Masks, kept: tuple[str, ...], dtype: torch.dtype
) -> DirectionResult:
    last, in_time_order = made[-1], made[::-1] if problem.reverse else made

    def over_time(values: list[Tensor], *, padded: bool) -> Tensor:
        stacked = torch.stack(values)
        if padded and mask.active_TB1 is not None and problem.after_end == "zeros":
            stacked = torch.where(mask.active_TB1, stacked, stacked.new_zeros(()))
        return stacked.to(dtype)

    c_states = [s.c for s in in_time_order if s.c is not None]
    return DirectionResult(
        over_time([s.h for s in in_time_order], padded=True),
        last.h.to(dtype),
        None if last.c is None else last.c.to(dtype),
        over_time(c_states, padded=True) if c_states else None,
        over_time([s.pre for s in in_time_order], padded=False) if "pre" in kept else None,
        over_time([s.raw for s in in_time_order], padded=False) if "raw" in kept else None,
    )
