"""Budgets of what torch's compiler makes several graphs of: of all of them, or refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import ecornn
from ecornn.bench.training.memory import allocated_peak, storage_bytes
from ecornn.echo.graph import NotUnderstood
from ecornn.echo.one_step import why_one_of_several
from ecornn.errors import InvalidInput

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Wide(nn.Module):
    """Most of what it makes can be made again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, x_BH: Tensor) -> Tensor:
        wide_BBH = self.mix(x_BH).unsqueeze(1) + x_BH.unsqueeze(0)
        return (wide_BBH.tanh() * wide_BBH.sigmoid()).mean(1)


class Broken(nn.Module):
    def __init__(self, width: int = 8, parts: int = 2) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Wide(width) for _ in range(parts))

    def forward(self, x_BH: Tensor) -> Tensor:
        for k, part in enumerate(self.parts):
            if k:
                torch._dynamo.graph_break()
            x_BH = part(x_BH)
        return x_BH


def held_by(run: Any, model: nn.Module, x: Tensor) -> int:
    def step() -> None:
        run(x).sum().backward()

    for _ in range(2):
        step()
        model.zero_grad()
    found = allocated_peak(step) + storage_bytes([*model.parameters(), x])
    model.zero_grad()
    return found


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_a_budget_is_one_of_all_graphs_or_refused(codegen: str) -> None:
    torch.manual_seed(0)
    model, x = Broken(), torch.randn(32, 8)
    as_written = held_by(model, model, x)
    limit = as_written * 3 // 4  # more than each graph takes that keeps all
    run = ecornn.compile(model, memory=limit, codegen=codegen)
    held = held_by(run, model, x)
    assert held <= limit
    explained = run.explain()
    assert len(explained.graphs) == 2
    assert "in several graphs: " in str(explained)
    found = torch.autograd.grad(run(x).square().sum(), list(model.parameters()))
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    with pytest.raises(InvalidInput, match="of a step like this one") as refused:
        ecornn.compile(model, memory=10_000, codegen=codegen)(x)
    (smallest,) = re.findall(r"at least ([0-9,]+) bytes", str(refused.value))
    assert int(smallest.replace(",", "")) <= held


def test_a_roomy_budget_costs_nothing_and_one_graph_stays_one() -> None:
    model, x = Broken(), torch.randn(32, 8)
    run = ecornn.compile(model, memory="1GiB", codegen="eager")
    with torch.no_grad():
        run(x)  # nothing is promised of it
    run(x).sum().backward()
    plans = [graph for graph in run.explain().graphs if graph.chosen is not None]
    assert [graph.chosen.strategy for graph in plans] == ["keep all"] * 2
    whole = Broken(parts=1)
    run = ecornn.compile(whole, memory="1GiB", codegen="eager", regions=())
    run(x).sum().backward()
    assert "the whole model is compiled: as asked for" in str(run.explain())


def test_graphs_without_a_model_get_no_promise() -> None:
    model, x = Broken(), torch.randn(8, 8)
    options = {"memory": "1GiB", "codegen": "eager"}
    run = torch.compile(model, backend="echo", options=options)
    with pytest.raises(BackendCompilerFailed, match="several graphs") as failed:
        run(x)
    assert isinstance(failed.value.inner_exception, NotUnderstood)

    def function(x: Tensor) -> Tensor:
        return model(x)

    torch._dynamo.reset()
    with pytest.raises(NotUnderstood, match=r"1.00 GiB cannot be promised, .* several graphs"):
        ecornn.compile(function, memory="1GiB", codegen="eager")(x)
    torch._dynamo.reset()
    options = {"memory": "min", "codegen": "eager"}
    torch.compile(model, backend="echo", options=options)(x).sum().backward()


def test_what_ddp_divides_is_one_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    class Context:
        ddp_optimizer_ctx = object()

    module = torch.fx.symbolic_trace(nn.Linear(2, 2))
    assert why_one_of_several(module) is None
    found = "ecornn.echo.one_step.TracingContext.try_get"
    monkeypatch.setattr(found, lambda: Context())
    assert "DistributedDataParallel" in str(why_one_of_several(module))
