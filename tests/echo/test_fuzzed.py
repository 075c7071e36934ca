"""What random programs found: each was wrong, refused or raised, and is as in eager mode now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ecornn
from ecornn.bench.training.memory import allocated_peak, storage_bytes
from ecornn.echo import fakes, onednn

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def gradients(run: Callable[..., Tensor], leaves: list[Tensor], *given: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(run(*given).sum(), leaves))


def assert_equal(run: Callable[..., Any], like: Any, leaves: list[Tensor], *given: Tensor) -> None:
    for found, want in zip(
        gradients(run, leaves, *given), gradients(like, leaves, *given), strict=True
    ):
        torch.testing.assert_close(found, want)


class Around(nn.Module):
    """A part that is compiled, beside a recurrent layer that torch's compiler leaves alone."""

    def __init__(self, layer: nn.Module, *, first: bool = False, asks: bool = False) -> None:
        super().__init__()
        self.layer, self.first, self.asks = layer, first, asks
        self.part = nn.Sequential(
            nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8), nn.Tanh()
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            found: Tensor = self.layer(self.part(x))[0]
            return found
        y: Tensor = self.part(self.layer(x)[0])
        return y * 2 if self.asks and x.sum().item() > -1e9 else y


@pytest.mark.parametrize("classes", [1, 2])
def test_a_loss_over_a_single_class_has_no_gradient(classes: int) -> None:
    w, x = torch.randn(classes, 4, requires_grad=True), torch.randn(6, 4)
    target = torch.arange(6) % classes

    def loss() -> Tensor:
        return F.cross_entropy(x @ w.t(), target)

    assert_equal(ecornn.compile(loss, codegen="inductor"), loss, [w])


@pytest.mark.parametrize("memory", ["auto", "min", 1.0, "1MiB"])
def test_a_backward_pass_may_have_no_operation(memory: Any) -> None:
    x = torch.randn(50, 8, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        return x + 0.1

    compiled = ecornn.compile(run, memory=memory, codegen="eager")
    assert_equal(compiled, run, [x], x)
    (graph,) = compiled.explain().graphs
    assert graph.fallback is None
    assert graph.predicted_peak_bytes == 3 * x.nbytes  # the input, the result and its gradient


def test_a_budget_s_rehearsal_is_no_part_of_a_checkpoint_around_it() -> None:
    model, x = Around(nn.LSTM(8, 8)), torch.randn(5, 3, 8, requires_grad=True)
    run = ecornn.compile(model, memory="1MiB", codegen="eager")

    def around(x: Tensor) -> Tensor:
        found: Tensor = checkpoint(run, x, use_reentrant=False)
        return found

    assert_equal(around, model, [x, *model.parameters()], x)
    assert_equal(around, model, [x, *model.parameters()], x)


def test_strides_may_be_others_than_were_traced() -> None:
    norm, w = nn.BatchNorm1d(64), torch.randn(64, 64, requires_grad=True)
    x = torch.randn(8, 20, 64, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        return F.linear(norm(x.transpose(1, 2)).transpose(1, 2).relu(), w)

    for options in ({}, {"memory": "min"}, {"masks": "bits"}):
        compiled = ecornn.compile(run, codegen="eager", **options)  # type: ignore[arg-type]
        assert_equal(compiled, run, [x, w], x)


def test_later_steps_may_be_longer_than_a_budget_was_planned_for() -> None:
    model = Around(nn.LSTM(8, 8))
    run = ecornn.compile(model, memory=1.0, codegen="eager")
    for steps in (20, 40, 200):
        x = torch.randn(steps, 3, 8)
        assert_equal(run, model, list(model.parameters()), x)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_part_s_gradient_may_lie_otherwise_than_its_result(kind: type[nn.Module]) -> None:
    model = Around(kind(8, 8, batch_first=True), first=True).double()
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    run = ecornn.compile(model, memory="1MiB", codegen="eager")
    assert_equal(run, model, list(model.parameters()), x)
    held = storage_bytes([*model.parameters(), x])
    predicted = run.explain().predicted_peak_bytes(held)

    def passes() -> None:
        result = run(x)
        result.backward(torch.ones_like(result))

    assert predicted == held + allocated_peak(passes)


def test_calls_are_not_counted_within_a_checkpoint() -> None:
    """Its second run would have the compiled parts, and not keep what the first one kept."""
    model, x = Around(nn.LSTM(8, 8), asks=True), torch.randn(5, 3, 8, requires_grad=True)
    run = ecornn.compile(model, codegen="eager")
    leaves = [x, *model.parameters()]
    assert_equal(lambda x: checkpoint(run, x, use_reentrant=False), model, leaves, x)
    assert "within a checkpoint" in str(run.explain())
    assert_equal(run, model, leaves, x)
    assert_equal(run, model, leaves, x)
    assert len(run.explain().graphs) == 1


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN here")
@pytest.mark.parametrize("steps", [7, 50])
def test_what_onednn_keeps_of_an_lstm_is_foretold(steps: int) -> None:
    layer, x = nn.LSTM(128, 128), torch.randn(steps, 32, 128)
    args = (x, *layer.parameters(), *torch.zeros(2, 1, 32, 128))
    states = [one.view(1, 32, 128) for one in args[-2:]]
    more = (*args[:-2], *states, False, [], 2, 128, 1, True, False, False, True)
    kept = torch.ops.aten.mkldnn_rnn_layer(*more)[3]
    assert onednn.workspace_bytes(*more) == pytest.approx(kept.nbytes, rel=0.01)
    made, _ = fakes.ONEDNN[torch.ops.aten.mkldnn_rnn_layer](*more)
    assert [one.shape for one in made[:3]] == [(steps, 32, 128), (1, 32, 128), (1, 32, 128)]
    with torch.no_grad():
        assert onednn.workspace_bytes(*more) == 0
