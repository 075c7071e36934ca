"""Plans by times that were measured: asked for, kept, told; the roofline for what is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ecornn
from ecornn.echo.analysis import measured
from ecornn.echo.options import read_options
from ecornn.errors import InvalidInput

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("ECORNN_CACHE", str(tmp_path))
    return tmp_path / "echo-costs"


class Dropped(nn.Module):
    """Two large results that can be made again; which is cheaper is a matter of their times."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        wide = nn.functional.dropout(self.linear(x), 0.5).unsqueeze(1) + x.unsqueeze(0)
        return (torch.tanh(wide) * torch.erf(wide)).sum(1)


def trained(run: Any, model: nn.Module) -> list[Tensor]:
    torch.manual_seed(3)
    model.zero_grad()
    run(torch.linspace(-1, 1, 96).view(12, 8)).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("by_name", [False, True])
def test_times_are_measured_once_where_that_is_asked_for(
    by_name: bool, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = Dropped(), []

    def watched(call: Any, device: torch.device) -> float:
        calls.append(call.key)
        return 1e-3 if "erf" in call.key else 1e-4

    monkeypatch.setattr(measured, "measure", watched)

    def compiled(**asked: Any) -> Any:
        torch._dynamo.reset()
        if by_name:
            return torch.compile(model, backend="echo", options={"codegen": "eager", **asked})
        return ecornn.compile(model, codegen="eager", **asked)

    expected = trained(compiled(), model)
    assert not calls, "only if it is asked for"
    assert "times of operators" not in str(ecornn.explain())
    run = compiled(measure=True)
    found = trained(run, model)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert len(calls) == len(set(calls)) > 5
    (file,) = cache.iterdir()
    kept = json.loads(file.read_bytes())["seconds"]
    assert set(kept.values()) == {1e-3, 1e-4}
    graph = ecornn.explain(run).graphs[-1]
    assert graph.step_seconds > 1.5e-3, "by these times"
    assert graph.times.startswith(f"times of operators: {len(calls)} measured; ")
    assert "by a roofline" in graph.times
    assert "never run again: random" in graph.times
    assert graph.times[:40] in str(ecornn.explain(run))
    before = len(calls)
    trained(compiled(measure=True, memory="min", masks="bytes"), model)
    assert len(calls) == before, "what is known is not measured again"


def test_real_times_of_this_machine() -> None:
    model = Dropped()
    run = ecornn.compile(model, measure=True, memory="min")
    found = trained(run, model)
    for one, other in zip(found, trained(model, model), strict=True):
        assert torch.equal(one, other)
    (graph,) = run.explain().graphs
    assert 0 < graph.step_seconds < 1
    assert "measured" in graph.times


def test_what_is_wrong_is_told() -> None:
    with pytest.raises(InvalidInput, match="measure: got 'yes'"):
        read_options({"measure": "yes"})
    with pytest.raises(InvalidInput, match="measure: got 3"):
        ecornn.compile(Dropped(), measure=3)
