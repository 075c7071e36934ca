"""A loop that begins with states of which no gradient is asked is compiled once, and has eager
mode's gradients to the bit."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map

import ecornn
from ecornn.echo.counted import Places, counted
from ecornn.echo.starts import Starts
from support.called_often import gradients, same

# On CPUs torch computes a sigmoid by the vector where two vectors or more lie in a row (8 numbers
# of float64 with AVX2), else one by one, which rounds otherwise; rows are longer where a graph has
# copies in order and eager mode writes into chunks. So there are less than 8 in all.
B, H = 2, 3


pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Step(nn.Module):
    """A state, and one that may be written to."""

    def __init__(self, *, writes: bool = False) -> None:
        super().__init__()
        self.cell, self.writes = nn.GRUCell(H, H), writes

    def forward(self, x: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
        h = self.cell(x, state["h"])
        if self.writes:
            return {"h": h, "sum": state["sum"].add_(h.detach())}
        return {"h": h, "sum": state["sum"] + h}


class Loop(nn.Module):
    def __init__(self, *, writes: bool = False) -> None:
        super().__init__()
        self.step, self.start = Step(writes=writes), nn.Parameter(torch.randn(H))

    def forward(self, x_TBH: Tensor, first: Tensor | None = None) -> Tensor:
        zeros = torch.zeros_like(x_TBH[0])
        state = {"h": zeros if first is None else first, "sum": zeros.clone()}
        for x in x_TBH:
            state = self.step(x, state)
        return state["sum"].square().sum() + state["h"].sum()


def compare(
    model: nn.Module, use: Callable[[Any], list[Tensor | None]], *, graphs: int, steps: int = 3
) -> None:
    twin = copy.deepcopy(model)
    run = ecornn.compile(model, codegen="eager")
    for _ in range(steps):
        found = []
        for one, own in ((run, model), (twin, twin)):
            own.zero_grad()
            more = use(one)
            found.append([*gradients(own), *more])
        same(*found, bits=True)
    assert len(run.explain().graphs) == graphs


def data(*, grad: bool = True) -> Tensor:
    made = torch.linspace(-1, 1, 6 * B * H, dtype=torch.float64)
    return made.view(6, B, H).requires_grad_(grad)


def test_one_graph_serves_all_calls() -> None:
    def use(run: Any) -> list[Tensor | None]:
        x = data()
        loss = run(x)
        loss.backward()
        return [loss.detach(), x.grad]

    compare(Loop().double(), use, graphs=1)


def test_a_first_state_that_is_given() -> None:
    """Its gradient, where one is asked for; none, where none is."""

    def use(run: Any) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for asked in (True, False):
            first = (torch.ones(B, H, dtype=torch.float64) / 3).requires_grad_(asked)
            run(data(grad=False), first).backward()
            assert (first.grad is not None) is asked
            found.append(first.grad)
        return found

    compare(Loop().double(), use, graphs=1)


def test_without_gradients_and_with_them() -> None:
    def use(run: Any) -> list[Tensor | None]:
        with torch.no_grad():
            alone = run(data(grad=False))
        assert not alone.requires_grad
        loss = run(data(grad=False))
        loss.backward()
        return [alone, loss.detach()]

    compare(Loop().double(), use, graphs=2)


def test_a_state_that_is_written_to_is_left_alone() -> None:
    """torch refuses to write to one of which a gradient is asked."""
    model = Loop(writes=True)
    with counted(model) as calls:
        model(data(grad=False).float())
    assert calls.fed_back()["step"] == Places(frozenset({1}), 3)  # x, h, sum

    def use(run: Any) -> list[Tensor | None]:
        loss = run(data(grad=False))
        loss.backward()
        return [loss.detach()]

    compare(Loop(writes=True).double(), use, graphs=1)


def test_frozen_weights() -> None:
    """Nothing has a gradient that would not have one."""
    model = Loop().double()
    model.step.requires_grad_(False)

    def use(run: Any) -> list[Tensor | None]:
        assert not run(data(grad=False)).requires_grad
        x = data()
        run(x).backward()
        return [x.grad]

    compare(model, use, graphs=3)


def test_what_is_fed_back() -> None:
    model = Loop()
    with counted(model) as calls:
        model(torch.randn(4, B, H))
    assert calls.fed_back()["step"] == Places(frozenset({1, 2}), 3)
    assert calls.common()["step"] == frozenset()
    assert calls.fed_back()["step.cell"] == Places(frozenset({1}), 2)
    with torch.no_grad(), counted(model, gradients=True) as calls:
        model(torch.randn(4, B, H))
    assert calls.fed_back()["step"] == Places(frozenset(), 3)


def test_a_part_that_raises_is_no_longer_under_way() -> None:
    """Its caller, which goes on, has results of its own."""

    class Doubtful(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no")

    class Trying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(H, H), Doubtful(H, H)

        def forward(self, h: Tensor) -> Tensor:
            with suppress(ValueError):
                self.other(h)
            return torch.tanh(self.one(h))

    model = nn.ModuleList([Trying()])
    with counted(model) as calls:
        h = torch.zeros(B, H)
        for _ in range(4):
            h = model[0](h)
    assert calls.fed_back() == {
        "0": Places(frozenset({0}), 1),
        "0.one": Places(frozenset(), 1),
        "0.other": Places(frozenset(), 1),
    }


def test_others_are_handed_over_as_they_came() -> None:
    got: list[Any] = []

    def run(*args: Any, **kwargs: Any) -> None:
        got.append((args, tree_map(lambda value: value, kwargs)))  # as it is now

    starts = Starts(Places(frozenset({0, 1, 2, 3, 9}), 4))
    called = starts.around(run)
    asked, words = torch.ones(2, requires_grad=True), torch.arange(3)
    with torch.inference_mode():
        frozen = torch.ones(2)
    zeros = torch.zeros(2)
    for first in (False, True, False):
        starts.next_is_first = first
        last = {"a": frozen, "b": zeros}
        called(asked, [words, 5], last=last)
        assert last["b"] is zeros, "what is the caller's is so again"
        args, kwargs = got[-1]
        assert args[0] is asked
        assert args[1][0] is words
        assert args[1][1] == 5
        assert kwargs["last"]["a"] is frozen
        assert (kwargs["last"]["b"] is zeros) is not first
        assert kwargs["last"]["b"].requires_grad is first
        assert not starts.next_is_first
    assert not zeros.requires_grad
    for places, ways in (
        (Places(frozenset({0}), 1), torch.no_grad()),
        (Places(frozenset({0}), 1), forward_ad.dual_level()),
        (Places(frozenset({0}), 2), nullcontext()),  # another number of tensors
        (Places(), nullcontext()),
    ):
        starts = Starts(places)
        starts.next_is_first = True
        with ways:
            starts.around(run)(zeros)
        assert got[-1][0][0] is zeros


def test_nothing_is_kept_of_it() -> None:
    """The state's gradient goes with the step."""
    model = Loop()
    run = ecornn.compile(model, codegen="eager")
    seen: list[weakref.ref[Tensor]] = []

    def hook(part: nn.Module, args: Any) -> None:
        seen.append(weakref.ref(args[1]["h"]))

    model.step.register_forward_pre_hook(hook)
    for _ in range(2):
        run(data(grad=False).float()).backward()
    gc.collect()
    assert len(seen) >= 12
    assert all(ref() is None for ref in seen)


def test_its_peak_is_foretold() -> None:
    """A rehearsal begins as the step does, or it would not find the code."""
    model = Loop()
    run = ecornn.compile(model, codegen="eager")
    run(data(grad=False).float()).backward()
    explained = run.explain()
    assert explained.predicted_peak_bytes(0) is not None, explained.not_predicted


def test_where_it_cannot_be_seen_which_states_have_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop is compiled twice, as torch does it, and that is told."""

    def fail(*_: Any) -> None:
        raise RuntimeError("not without numbers\nat all")

    monkeypatch.setattr("ecornn.echo.regions.counted_with_gradients", fail)
    model = Loop().double()
    twin, run = copy.deepcopy(model), ecornn.compile(model, codegen="eager")
    for one in (run, twin):
        one(data(grad=False)).backward()
    same(gradients(model), gradients(twin), bits=True)
    assert len(run.explain().graphs) == 2
    told = " ".join(str(run.explain()).split())
    assert "a loop's first call may be compiled by itself: not without numbers" in told
