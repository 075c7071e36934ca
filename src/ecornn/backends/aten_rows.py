"""Sequences with ends and resets, by kernels that know neither.

A reset cuts a sequence into pieces that know nothing of each other, in both directions. Each piece
becomes a row of a batch with a length of its own, and the rows run longest first in a few
stretches of time, each without the rows that have ended. Where a row's steps lie in the input is
kept as numbers, so that sorting, cutting and turning around are one gather a stretch, and putting
the outputs back is one gather.

Suffixes: N rows, others as in `protocol`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ecornn.backends.protocol import LayerCall

#: (output, h_n, c_n) of one direction: (T, B, R), (1, B, R), (1, B, H).
Run = tuple[Tensor, Tensor, Tensor | None]


class Rows(NamedTuple):
    """Pieces of sequences, longest first."""

    sequence_N: Tensor  # which sequence of the batch
    first_N: Tensor  # the time of the first step, in running order
    length_N: Tensor
    starts_fresh_N: Tensor  # whether it starts at a reset rather than where the sequence does
    ends_sequence_N: Tensor  # whether its last state is the sequence's
    forward: bool  # whether time grows from step to step


def rows_of(call: LayerCall, *, reverse: bool) -> Rows:
    steps, batch, _ = call.input_TBI.shape
    device = call.input_TBI.device
    ends_B = call.lengths_B
    if ends_B is None:
        ends_B = torch.full((batch,), steps, device=device)
    time_1T = torch.arange(steps, device=device).unsqueeze(0)
    begins_BT = (time_1T == 0).expand(batch, steps)
    if call.resets_TB is not None:
        begins_BT = begins_BT | call.resets_TB.T
    sequence, begin = (begins_BT & (time_1T < ends_B.unsqueeze(1))).nonzero(as_tuple=True)
    is_last = torch.ones_like(sequence, dtype=torch.bool)
    is_last[:-1] = sequence[1:] != sequence[:-1]
    # a piece ends where the next of its sequence begins, or with the sequence
    end = torch.where(is_last, ends_B[sequence], begin.roll(-1))
    is_first = begin == 0
    length, order = (end - begin).sort(descending=True, stable=True)
    if reverse:
        first, fresh, final = end - 1, ~is_last, is_first
    else:
        first, final = begin, is_last
        fresh = ~is_first
        if call.resets_TB is not None:
            fresh = fresh | call.resets_TB[begin, sequence]
    return Rows(sequence[order], first[order], length, fresh[order], final[order], not reverse)


def run_rows(
    call: LayerCall,
    rows: Rows,
    run: Callable[[LayerCall, Tensor | None], Run],
    costs: Costs,
) -> Run:
    """One direction, row by row of `rows`. `run` serves a padded batch forwards; the lengths it is
    given, where not None, say where rows end inside the stretch, and their cell states must stand
    still. What lies beyond an end there is the row's own last step again.
    """
    steps, batch, features = call.input_TBI.shape
    x_flat = call.input_TBI.reshape(steps * batch, features)
    h = _entering(call.h0_DBR, rows, call.reset_to)
    c = None if call.c0_DBH is None else _entering(call.c0_DBH, rows, call.reset_to)
    ended_c: list[Tensor] = []
    outputs: list[Tensor] = []
    # where each step's output will be found among the outputs of all stretches; a step that does
    # not run gets the zeros behind them
    place = torch.full((steps * batch,), -1, device=x_flat.device)
    start = done = 0
    for stop, running in stretches(rows.length_N, costs):
        address = _addresses(rows, running, start, stop, batch)
        if c is not None:
            ended_c.append(c[:, running:])
            c = c[:, :running]
        left = rows.length_N[:running] - start
        inside = left[-1] < stop - start
        stretch = replace(
            call,
            input_TBI=x_flat.index_select(0, address.flatten()).unflatten(0, address.shape),
            h0_DBR=h[:, :running],
            c0_DBH=c,
        )
        output, h, c = run(stretch, left.clamp(max=stop - start) if inside else None)
        runs = torch.arange(stop - start, device=left.device).unsqueeze(1) < left
        numbers = torch.arange(done, done + address.numel(), device=left.device)
        place[address[runs]] = numbers.view(address.shape)[runs]
        outputs.append(output.flatten(0, 1))
        done += address.numel()
        start = stop
    flat = torch.cat([*outputs, h.new_zeros(1, h.shape[-1])])
    place = torch.where(place < 0, done, place)
    output = flat.index_select(0, place).view(steps, batch, h.shape[-1])

    sign = 1 if rows.forward else -1
    last_N = (rows.first_N + sign * (rows.length_N - 1)) * batch + rows.sequence_N
    h_N = flat.index_select(0, place[last_N])
    h_n = _of_sequences(h_N.unsqueeze(0), rows, call.h0_DBR)
    if c is None or call.c0_DBH is None:
        return output, h_n, None
    c_N = torch.cat([c, *reversed(ended_c)], 1)
    return output, h_n, _of_sequences(c_N, rows, call.c0_DBH)


def _addresses(rows: Rows, running: int, start: int, stop: int, batch: int) -> Tensor:
    """Row numbers in the flat input of steps [start, stop) of the running rows; a row that ends
    inside repeats its last step."""
    step_T1 = torch.arange(start, stop, device=rows.first_N.device).unsqueeze(1)
    step_TN = torch.minimum(step_T1, rows.length_N[:running] - 1)
    time_TN = rows.first_N[:running] + (step_TN if rows.forward else -step_TN)
    return time_TN * batch + rows.sequence_N[:running]


def _entering(initial_1BF: Tensor, rows: Rows, reset_to: str) -> Tensor:
    states = initial_1BF.index_select(1, rows.sequence_N)
    if reset_to == "initial":
        return states
    return torch.where(rows.starts_fresh_N.view(1, -1, 1), states.new_zeros(()), states)


def _of_sequences(states_1NF: Tensor, rows: Rows, initial_1BF: Tensor) -> Tensor:
    """Each sequence's last state; one without steps keeps its initial state."""
    batch = initial_1BF.shape[1]
    row_B = torch.full((batch,), -1, device=states_1NF.device)
    finals = rows.ends_sequence_N.nonzero().squeeze(1)
    row_B[rows.sequence_N[finals]] = finals
    if states_1NF.shape[1] == 0:
        return initial_1BF
    found = states_1NF.index_select(1, row_B.clamp(min=0))
    return torch.where((row_B >= 0).view(1, -1, 1), found, initial_1BF)


