"""Weights that are frozen when a model is compiled and trained later, and the other way round."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

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


class Untraceable(Pair):
    """torch makes several functions of it; they know nothing of each other's arguments."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        torch._dynamo.graph_break()
        return self.norm(self.second(x)).square().sum()


class Adapted(nn.Module):
    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        self.of, self.down, self.up = of, nn.Linear(4, 2).double(), nn.Linear(2, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.of(x) + self.up(self.down(x))


def gradients(model: nn.Module, call: Callable[..., Tensor], x: Tensor) -> list[Tensor | None]:
    model.zero_grad()
    loss = call(x)
    if loss.requires_grad:
        loss.backward()
    return [weight.grad for weight in model.parameters()]


@pytest.mark.filterwarnings("error::ecornn.echo.frozen.Thawed")
@pytest.mark.parametrize("kind", ["untraceable", "adapted"])
def test_what_torch_makes_several_functions_of_and_what_is_added_later(kind: str) -> None:
    torch.manual_seed(0)
    model = (Untraceable if kind == "untraceable" else Pair)(1).double()
    run = ecornn.compile(model, codegen="eager")
    x = torch.randn(3, 4, dtype=torch.float64)
    if kind == "adapted":
        gradients(model, run, x)
        model.first = Adapted(model.first)
    added = model.first.up if kind == "adapted" else model.first
    for trained in ([], [added], [model.second], [model.first, model.norm], [model.norm], [model]):
        model.requires_grad_(False)
        for part in trained:
            part.requires_grad_()
        expected, found = gradients(model, model, x), gradients(model, run, x)
        for own, other in zip(found, expected, strict=True):
            assert (own is None) is (other is None)
            assert own is None or torch.allclose(own, other)


def test_arguments_may_have_any_name() -> None:
    class Named(nn.Linear):
        def forward(self, told: Tensor, run: float, part: float = 1.0) -> Tensor:
            return super().forward(told) * run * part

    model = Named(4, 4)
    run, x = ecornn.compile(model, codegen="eager"), torch.randn(3, 4)
    assert torch.equal(run(told=x, run=2.0, part=3.0), model(x, 2.0, 3.0))


def traced(*, enabling: bool = False) -> tuple[fx.GraphModule, nn.Parameter]:
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    if enabling:
        graph.call_function(torch._C._set_grad_enabled, (True,))
    made = graph.call_function(torch.tanh, (graph.call_function(torch.mul, (x, weight)),))
    if enabling:
        graph.call_function(torch._C._set_grad_enabled, (False,))
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


def test_code_that_asks_for_gradients_itself_is_not_given_trained_weights() -> None:
    """Whatever is asked for around it, as by a step that is evaluated within another's."""
    module, weight = traced(enabling=True)
    x = torch.randn(4, dtype=torch.float64)
    with torch.no_grad():
        run = EchoBackend(read_options({"codegen": "eager"}))(module, [x, weight])
        assert not run(x, weight)[0].requires_grad
        with pytest.warns(Thawed):
            (trained,) = run(x, weight.requires_grad_())
    trained.sum().backward()
    assert weight.grad is not None
    assert torch.allclose(weight.grad, x * (1 - trained.detach().square()))


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
