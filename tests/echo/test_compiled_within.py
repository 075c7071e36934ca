"""A compiled model within what is compiled by others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ecornn


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(self.first(x).tanh())) + x


class Repeated(nn.Module):
    """`steps`: how often its part is called; often enough and that is compiled by itself."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.step, self.out, self.steps = Step(), nn.Linear(4, 4), steps

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.steps):
            x = self.step(x)
        return self.out(x).square().sum()


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.front, self.inner = nn.Linear(4, 4).double(), inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.front(x)) * 2


@pytest.mark.parametrize("outer", ["aot_eager", "ecornn"])
@pytest.mark.parametrize("steps", [1, 6])
def test_results_and_gradients_are_the_models_own(steps: int, outer: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    inner = Repeated(steps).double()
    plain = Around(copy.deepcopy(inner))
    model = Around(ecornn.compile(inner, codegen="eager"))
    model.front.load_state_dict(plain.front.state_dict())
    if outer == "ecornn":
        run: Any = ecornn.compile(model, codegen="eager")
    else:
        run = torch.compile(model, backend=outer)
    x = torch.randn(3, 4, dtype=torch.float64)
    for _ in range(2):
        expected = plain(x)
        found = run(x)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(
            torch.autograd.grad(found, list(model.parameters())),
            torch.autograd.grad(expected, list(plain.parameters())),
        )
    # it is compiled as was asked for, not as a part of the other
    assert model.inner.explain().graphs
