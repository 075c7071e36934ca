"""Recurrent layers are run again without being asked where that is a small part of the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ecornn
from ecornn.echo.lean import layers, worth
from ecornn.echo.lean.worth import LayerCall, Priced, Shares
from ecornn.echo.regions import CALL_S


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
    told = " ".join(str(compiled.explain()).split())
    assert ("run again in the backward pass, 1 calls" in told) == bool(again)
    assert ("that is estimated to take" in told) == bool(again)
    assert f"of 1 calls of recurrent layers in a forward pass {again} are run again" in told
    torch._dynamo.reset()


def test_a_part_may_spend_a_share_of_what_the_whole_step_takes() -> None:
    """Not of its own time alone: what it adds is added to the step, of which the host's time for
    each of its calls is a part."""
    limits = {}
    for steps in (4, 400):
        torch._dynamo.reset()
        compiled = ecornn.compile(Translator(80))
        compiled(torch.randn(steps, 2, 8)).backward()
        (graph,) = compiled.explain().graphs
        shares, backend = compiled._regions.shares, compiled._regions._backends["step"]
        assert 0 < shares.parts["step"] < shares.seconds
        around = 3 * (shares.seconds - shares.parts["step"]) / 80
        assert backend.beside_s == pytest.approx(around + CALL_S)
        share = 0.02 * (graph.step_seconds + backend.beside_s)  # keeping all is quickest here
        assert graph.limit_seconds == pytest.approx(share)
        limits[steps] = graph.limit_seconds - 0.02 * CALL_S
    assert limits[400] > 2 * limits[4]
    torch._dynamo.reset()


def test_a_layer_takes_as_long_as_its_steps_in_a_row() -> None:
    layer, times = nn.LSTM(8, 8, num_layers=2, bidirectional=True), {}
    for steps in (10, 20):
        mode = Priced()
        with mode.parts_of(layer), mode, torch.no_grad():
            layer(torch.empty(steps, 4, 8))
        (call,) = mode.shares.layers
        times[steps] = call.seconds
        assert call.seconds < mode.shares.seconds
    launches = worth.KERNELS * 4 * 10 * 5e-6
    assert times[20] > times[10] > launches
    assert times[20] == pytest.approx(2 * times[10], rel=0.05)


def test_what_launches_nothing_takes_no_time() -> None:
    """Each question for a tensor's device was priced as a kernel."""
    mode = Priced()
    with mode, torch.no_grad():
        x = torch.empty(4, 8, device="cuda")
        assert x.device.type == "cuda"
        views = x.t(), x.view(8, 4), x.detach(), x.unsqueeze(0)
        made = torch.empty_like(x), x.new_empty(3), torch.empty_strided((2, 2), (2, 1))
        assert mode.shares.seconds == 0
        torch.zeros(3, device="cuda")
        once = mode.shares.seconds
        assert once > 0
        x.add_(1)
        assert mode.shares.seconds > once
    assert len(views) + len(made) == 7


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


def priced(*calls: tuple[str, float, int, bool]) -> Shares:
    """Of a forward pass of one second: layers by path, milliseconds, bytes, able."""
    made = [LayerCall(path, ms / 1000, count, able) for path, ms, count, able in calls]
    return Shares(1.0, made)


def test_some_layers_are_nearly_free_where_all_are_not() -> None:
    """3 % of a step of three seconds is 90 ms: of layers that free as much a second, the first."""
    alike = priced(*[(f"layer{i}", 40.0, 1000, True) for i in range(5)])
    assert alike.nearly_free(()) == {0, 1}
    assert alike.of_step(alike.layers[:2]) == pytest.approx(0.08 / 3)
    most = priced(("a", 60, 100, True), ("b", 50, 400, True), ("c", 40, 500, True))
    assert most.nearly_free(()) == {1, 2}, "what frees most, within 90 ms"
    small = priced(("a", 80, 100, True), ("b", 50, 500, True), ("c", 45, 10, True))
    assert small.nearly_free(()) == {1}, "the next does not fit, nor does the one after it"
    dear = priced(("a", 91, 100, True))
    assert 0 not in dear.nearly_free(())
    assert priced().nearly_free(()) is layers.NO_CALL


def test_layers_that_cannot_be_run_again_or_are_compiled_have_no_part_in_it() -> None:
    calls = priced(
        ("encoder", 10, 100, False), ("step.cell", 10, 900, True), ("other", 10, 100, True)
    )
    assert 1 in calls.nearly_free(())
    # those within a compiled part are not seen when the model runs, and have no place then
    assert calls.layers_outside(["step"]) == [calls.layers[0], calls.layers[2]]
    assert calls.layers_outside(["step.cell"]) == calls.layers_outside(["step"])
    assert calls.nearly_free(["step"]) is layers.EVERY_CALL
    assert calls.told(frozenset([1]), ["step"]).endswith("0.3% of a step")


class Stacked(nn.Module):
    """Layers of which one takes far longer than the other, and a part that is called often."""

    def __init__(self) -> None:
        super().__init__()
        self.short, self.long = nn.GRU(8, 8), nn.GRU(8, 8)
        self.step = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        long = self.long(x.repeat(200, 1, 1))[0][-3:]
        h = self.short(x + long)[0][-1]
        for _ in range(80):
            h = self.step(h)
        return h.sum()


def test_auto_runs_again_those_that_are_nearly_free() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Stacked(), torch.randn(3, 2, 8)
    expected = torch.autograd.grad(model(x), list(model.parameters()))
    compiled = ecornn.compile(model, codegen="eager")
    for _ in range(2):
        found = torch.autograd.grad(compiled(x), list(model.parameters()))
        assert all(map(torch.equal, found, expected))
    told = " ".join(str(compiled.explain()).split())
    assert "of 2 calls of recurrent layers in a forward pass 1 are run again" in told
    assert "run again in the backward pass, 2 calls" in told, "one in each of two steps"
    assert compiled._regions.again == {1}, "the short one, which is called second"
    torch._dynamo.reset()
