"""Sequences longer than the 65,535 steps at which cuDNN stops, against torch.nn in float64.

torch.nn takes a minute for a backward pass over 67,000 steps. So the expectation comes from pieces
of 1,000 steps that run side by side as one batch, from guessed states that are corrected until
every piece starts where the one before it ended; the backward pass likewise. That also serves
resets and ends, which here lie between two pieces.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from support.cases import (
    Case,
    Named,
    Values,
    call_layer,
    draw,
    draw_values,
    make_layer,
    pull_back,
)
from support.tolerances import assert_matches, tolerance

STEPS, PIECE = 67_000, 1_000
PIECES = STEPS // PIECE


@dataclass(frozen=True)
class InPieces:
    """A layer of one direction over a long sequence, by torch.nn in float64."""

    case: Case
    values: Values
    parameters: Named

    def run(self, starts: list[Tensor]) -> tuple[Named, list[Tensor]]:
        """The results, and the states that pieces enter with, given those they started from."""
        case, v = self.case, self.values
        kind = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}.get(case.cell, torch.nn.RNN)
        extra = {"nonlinearity": case.cell[4:]} if kind is torch.nn.RNN else {}
        layer = kind(case.inputs, case.hidden, **extra).double()
        x = v.x.nan_to_num().unflatten(0, (PIECES, PIECE)).transpose(0, 1).flatten(1, 2)
        state = [s.flatten(0, 1).unsqueeze(0) for s in starts]
        hx = tuple(state) if case.lstm else state[0]
        output, last = torch.func.functional_call(layer, self.parameters, (x, hx))
        output = output.unflatten(1, (PIECES, case.batch)).transpose(0, 1).flatten(0, 1)
        ends = [s[0].unflatten(0, starts[0].shape[:2]) for s in (last if case.lstm else [last])]

        lengths = torch.tensor(v.lengths or [STEPS] * case.batch)
        within = torch.arange(STEPS).unsqueeze(1) < lengths
        results = {"output": torch.where(within.unsqueeze(-1), output, 0.0)}
        columns = torch.arange(case.batch)
        for name, end in zip(("h_n", "c_n"), ends, strict=False):
            results[name] = end[lengths // PIECE - 1, columns].unsqueeze(0)
        return results, [self.enter(s, end) for s, end in zip(self.initial, ends, strict=True)]

    @property
    def initial(self) -> list[Tensor]:
        return [s for s in (self.values.h0, self.values.c0) if s is not None]

    def enter(self, initial: Tensor, ends: Tensor) -> Tensor:
        """Each piece's first state: the end of the one before, or a new beginning."""
        entered = torch.cat([initial, ends[:-1]])
        if self.values.resets is None:
            return entered
        again = initial if self.case.reset_to == "initial" else torch.zeros_like(initial)
        return torch.where(self.values.resets[::PIECE].unsqueeze(-1), again, entered)

    def solve(self) -> tuple[Named, Named]:
        """Results and gradients."""
        starts = [s.detach().expand(PIECES, -1, -1) for s in self.initial]
        for _ in range(4):
            starts, before = [s.detach() for s in self.run(starts)[1]], starts
        assert all(map(torch.equal, starts, before)), "the pieces do not fit together"

        starts = [s.requires_grad_() for s in starts]
        results, entered = self.run(starts)
        named = self.values.sources() | self.parameters
        d_results = [draw(*r.shape, seed=50 + i) for i, r in enumerate(results.values())]
        d_starts = [torch.zeros_like(s) for s in starts]
        for _ in range(4):
            found = torch.autograd.grad(
                [*results.values(), *entered],
                [*named.values(), *starts],
                [*d_results, *d_starts],
                retain_graph=True,
                materialize_grads=True,
            )
            before, d_starts = d_starts, list(found[len(named) :])
        assert all(map(torch.equal, d_starts, before)), "the gradients do not fit together"
        return results, dict(zip(named, found, strict=False))


def check(case: Case, values: Values, dtype: torch.dtype, backend: str) -> None:
    layer = make_layer(case, dtype, backend=backend)
    given = values.to(dtype).requiring_grad()
    results = call_layer(layer, case, given)
    gradients = pull_back(results, given.sources() | dict(layer.named_parameters()))

    named = layer.named_parameters()
    parameters = {n: p.detach().double().requires_grad_() for n, p in named}
    expected, expected_gradients = InPieces(case, values.requiring_grad(), parameters).solve()
    assert results["output"].shape[0] == STEPS
    for name, value in results.items():
        # rounding errors of a state die out within a few dozen steps, whatever came before
        assert_matches(value, expected[name], tolerance(dtype, 64), name)
    for name, value in gradients.items():
        # those of a weight's gradient are summed over all steps
        steps = 64 if name in given.sources() else STEPS
        assert_matches(value, expected_gradients[name], tolerance(dtype, steps), f"d {name}")


# a plain cell runs below, by the reference and with more asked of it
@pytest.mark.parametrize(
    ("cell", "backend"), [("lstm", "aten"), ("gru", "aten"), ("lstm", "reference")]
)
def test_plain(cell: str, backend: str) -> None:
    case = Case(cell, steps=STEPS, batch=1, inputs=2, hidden=3)
    check(case, draw_values(case), torch.float32, backend)


LENGTHS = [66_000, STEPS, 1_000]


def _of_mixed_lengths(case: Case) -> Values:
    values = replace(draw_values(replace(case, lengths=False, resets=False)), lengths=LENGTHS)
    for b, end in enumerate(LENGTHS):
        values.x[end:, b] = torch.nan
    return values


def test_lengths_by_torchs_kernels() -> None:
    case = Case("lstm", steps=STEPS, batch=3, inputs=2, hidden=3, lengths=True)
    check(case, _of_mixed_lengths(case), torch.float32, "aten")


@pytest.mark.parametrize(
    ("cell", "reset_to", "backend"),
    [
        ("lstm", "initial", "aten"),
        ("rnn_tanh", "zero", "reference"),
    ],
)
def test_lengths_and_resets(cell: str, reset_to: str, backend: str) -> None:
    case = Case(cell, steps=STEPS, batch=3, inputs=2, hidden=3, lengths=True, resets=True)
    resets = torch.zeros(STEPS, 3, dtype=torch.bool)
    resets[[0, 65_000, 66_000], 0] = True  # at the start, near cuDNN's limit, beyond it at the end
    resets[3_000::3_000, 1] = True
    values = replace(_of_mixed_lengths(case), resets=resets)
    check(replace(case, reset_to=reset_to), values, torch.float64, backend)
