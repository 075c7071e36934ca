"""Of recurrent layers those are run again that are needed for a step to fit, and no others."""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import partial
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ecornn.echo import fakes
from ecornn.echo.counted_storages import Functions, NotedFunctions
from ecornn.echo.cudnn import Room
from ecornn.echo.layer_choice import LayerChoice
from ecornn.echo.lean import layers
from ecornn.echo.lean.alone import AssumedLoan
from ecornn.echo.model_call import ModelCall
from ecornn.echo.rehearse import Rehearsal, Rehearsed, rehearsal_of


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "FEWEST_BYTES", 0)


class Stack(nn.Module):
    """Layers of two directions that are added, of which the first reads more than the others."""

    def __init__(self, count: int) -> None:
        super().__init__()
        sizes = [48, *[16] * (count - 1)]
        self.layers = nn.ModuleList(nn.GRU(size, 16, bidirectional=True) for size in sizes)
        for layer in self.layers:  # in one memory, as on CUDA
            weights = list(layer.parameters())
            sizes = [weight.numel() for weight in weights]
            for weight, part in zip(weights, torch.randn(sum(sizes)).split(sizes), strict=True):
                weight.data = part.view(weight.shape)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            both = layer(x)[0]
            x = both[..., :16] + both[..., 16:]
        return x.square().mean()


def replaced(kind: type[NotedFunctions]) -> Callable[[Container[int]], Functions]:
    lend = partial(AssumedLoan, private=True)
    return lambda again: partial(kind, again=again, lend=lend)


class Cudnn(NotedFunctions):
    """Has layers run by cuDNN's operator."""

    def run_layer(self, place: int, layer: Any, call: layers.Arguments, *, again: bool) -> Any:
        return super().run_layer(place, _as_cudnn_does, call, again=again)


def _as_cudnn_does(x: Tensor, state: Tensor, weights: list[Tensor], *options: Any) -> Any:
    call = (x, weights, 4, None, state, None, 3, 16, 0, 1, False, 0.0, True, True, [], None)
    output, states, *_ = torch.ops.aten._cudnn_rnn(*call)
    return output, states


class Once:
    """A rehearsal that runs the step with the same layers again once: of a dozen limits each asks
    for some of the sixteen choices."""

    def __init__(self, rehearsal: Rehearsal, layers: int) -> None:
        self.rehearsal, self.layers = rehearsal, layers
        self.known: dict[frozenset[int], Rehearsed] = {}

    def step(self, functions: Any) -> Rehearsed:
        again = functions.keywords["again"]
        some = frozenset(place for place in range(self.layers) if place in again)
        if some not in self.known:
            self.known[some] = self.rehearsal.step(functions)
        return self.known[some]


@pytest.mark.parametrize(("kind", "steps", "rows"), [(NotedFunctions, 2, 60), (Cudnn, 8, 15)])
def test_none_that_fits_takes_less_time(
    kind: type[NotedFunctions], steps: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside all choices that there are, of layers that hold alike."""
    monkeypatch.setattr(fakes, "room_of_cudnn", lambda *_: Room(60_000, 1_000, 70_000))
    model = Stack(4)
    call = ModelCall.of((torch.randn(steps, rows, 48),), {}, torch.device("cpu"))
    assert call is not None
    functions = replaced(kind)
    choices = [frozenset(some) for n in range(5) for some in combinations(range(4), n)]
    with rehearsal_of(model, call, {}) as every_step:
        rehearsal = Once(every_step, len(model.layers))
        found = {some: rehearsal.step(functions(some)) for some in choices}
        assert every_step.step(functions(choices[-2])).most == found[choices[-2]].most
        seconds = found[frozenset()].layers
        assert seconds[0] > seconds[1] == seconds[2] == seconds[3]
        limits = sorted({one.most for one in found.values()})
        assert len(limits) > 3
        for limit in limits:
            fits = [some for some, one in found.items() if one.most <= limit]
            best = min(sum(seconds[place] for place in some) for some in fits)
            again, one = LayerChoice(rehearsal, functions, limit).chosen()  # type: ignore[arg-type]
            chosen = frozenset(place for place in range(4) if place in again)
            assert one.most == found[chosen].most <= limit
            assert sum(seconds[place] for place in chosen) == pytest.approx(best)
        most, one = LayerChoice(rehearsal, functions, limits[0] - 1).chosen()  # type: ignore[arg-type]
        assert (most, one.most) == (layers.EVERY_CALL, limits[0])
    if kind is Cudnn:
        last, none = found[frozenset([3])], found[frozenset()]
        assert last.most == none.most, "its reserve is there again when the peak comes at its turn"
        assert set(none.at_peak) == {0, 1, 2, 3}


class Peaks:
    """In a rehearsal's place: what is held, by what is run again."""

    def __init__(self, held: Callable[[Container[int]], Rehearsed]) -> None:
        self.held, self.asked = held, 0

    def step(self, functions: Any) -> Rehearsed:
        self.asked += 1
        return self.held(functions.keywords["again"])


def test_many_layers_take_few_rehearsals() -> None:
    """Those at the peak are chosen together, as many as are over."""
    seconds = dict.fromkeys(range(1000), 1.0)

    def held(again: Container[int]) -> Rehearsed:
        there = {place: 10 for place in seconds if place not in again}
        return Rehearsed(sum(there.values()), 0, seconds, there)

    peaks = Peaks(held)
    again, found = LayerChoice(peaks, replaced(NotedFunctions), 2_000).chosen()  # type: ignore[arg-type]
    assert found.most == 2_000
    assert again == frozenset(range(800))
    assert peaks.asked < 15


def test_where_nothing_of_a_layer_is_at_the_peak_all_that_there_are_are_tried() -> None:
    def held(again: Container[int]) -> Rehearsed:
        return Rehearsed(50 if {0, 1} <= {p for p in range(3) if p in again} else 100, 0, ONE, {})

    again, found = LayerChoice(Peaks(held), replaced(NotedFunctions), 60).chosen()  # type: ignore[arg-type]
    assert (again, found.most) == ({0, 1}, 50), "and the third is spared"
    more, found = LayerChoice(
        Peaks(lambda again: Rehearsed(100 if 0 not in again else 120, 0, ONE, {})),  # type: ignore[arg-type]
        replaced(NotedFunctions),
        60,
    ).chosen()
    assert (more, found.most) == (layers.NO_CALL, 100), "whatever holds least, where nothing fits"


ONE = {0: 1.0, 1: 1.0, 2: 1.0}
