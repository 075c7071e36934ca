"""Several ways to split a graph, and the best one taken: never worse than torch's own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_module, make_boxed_func

from ecornn.echo import pipeline
from ecornn.echo.graph import NotUnderstood
from ecornn.echo.options import read_memory
from ecornn.echo.pipeline import Decision, decide
from ecornn.echo.request import Request
from ecornn.echo.stock import STOCK
from ecornn.errors import InvalidInput


class Attention(nn.Module):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps, self.mix, self.score = steps, nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, keys_BSH: Tensor) -> Tensor:
        shared, query, found = self.mix(keys_BSH), keys_BSH.mean(1), []
        for _ in range(self.steps):
            scores = self.score(torch.tanh(shared + self.mix(query).unsqueeze(1)))
            query = (scores.softmax(1) * keys_BSH).sum(1)
            found.append(query)
        return torch.stack(found)


def run(
    model: nn.Module, x: Tensor, memory: Any = "min", calls: int = 1, **settings: Any
) -> tuple[Decision, list[Tensor]]:
    """The decision for a model, and the gradients that its split gives."""
    decisions: list[Decision] = []

    def partition(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        decisions.append(
            decide(joint, inputs, num_fwd_outputs, Request(read_memory(memory), calls, settings))
        )
        return decisions[-1].modules

    def compiler(module: fx.GraphModule, example: Any) -> Any:
        return make_boxed_func(module.forward)

    compiled = aot_module(model, fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)
    x = x.detach().clone().requires_grad_()
    grads = torch.autograd.grad(compiled(x).square().sum(), [x, *model.parameters()])
    return decisions[0], list(grads)


def eager(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    return list(torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()]))


def peak_of(decision: Decision, strategy: str) -> int:
    return decision.candidate(strategy).estimate.peak()


def test_attention_is_recomputed_and_right() -> None:
    torch.manual_seed(0)
    model, x = Attention(steps=24), torch.randn(4, 40, 16)
    decision, grads = run(model, x)
    assert decision.chosen.plan is not None
    assert decision.chosen.estimate.peak() < peak_of(decision, "keep all") / 3
    for a, b in zip(grads, eager(model, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("memory", ["auto", "min"])
@pytest.mark.parametrize("width", [4, 64])
def test_the_choice_is_never_worse_than_torchs(width: int, memory: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.GELU())
    decision, grads = run(model, torch.randn(8, width), memory)
    assert {c.strategy for c in decision.candidates} >= {"keep all", "torch's min-cut"}
    for strategy in ("keep all", "torch's min-cut"):
        assert decision.chosen.estimate.peak() <= peak_of(decision, strategy)
    assert len(grads) == 5


def test_a_tie_goes_to_whoever_recomputes_less() -> None:
    decision, _ = run(nn.Linear(3, 3), torch.randn(2, 3))
    assert decision.chosen.strategy == "keep all"


def test_auto_spends_little_and_min_holds_least() -> None:
    torch.manual_seed(0)
    model, x = Attention(steps=8), torch.randn(4, 40, 16)
    found = {memory: run(model, x, memory)[0] for memory in ("auto", 0.6, "min")}
    peaks = [decision.chosen.estimate.peak() for decision in found.values()]
    assert peaks == sorted(peaks, reverse=True)
    auto = found["auto"]
    assert auto.prices is not None
    assert auto.chosen.estimate.seconds_added <= 0.02 * auto.prices.step_seconds
    limit = found[0.6].limits.bytes
    assert limit is not None
    assert peaks[1] <= limit < peak_of(found[0.6], "keep all")


def test_a_budget_is_met_or_refused_with_the_smallest_that_would_be() -> None:
    torch.manual_seed(0)
    model, x = Attention(steps=8), torch.randn(4, 40, 16)
    with pytest.raises(InvalidInput, match=r"at least [0-9,]+ bytes") as refused:
        run(model, x, 1000)
    smallest = int(re.findall(r"at least ([0-9,]+) bytes", str(refused.value))[0].replace(",", ""))
    decision, grads = run(model, x, smallest)
    assert decision.chosen.estimate.peak() == smallest
    for a, b in zip(grads, eager(model, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    with pytest.raises(InvalidInput):
        run(model, x, smallest - 1)


@pytest.mark.parametrize("settings", [{}, {"compiler": "inductor"}])
def test_what_the_least_holds_is_met_if_it_is_asked_for(settings: Any) -> None:
    torch.manual_seed(0)
    model, x = Attention(steps=2), torch.randn(4, 40, 16)
    smallest = run(model, x, "min", **settings)[0].chosen.estimate.peak()
    decision, _ = run(model, x, smallest, **settings)
    assert decision.chosen.estimate.peak() <= smallest == decision.limits.bytes
    with pytest.raises(InvalidInput, match=f"at least {smallest:,} bytes"):
        run(model, x, 1000, **settings)


def test_a_roomier_budget_costs_no_more_time() -> None:
    torch.manual_seed(0)
    model, x = Attention(steps=8), torch.randn(4, 40, 16)
    added = [run(model, x, memory)[0].chosen.estimate.seconds_added for memory in (0.55, 0.7, 1.0)]
    assert added == sorted(added, reverse=True)
    assert added[0] > added[-1]


def test_what_is_called_often_is_planned_for_what_one_call_keeps() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Sigmoid(), nn.Tanh(), nn.Linear(8, 8))
    once, often = (run(model, torch.randn(64, 8), "min", calls)[0] for calls in (1, 50))
    assert often.chosen.estimate.kept_bytes <= once.chosen.estimate.kept_bytes
    best = min(c.estimate.kept_bytes for c in often.candidates if c.estimate.seconds_added >= 0)
    assert often.chosen.estimate.kept_bytes < 2 * best + 1


@pytest.mark.parametrize("memory", ["auto", "min"])
def test_for_inductor_nobody_keeps_more_than_torch_would(memory: str) -> None:
    """A single step: the simulated peak alone would have it keep more."""
    decision, _ = run(Attention(steps=1), torch.randn(4, 40, 16), memory, compiler="inductor")
    stock = [c.estimate.kept_bytes for c in decision.candidates if c.modules is not None]
    assert len(stock) == 2
    assert decision.chosen.estimate.kept_bytes <= min(stock)


def test_what_is_rewritten_wrongly_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    stock: Iterator[list[str]] = iter([[] for _ in STOCK])  # looked at first, and right
    wrong = ["gradient 0 is computed otherwise"]
    monkeypatch.setattr(pipeline, "differences", lambda *_: next(stock, wrong))
    decision, grads = run(Attention(steps=6), torch.randn(4, 40, 16))
    assert decision.chosen.plan is None
    assert decision.fallback is not None
    assert "computed otherwise" in decision.fallback
    assert len(grads) == 5


def test_torch_s_own_splits_of_large_graphs_are_made_only_if_ours_are_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ecornn.echo.joint.MOST_OPERATIONS", 10)
    model, x = Attention(steps=6), torch.randn(4, 40, 16)
    decision, _ = run(model, x, compiler="inductor")
    assert decision.chosen.plan is not None
    assert decision.candidate("keep all").plan is not None
    most = decision.candidate("keep all").estimate
    assert decision.chosen.estimate.kept_bytes <= most.kept_bytes
    assert decision.chosen.estimate.peak() <= most.peak()
    assert dict(decision.refused)["torch's min-cut"].startswith("not tried")
    wrong = iter([["gradient 0 is computed otherwise"]] * pipeline.TRIES)
    monkeypatch.setattr(pipeline, "differences", lambda *_: next(wrong, []))
    decision, grads = run(model, x)
    assert decision.chosen.plan is None
    assert decision.chosen.strategy == "keep all"
    assert "computed otherwise" in str(decision.fallback)
    for a, b in zip(grads, eager(model, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_where_every_split_is_wrong_none_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "differences", lambda *_: ["gradient 0 is computed otherwise"])
    with pytest.raises(NotUnderstood, match="keep all: not the same computation"):
        run(nn.Linear(3, 3), torch.randn(2, 3))


def test_a_graph_that_is_not_understood_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise NotUnderstood("not this one")

    monkeypatch.setattr("ecornn.echo.joint.read_graph", fails)
    decision, _ = run(nn.Linear(3, 3), torch.randn(2, 3))
    assert decision.fallback == "not this one"
    assert decision.chosen.strategy == "torch's min-cut"
    with pytest.raises(NotUnderstood, match="cannot be promised, since not this one"):
        run(nn.Linear(3, 3), torch.randn(2, 3), "1MiB")


def test_a_strategy_of_torchs_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no flow")

    monkeypatch.setitem(STOCK, "torch's min-cut", fails)
    decision, _ = run(nn.Linear(3, 3), torch.randn(2, 3))
    assert decision.refused == (("torch's min-cut", "no flow"),)


@pytest.mark.parametrize("error", [KeyError("val"), IndexError("9"), ValueError("odd"), TypeError])
def test_an_analysis_that_fails_leaves_the_graph_to_torch(
    error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise error

    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    monkeypatch.setattr(pipeline, "plans_for", fails)
    decision, grads = run(model, x)
    assert "the analysis failed with" in (decision.fallback or "")
    for one, other in zip(grads, eager(model, x), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(NotUnderstood, match="cannot be promised, since the analysis failed"):
        run(model, x, "1GiB")
