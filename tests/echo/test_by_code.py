"""Budgets, and the least, of code that inductor generates: met by what the code holds, or refused
with what it holds at least."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ecornn
from ecornn.bench.training.memory import allocated_peak, storage_bytes
from ecornn.echo.backend import EchoBackend
from ecornn.echo.by_code import (
    KEEP_ALL,
    LEAST,
    TIGHTENINGS,
    Aim,
    Tried,
    least_by_code,
    within_by_code,
)
from ecornn.echo.graph import NotUnderstood
from ecornn.echo.options import Memory, read_options
from ecornn.errors import InvalidInput

pytestmark = pytest.mark.usefixtures("fresh_compiler")

INPUTS = 100


@dataclass
class Compiler:
    """Code that holds `times` what its plan was to hold, and of the aims for the least `peaks`."""

    limit: int
    times: float
    peaks: dict[Aim, int] = field(
        default_factory=lambda: dict(zip(LEAST, (900, 700, 800), strict=True))
    )
    seen: list[Aim] = field(default_factory=list)

    def __call__(self, aim: Aim, most: int | None) -> Tried:
        self.seen.append(aim)
        planned = int(aim.memory.amount)
        peak = self.peaks.get(aim, INPUTS + int(self.times * (planned - INPUTS)))
        limit = self.limit if len(self.seen) == 1 else planned
        return Tried(aim, "a plan", peak, INPUTS, planned, 0.0, limit)


def asked(limit: int) -> Memory:
    return Memory("bytes", limit)


def test_code_that_fits_is_taken_as_it_is() -> None:
    compiler = Compiler(1100, times=1.0)
    found = within_by_code(asked(1100), compiler)
    assert found == Aim(asked(1100), or_least=True, limit=1100)
    assert len(compiler.seen) == 1


def test_code_that_holds_more_is_planned_for_less_in_proportion() -> None:
    compiler = Compiler(1100, times=2.0)
    found = within_by_code(asked(1100), compiler)
    assert found == Aim(asked(INPUTS + 500), or_least=True, limit=1100)
    assert len(compiler.seen) == 2


def test_a_fraction_is_one_of_code_that_keeps_all() -> None:
    half = Memory("fraction", 0.5)
    compiler = Compiler(600, times=1.0)
    compiler.peaks[Aim(half, KEEP_ALL)] = 1100
    compiler.seen.append(LEAST[0])
    assert within_by_code(half, compiler) == Aim(asked(600), or_least=True, limit=600)


def test_of_the_least_that_is_taken_whose_code_holds_least() -> None:
    assert least_by_code(Compiler(0, 1.0)) == LEAST[1]

    def alike(aim: Aim, most: int | None) -> Tried:
        return Tried(aim, "a plan", 900, INPUTS, 900, float(aim == LEAST[0]))

    assert least_by_code(alike) == LEAST[1], "the quicker one"

    def told(aim: Aim, most: int | None) -> Tried | None:
        assert most == (None if aim == LEAST[0] else 900)
        return None if most else Tried(aim, "a plan", 900, INPUTS, 900, 0.0)

    assert least_by_code(told) == LEAST[0], "the others would hold more, whatever their code"


def test_what_does_not_fit_is_compiled_for_the_least_and_refused_with_that() -> None:
    compiler = Compiler(750, times=1.0)
    compiler.peaks |= {Aim(asked(n), or_least=True): 2000 for n in range(750)}
    compiler.peaks[Aim(asked(750), or_least=True)] = 2000
    assert within_by_code(asked(750), compiler) == Aim(LEAST[1].memory, limit=750)
    assert len(compiler.seen) <= 1 + TIGHTENINGS + len(LEAST)
    compiler.limit, compiler.seen = 699, []
    with pytest.raises(InvalidInput, match=r"which is 699 bytes here, expected at least 700 bytes"):
        within_by_code(asked(699), compiler)


def compiled(model: nn.Module, memory: Any) -> Any:
    return ecornn.compile(model, memory=memory, codegen="inductor", regions=())


def held_by(run: Any, model: nn.Module, x: Tensor) -> int:
    """What a step holds, the memory of weights and inputs included."""

    def step() -> None:
        run(x).sum().backward()

    for _ in range(2):
        step()
        model.zero_grad()
    return allocated_peak(step) + storage_bytes([*model.parameters(), x])


def smallest_named(refused: InvalidInput) -> int:
    return int(re.findall(r"at least ([0-9,]+) bytes", str(refused))[0].replace(",", ""))


def test_the_least_is_that_of_the_code() -> None:
    """Run again, the first product of this one takes more than is freed, by inductor's order."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 16))
    x = torch.randn(64, 16)
    least = compiled(model, "min")
    held = held_by(least, model, x)
    (told,) = least.explain().graphs
    peaks = [peak for _, peak in told.code_of]
    assert peaks[0] > min(peaks) == told.predicted_peak_bytes, "not the one with the best estimate"
    assert "compiled to choose among: " in str(least.explain())
    torch._dynamo.reset()
    assert held <= held_by(torch.compile(model), model, x)
    torch._dynamo.reset()
    auto = compiled(model, "auto")
    assert held <= held_by(auto, model, x)
    assert auto.explain().graphs[0].code_of == []


def test_a_budget_is_met_by_the_code_or_refused_with_what_the_least_holds() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(16, 16), nn.Tanh())])
    x = torch.randn(64, 16)
    with pytest.raises(InvalidInput, match="the smallest peak that was found") as refused:
        compiled(model, 26_000)(x)  # fits by the estimate
    smallest = smallest_named(refused.value)
    torch._dynamo.reset()
    run = compiled(model, smallest)
    assert held_by(run, model, x) <= smallest
    (told,) = run.explain().graphs
    assert (told.limit_bytes, told.over_budget) == (smallest, None)
    assert told.predicted_peak_bytes <= smallest
    assert len(told.code_of) > 1, "the first one held more"
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    found = torch.autograd.grad(run(x).square().sum(), list(model.parameters()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_graph_may_be_kept_for_a_second_pass() -> None:
    """Its code is another one, made when it is first run: nothing may be overwritten."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(5, 8)
    loss = compiled(model, 1.0)(x).square().sum()
    weights = list(model.parameters())
    found = [torch.autograd.grad(loss, weights, retain_graph=True) for _ in range(2)]
    expected = torch.autograd.grad(model(x).square().sum(), weights)
    for first, second, third in zip(*found, expected, strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, third, rtol=1e-4, atol=1e-5)


def test_a_budget_of_code_that_cannot_be_replayed_is_not_promised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(_: Any) -> Any:
        raise NotUnderstood("written in another language")

    monkeypatch.setattr("ecornn.echo.inductor._code_of", unknown)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    with pytest.raises(
        NotUnderstood, match=r"1.00 MiB cannot be promised, since .* another language"
    ):
        compiled(model, "1MiB")(x)
    torch._dynamo.reset()
    compiled(model, "min")(x).sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_nothing_is_compiled_ahead_without_a_backward_pass() -> None:
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    backend = EchoBackend(read_options({"memory": "1MiB", "codegen": "inductor"}))
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
    assert backend.report.graphs[0].code_of == []
