"""Several ways to split a graph, and the best one taken: never worse than torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_module, make_boxed_func

from ecornn.echo import pipeline
from ecornn.echo.graph import NotUnderstood
from ecornn.echo.pipeline import Decision, decide


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


def run(model: nn.Module, x: Tensor) -> tuple[Decision, list[Tensor]]:
    """The decision for a model, and the gradients that its split gives."""
    decisions: list[Decision] = []

    def partition(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        decisions.append(decide(joint, inputs, num_fwd_outputs))
        return decisions[-1].chosen.modules

    def compiler(module: fx.GraphModule, example: Any) -> Any:
        return make_boxed_func(module.forward)

    compiled = aot_module(model, fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)
    x = x.detach().clone().requires_grad_()
    grads = torch.autograd.grad(compiled(x).square().sum(), [x, *model.parameters()])
    return decisions[0], list(grads)


def eager(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    return list(torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()]))


def test_attention_is_recomputed_and_right() -> None:
    torch.manual_seed(0)
    model, x = Attention(steps=24), torch.randn(4, 40, 16)
    decision, grads = run(model, x)
    assert decision.chosen.strategy == "bidirectional"
    stock = next(c for c in decision.candidates if c.strategy == "keep all")
    assert decision.chosen.peak < stock.peak / 2
    for a, b in zip(grads, eager(model, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    told = decision.explain()
    assert "→ bidirectional" in told
    assert "keep all" in told


@pytest.mark.parametrize("width", [4, 64])
def test_the_choice_is_never_worse_than_torchs(width: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.GELU())
    decision, grads = run(model, torch.randn(8, width))
    assert decision.chosen.peak == min(c.peak for c in decision.candidates)
    assert {c.strategy for c in decision.candidates} >= {"keep all", "torch's min-cut"}
    assert len(grads) == 5


def test_a_tie_goes_to_whoever_recomputes_less() -> None:
    decision, _ = run(nn.Linear(3, 3), torch.randn(2, 3))
    assert decision.chosen.strategy == "keep all"


def test_a_strategy_that_fails_is_named_and_the_others_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any) -> Any:
        raise NotUnderstood("not this one")

    monkeypatch.setitem(pipeline.STRATEGIES, "bidirectional", fails)
    decision, _ = run(nn.Linear(3, 3), torch.randn(2, 3))
    assert decision.refused == (("bidirectional", "not this one"),)
    assert "refused, not this one" in decision.explain()
    for name in pipeline.STRATEGIES:
        monkeypatch.setitem(pipeline.STRATEGIES, name, fails)
    with pytest.raises(NotUnderstood, match="not this one"):
        run(nn.Linear(3, 3), torch.randn(2, 3))