class Costs(NamedTuple):
    """Microseconds, roughly: of a call, of a step of it, of one row's share of a step."""

    call: float
    step: float
    row: float


def costs_of(call: LayerCall) -> Costs:
    """A model good enough to choose where rows drop out, from sizes alone."""
    w = call.weights[0]
    operations = 2 * (w.w_ih.numel() + w.w_hh.numel())
    if call.input_TBI.is_cuda:
        # launches count, the arithmetic hardly: about 10 Tflop/s at these sizes
        return Costs(100.0, 10.0, operations / 1e7)
    # oneDNN prepares a kernel for every new shape; about 80 Gflop/s a core
    prepare = 500.0 if call.cell == "lstm" and call.input_TBI.dtype != torch.float64 else 50.0
    return Costs(prepare, 5.0, operations / 8e4)


def stretches(length_N: Tensor, costs: Costs) -> list[tuple[int, int]]:
    """(where it stops, rows that run) of each stretch, by least total cost.

    Stops are sought among the powers of two, which bound the padded work by twice the real, and
    the quartiles of the lengths.
    """
    count = length_N.shape[0]
    if count == 0:
        return []
    longest = int(length_N[0])
    quartiles = length_N[[count // 4, count // 2, 3 * count // 4]].tolist()
    powers = [1 << k for k in range(longest.bit_length()) if 1 << k < longest]
    stops = sorted({0, longest, *quartiles, *powers})
    limits = torch.tensor(stops, device=length_N.device).unsqueeze(1)
    running = (length_N.unsqueeze(0) > limits).sum(1).tolist()

    best: list[tuple[float, int]] = [(0.0, 0)]  # cost up to each stop, and the stop before it
    for j in range(1, len(stops)):
        best.append(
            min(
                (
                    best[i][0]
                    + costs.call
                    + (stops[j] - stops[i]) * (costs.step + running[i] * costs.row),
                    i,
                )
                for i in range(j)
            )
        )
    found = []
    j = len(stops) - 1
    while j > 0:
        i = best[j][1]
        found.append((stops[j], running[i]))
        j = i
    return found[::-1]
