"""Recurrent layers are run again without being asked where that is a small part of the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ecornn
from ecornn.echo.lean import layers, worth
from ecornn.echo.lean.worth import Priced


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "FEWEST_BYTES", 0)


class Translator(nn.Module):
    """A short layer, and a part that is called many times."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.encoder, self.calls = nn.LSTM(8, 8), calls
        self.step = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x)[0][-1]
        for _ in range(self.calls):
            h = self.step(h)
        return h.sum()


@pytest.mark.parametrize(
    ("calls", "memory", "again"), [(80, "auto", 1), (4, "auto", 0), (80, 1, 0)]
)
def test_auto_runs_layers_again_where_they_are_a_small_part(
    calls: int, memory: Any, again: int
) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Translator(calls), torch.randn(3, 2, 8)
    expected = torch.autograd.grad(model(x), list(model.parameters()))
    compiled = ecornn.compile(model, memory="1GiB" if memory == 1 else memory)
    for one, other in zip(
        torch.autograd.grad(compiled(x), list(model.parameters())), expected, strict=True
    ):
        torch.testing.assert_close(one, other)
    told = str(compiled.explain())
    assert ("run again in the backward pass, 1 calls" in told) == bool(again)
    assert ("of a step" in told) == bool(again)
    torch._dynamo.reset()


def test_a_part_may_spend_a_share_of_what_the_whole_step_takes() -> None:
    """Not of its own time alone: what it adds is added to the step."""
    limits = {}
    for steps in (4, 400):
        torch._dynamo.reset()
        compiled = ecornn.compile(Translator(80))
        compiled(torch.randn(steps, 2, 8)).backward()
        (graph,) = compiled.explain().graphs
        shares, backend = compiled._regions.shares, compiled._regions._backends["step"]
        assert 0 < shares.parts["step"] < shares.seconds
        assert backend.beside_s == 3 * (shares.seconds - shares.parts["step"]) / 80
        assert graph.limit_seconds == 0.02 * (graph.step_seconds + backend.beside_s)
        limits[steps] = graph.limit_seconds
    assert limits[400] > 2 * limits[4]
    torch._dynamo.reset()


def test_a_layer_takes_as_long_as_its_steps_in_a_row() -> None:
    layer, times = nn.LSTM(8, 8, num_layers=2, bidirectional=True), {}
    for steps in (10, 20):
        mode = Priced()
        with mode.parts_of(layer), mode, torch.no_grad():
            layer(torch.empty(steps, 4, 8))
        times[steps] = mode.shares.layers
        assert mode.shares.layers < mode.shares.seconds
    launches = worth.KERNELS * 4 * 10 * 5e-6
    assert times[20] > times[10] > launches
    assert times[20] == pytest.approx(2 * times[10], rel=0.05)


def test_a_layer_may_be_called_by_the_name_of_its_input() -> None:
    layer, seconds = nn.GRU(8, 8), []
    for named in (False, True):
        mode = Priced()
        with mode.parts_of(layer), mode, torch.no_grad():
            given = torch.empty(10, 4, 8)
            layer(input=given) if named else layer(given)
        seconds.append((mode.shares.seconds, mode.shares.layers))
    assert seconds[0] == seconds[1]
    assert all(seconds[0])
