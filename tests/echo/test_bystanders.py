"""What compiling with Echo must leave alone: the model's own state, its hooks, other generators,
other threads, and whoever holds the compiled model."""

from __future__ import annotations

import copy
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ecornn


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)).sin()


class Diary(nn.Module):
    """Keeps everything that Python lets it keep."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.step, self.steps = Step(), steps
        self.mask: Tensor | None = None
        self.last: dict[str, Tensor] = {}
        self.seen: list[Tensor] = []
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.tril(torch.ones(6, 6))
        for _ in range(self.steps):
            if random.random() < 2.0 and np.random.rand() < 2.0:  # always; but it draws
                x = self.step(x)
        self.count += 1
        self.last["x"] = x.detach()
        self.seen.append(x.detach())
        return x @ self.mask


@pytest.mark.parametrize("steps", [1, 5], ids=["whole", "region"])
def test_the_first_call_leaves_the_model_as_a_call_does(steps: int) -> None:
    torch.manual_seed(0)
    model = Diary(steps)
    twin = copy.deepcopy(model)
    heard: list[type] = []
    model.step.register_forward_hook(lambda *of: heard.append(type(of[2])))
    compiled, x = ecornn.compile(model), torch.randn(3, 6)
    found = []
    for run in (compiled, twin):
        random.seed(1)
        np.random.seed(1)
        result = run(x)
        found.append((result, random.random(), np.random.rand()))
    assert type(found[0][0]) is Tensor
    torch.testing.assert_close(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]
    assert model.count == 1
    assert heard == [Tensor] * steps
    kept = [model.mask, model.last["x"], *model.seen]
    assert len(kept) == 3
    assert all(type(tensor) is Tensor for tensor in kept)


def test_calls_from_several_threads() -> None:
    model = Diary(5)
    compiled = ecornn.compile(model)
    x = torch.randn(3, 6)
    want = compiled(x).detach()
    wrong: list[Any] = []

    def call() -> None:
        for _ in range(5):
            if not torch.equal(compiled(x), want):
                wrong.append("another result")

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert "forward" not in model.step.__dict__


def test_a_model_that_holds_a_compiled_one_saves_and_loads() -> None:
    plain = nn.Sequential(nn.Sequential(nn.Linear(3, 3)))
    held = nn.Sequential(ecornn.compile(copy.deepcopy(plain[0])))
    assert list(held.state_dict()) == list(plain.state_dict())
    state = {name: value + 1 for name, value in plain.state_dict().items()}
    held.load_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in held.state_dict().items())
    plain.load_state_dict(held.state_dict())


def test_what_is_registered_or_set_reaches_the_model() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    compiled = ecornn.compile(model)
    compiled.register_buffer("scale", torch.ones(1))
    assert "scale" in compiled.state_dict()
    assert "scale" in dict(compiled.named_buffers())
    compiled.training = False
    assert not model.training
    assert len(compiled) == 2
    assert compiled[0] is model[0]
    assert list(compiled) == list(model)


def test_lazy_layers_get_their_sizes() -> None:
    compiled = ecornn.compile(nn.Sequential(nn.LazyLinear(6), nn.Tanh()))
    compiled(torch.randn(2, 3)).sum().backward()
    assert compiled[0].weight.grad is not None


@pytest.mark.parametrize("what", ["models", "functions"])
def test_the_ninth_of_a_kind_is_compiled_as_well(what: str) -> None:
    """torch keeps eight compiled forms for each piece of Python code."""

    def function(x: Tensor) -> Tensor:
        return torch.tanh(x).sin()

    x = torch.randn(2, 6, requires_grad=True)
    for _ in range(10):
        compiled = ecornn.compile(Step() if what == "models" else function)
        compiled(x).sum().backward()
        assert len(compiled.explain().graphs) == 1
