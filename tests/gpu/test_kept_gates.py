"""What recurrent layers of ours keep under Echo, by the persistent kernels: in compiled graphs and
around compiled parts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ecornn

STEPS, ROWS, WIDTH = 64, 8, 256
#: Of one layer: four values a unit, step and sequence.
GATES = 4 * STEPS * ROWS * WIDTH * 4


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = ecornn.LSTM(WIDTH, WIDTH, 3)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.out(self.rnn(x)[0]))


class Reader(nn.Module):
    """Its layers are outside of the part that is called often."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = ecornn.LSTM(WIDTH, WIDTH, 3)
        self.step = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = self.rnn(x)[0]
        for _ in range(6):
            x = self.step(x)
        return x


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def trained(run: Any, model: nn.Module, x: Tensor) -> tuple[list[Tensor], int]:
    """Gradients of the second step, and the bytes that are there between its passes."""
    for _ in range(2):
        model.zero_grad()
        before = torch.cuda.memory_allocated()
        loss = run(x).square().mean()
        between = torch.cuda.memory_allocated() - before
        loss.backward()
    return [weight.grad for weight in model.parameters() if weight.grad is not None], between


@pytest.mark.parametrize("kind", [Tagger, Reader])
def test_gates_are_kept_or_made_again(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = kind().cuda(), torch.randn(STEPS, ROWS, WIDTH, device="cuda")
    exact = copy.deepcopy(model).double()
    exact(x.double()).square().mean().backward()
    held = {}
    for memory in ("1GiB", "min"):
        run = ecornn.compile(model, memory=memory)
        found, held[memory] = trained(run, model, x)
        for mine, other in zip(found, exact.parameters(), strict=True):
            assert other.grad is not None
            error = (mine.double() - other.grad).norm() / other.grad.norm()
            assert float(error) < 5e-3, memory  # products in TF32
        told = str(run.explain()).replace("\n", " ")
        assert ("states alone" in told) is (memory == "min"), told
    assert held["1GiB"] - held["min"] >= 2.9 * GATES
