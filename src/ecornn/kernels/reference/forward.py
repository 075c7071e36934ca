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


def forward(
    x_TBI: Tensor,
    h0_BR: Tensor,
    c0_BH: Tensor | None,
    weights: DirectionWeights,
    problem: Problem,
    keep: str = "none",
) -> DirectionResult:
    cell, steps, dtype = problem.cell, x_TBI.shape[0], x_TBI.dtype
    working = working_dtype(dtype)
    w = weights.to(working)
    mask = masks(problem, steps)
    active, cut = mask
    h0 = h0_BR.to(working)
    c0 = None if c0_BH is None else c0_BH.to(working)
    h, c = h0, c0
    outputs: list[Tensor] = []
    cell_states: list[Tensor] = []
    pres: list[Tensor] = []
    raws: list[Tensor] = []
    elements = x_TBI.shape[1] * w.w_ih.shape[0]
    for start, stop in chunks(steps, elements, descending=problem.reverse):
        from_input = gate_inputs(input_of(x_TBI, mask, start, stop, working), w)
        for t in reversed(range(start, stop)) if problem.reverse else range(start, stop):
            h_in, c_in = h, c
            if cut is not None:
                h_in = torch.where(cut[t], initial_or_zero(h0, problem), h)
                if c is not None and c0 is not None:
                    c_in = torch.where(cut[t], initial_or_zero(c0, problem), c)
            raw = h_in @ w.w_hh.T
            pre = cells.preactivations(cell, from_input[t - start], gate_states(raw, w))
            gates = cells.activate(cell, pre)

            if c is not None and c_in is not None:
                c_new = cells.lstm_cell_state(gates, c_in)
                h_new = gates[3] * cell_output(c_new, w)
                if (keep_c := at(problem.zoneout_c, t)) is not None:
                    c_new = keep_c * c_in + (1 - keep_c) * c_new
                c = c_new if active is None else torch.where(active[t], c_new, c)
            else:
                h_new = cells.gru_output(gates, h_in) if cell == "gru" else gates[0]
            if w.w_hr is not None:
                h_new = h_new @ w.w_hr.T
            if (keep_h := at(problem.zoneout_h, t)) is not None:
                h_new = keep_h * h_in + (1 - keep_h) * h_new
            # h leaves the step in the model's dtype: what the next step multiplies is exactly
            # what the backward pass finds in the output.
            h_new = h_new.to(dtype).to(working)
            h = h_new if active is None else torch.where(active[t], h_new, h)

            outputs.append(h)
            if c is not None:
                cell_states.append(c)
            if keep == "gates":
                pres.append(pre)
                if w.norm_hh is not None:
                    raws.append(raw)

    def over_time(values: list[Tensor], like: Tensor, padded: bool) -> Tensor:
        values = values[::-1] if problem.reverse else values
        stacked = torch.stack(values) if values else like.new_zeros(0, *like.shape)
        if padded and active is not None and problem.after_end == "zeros":
            stacked = torch.where(active, stacked, torch.zeros_like(stacked))
        return stacked.to(dtype)

    return DirectionResult(
        over_time(outputs, h0, True),
        h.to(dtype),
        None if c is None else c.to(dtype),
        None if c is None else over_time(cell_states, c, True),
        over_time(pres, h0, False) if pres else None,
        over_time(raws, h0, False) if raws else None,
    )
