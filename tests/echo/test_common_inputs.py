"""Inputs that all calls of a part have in common: their gradients are made for many calls at once,
and are the model's as it is written."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ecornn
from ecornn.echo.calls_noted import BY_KIND
from ecornn.echo.counted import counted
from ecornn.echo.weight_sums import WeightSums
from support.called_often import gradients, in_any_order, same, watched

B, S, H = 2, 7, 5


pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture(autouse=True)
def _many_calls_at_once() -> Iterator[None]:
    with in_any_order():
        yield


class Attention(nn.Module):
    """Reads all values at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(H, H), nn.Linear(H, H)

    def forward(self, h: Tensor, *, keys: Tensor, values: Tensor) -> Tensor:
        weights = torch.bmm(keys, self.query(h)[:, :, None]).softmax(1)
        found = torch.bmm(weights.transpose(1, 2), values)[:, 0]
        return torch.tanh(self.out(found) + h)


class Reader(nn.Module):
    """`sources`: how many tensors it attends to, in turn."""

    def __init__(self, sources: int = 1) -> None:
        super().__init__()
        self.sources = sources
        self.keys, self.values, self.step = nn.Linear(H, H), nn.Linear(H, H), Attention()

    def forward(self, x_BSH: Tensor, steps: int = 6) -> tuple[Tensor, Tensor]:
        read = [(self.keys(x_BSH * (k + 1)), self.values(x_BSH - k)) for k in range(self.sources)]
        h, states = x_BSH[:, 0], []
        for t in range(steps):
            keys, values = read[t % self.sources]
            h = self.step(h, keys=keys, values=values)
            states.append(h)
        return torch.stack(states), read[0][1]


def compare(sources: int, use: Any, *, common: bool, passes: int = 3) -> None:
    model = Reader(sources).double()
    run, twin = ecornn.compile(model, codegen="eager"), copy.deepcopy(model)
    before = set(BY_KIND.values())
    for turn in range(passes):
        found, together = [], 0
        for one, own in ((run, model), (twin, twin)):
            own.zero_grad()
            x = torch.linspace(-1, 1, B * S * H, dtype=torch.float64).view(B, S, H)
            x = (x * (turn + 1)).sin().requires_grad_()
            with watched() as seen:
                more = use(one, own, x)
            found.append([*gradients(own), x.grad, *more])
            together += seen.common
        same(*found, bits=False)
        assert all(g is not None and g.abs().sum() > 0 for g in found[0])
        if turn > 0:  # nodes are known from the second step on
            assert (together > 0) is common
    sums = [s for s in set(BY_KIND.values()) - before if isinstance(s, WeightSums)]
    assert any(s.common for s in sums) is common
    assert ("inputs that calls have in common" in str(run.explain())) is common


@pytest.mark.parametrize("steps", [4, 6, 16, 17, 35])
def test_any_number_of_calls(steps: int) -> None:
    def use(run: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
        states, _ = run(x, steps)
        (states * torch.arange(1.0, H + 1)).sum().backward()
        return [states.detach()]

    compare(1, use, common=True)


def test_the_rest_of_the_model_reads_them_too() -> None:
    def use(run: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
        states, values = run(x)
        seen: list[Tensor] = []
        values.register_hook(seen.append)
        (states.sum() + values.square().sum()).backward()
        return seen

    compare(1, use, common=True)


def test_gradients_of_some_things_only() -> None:
    def use(run: Any, model: Any, x: Tensor) -> list[Tensor]:
        states, values = run(x)
        weights = [model.step.query.weight, model.values.weight]
        found = list(torch.autograd.grad(states.sum(), [values, *weights], retain_graph=True))
        found += torch.autograd.grad(states[2].sum(), [values], retain_graph=True)
        found += torch.autograd.grad(states[3].sum(), weights, retain_graph=True)
        states[-1].sum().backward()
        return found

    with torch._functorch.config.patch(donated_buffer=False):
        compare(1, use, common=True)


def test_other_tensors_at_other_calls() -> None:
    """Seen when calls are counted: nothing is gathered."""

    def use(run: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
        states, _ = run(x)
        states.sum().backward()
        return [states.detach()]

    compare(2, use, common=False)


def test_what_was_the_same_may_be_others_later() -> None:
    """The compiled code hands over factors then, and each call's gradient is made of its own."""

    def use(run: Any, model: Any, x: Tensor) -> list[Tensor]:
        states, _ = run(x)
        states.sum().backward()
        model.sources = 3
        states, _ = run(x)
        states.sum().backward()
        model.sources = 1
        return [states.detach()]

    compare(1, use, common=True)


class Given(nn.Module):
    """They are the caller's; `cut`: calls that are given the values without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.step = Attention()

    def forward(self, keys: Tensor, values: Tensor, cut: tuple[int, ...] = ()) -> Tensor:
        h, total = torch.ones(B, H, dtype=torch.float64), keys.sum()
        for t in range(6):
            given = values.detach() if t in cut else values
            h = self.step(h, keys=keys, values=given)
            total = total + h.square().sum()
        return total


def test_leaves_views_and_one_tensor_twice() -> None:
    """With hooks and gradients kept, in one place or another."""
    model = Given().double()
    run, twin = ecornn.compile(model, codegen="eager"), copy.deepcopy(model)
    together = 0
    for turn in range(2):
        found: list[list[Tensor | None]] = []
        for one, own in ((run, model), (twin, twin)):
            own.zero_grad()
            leaf = torch.linspace(-1, turn + 1, B * S * H, dtype=torch.float64).view(B, S, H)
            leaf.requires_grad_()
            kept, hooked, base = leaf * 2, leaf * 3, torch.cat((leaf, leaf), 1)
            kept.retain_grad()
            seen: list[Tensor | None] = []
            hooked.register_hook(lambda g, seen=seen: (seen.append(g.clone()), g * 3)[1])
            expanded = leaf[:1].expand(B, S, H)
            with watched() as added:
                for given in (
                    (leaf, kept),
                    (leaf, leaf),
                    (base[:, :S], base[:, 1 : S + 1]),
                    (expanded, expanded.transpose(0, 1).contiguous().transpose(0, 1)),
                    (leaf, hooked),
                    (leaf, leaf * 1, (2, 3)),
                    (leaf, leaf.detach()),
                ):
                    one(*given).backward()
            together += added.common
            found.append([leaf.grad, kept.grad, *seen, *gradients(own)])
        same(*found, bits=False)
        assert all(g is not None for g in found[0])
    assert together > 0


def test_which_are_the_same_is_seen_by_identity() -> None:
    model = Reader(2)
    with counted(model) as calls:
        model(torch.randn(B, S, H))
    assert calls.counts["step"] == 6
    assert calls.common()["step"] == frozenset()
    model = Reader(1)
    with counted(model) as calls:
        model(torch.randn(B, S, H))
    assert calls.common()["step"] == frozenset({1, 2})  # h, keys, values
    assert "keys" not in calls.common(), "called once"
    with counted(model, compare=False) as calls:
        model(torch.randn(B, S, H))
    assert calls.counts["step"] == 6
    assert calls.common() == {}
