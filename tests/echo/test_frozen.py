"""Weights that are frozen when a model is compiled and trained later, and the other way round."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, fx, nn

import ecornn
from ecornn.echo.backend import EchoBackend
from ecornn.echo.frozen import Thawed
from ecornn.echo.options import read_options

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Pair(nn.Module):
    """`steps`: how often the second layer is called; often enough and it is compiled by itself."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.first, self.second, self.steps = nn.Linear(4, 4), nn.Linear(4, 4), steps
        self.norm = Normed()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        for _ in range(self.steps):
            x = self.norm(self.second(x))
        return x.square().sum()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.scale) + x


@pytest.mark.filterwarnings("error::ecornn.echo.frozen.Thawed")
@pytest.mark.parametrize("steps", [1, 8])
def test_what_is_trained_changes_from_step_to_step(steps: int) -> None:
    """As of two models that are trained in turns, and layers that are thawed one after another."""
    torch.manual_seed(0)
    plain = Pair(steps).double()
    mine = copy.deepcopy(plain)
    run = ecornn.compile(mine, codegen="eager")
    x = torch.randn(3, 4, dtype=torch.float64)
    orders = [(False, False), (True, False), (True, True), (False, True), (True, False)]
    for first, rest in orders:
        for model, call in ((plain, plain), (mine, run)):
            model.requires_grad_(rest)
            model.first.requires_grad_(first)
            model.zero_grad()
            loss = call(x)
            assert loss.requires_grad is (first or rest)
            if loss.requires_grad:
                loss.backward()
        for own, other in zip(mine.parameters(), plain.parameters(), strict=True):
            assert (own.grad is None) is (other.grad is None)
            assert own.grad is None or torch.equal(own.grad, other.grad)


def traced() -> tuple[fx.GraphModule, nn.Parameter]:
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    made = graph.call_function(torch.tanh, (graph.call_function(torch.mul, (x, weight)),))
    graph.output((made,))
    return fx.GraphModule({}, graph), nn.Parameter(torch.randn(4).double(), requires_grad=False)


def test_code_for_frozen_weights_is_not_used_for_trained_ones() -> None:
    module, weight = traced()
    x = torch.randn(4, dtype=torch.float64)
    run = EchoBackend(read_options({"codegen": "eager"}))(module, [x, weight])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (frozen,) = run(x, weight)
    assert not frozen.requires_grad
    weight.requires_grad_()
    with pytest.warns(Thawed, match=r"use ecornn\.compile"):
        (trained,) = run(x, weight)
    assert torch.equal(trained, frozen)
    trained.sum().backward()
    assert weight.grad is not None
    assert torch.allclose(weight.grad, x * (1 - frozen.square()))


def test_code_without_gradients_may_be_given_trained_weights() -> None:
    """Where none are asked for, as in evaluation: torch compiles for that by itself."""
    module, weight = traced()
    x = torch.randn(4, dtype=torch.float64)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        run = EchoBackend(read_options({"codegen": "eager"}))(module, [x, weight])
        assert not run(x, weight.requires_grad_())[0].requires_grad


@pytest.mark.filterwarnings("error::ecornn.echo.frozen.Thawed")
def test_weights_that_are_replaced_are_not_held() -> None:
    model = Pair(1)
    run = ecornn.compile(model, codegen="eager")
    x = torch.randn(3, 4)
    run(x).backward()
    model.first.weight = nn.Parameter(torch.randn(4, 4), requires_grad=False)
    model.zero_grad()
    run(x).backward()
    assert model.first.weight.grad is None
    model.first.weight.requires_grad_()
    run(x).backward()
    assert model.first.weight.grad is not None
