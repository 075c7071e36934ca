"""A part that torch compiles in pieces: calls of the last one are known by their results."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import ecornn
from ecornn.bench.training.memory import allocated_peak
from ecornn.echo.calls_noted import BY_KIND
from support.called_often import gradients, in_any_order, same, watched

H = 5


pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture(autouse=True)
def _many_calls_at_once() -> Iterator[None]:
    with in_any_order():
        yield


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(H, H), nn.Linear(H, H)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.first(x + h))
        torch._dynamo.graph_break()
        return x, torch.tanh(self.second(h))


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = Broken()

    def forward(self, x_TBH: Tensor) -> Tensor:
        h = torch.zeros_like(x_TBH[0])
        for x in x_TBH:
            _, h = self.step(x, h)
        return h.square().sum()


def test_gradients_and_the_peak() -> None:
    """A rehearsal knows no more calls than the step does, or it would count what these hold."""
    model, x = Loop().double(), torch.randn(9, 64, H, dtype=torch.float64)
    twin, run = copy.deepcopy(model), ecornn.compile(model, codegen="eager")
    with watched() as seen:
        for _ in range(3):
            for one, own in ((run, model), (twin, twin)):
                own.zero_grad()
                one(x).backward()
            same(gradients(model), gradients(twin), bits=False)
    assert seen.calls == 2 * len(x), "of one graph, from the second step on"
    model.zero_grad()
    with torch.backends.mkldnn.flags(enabled=False):
        found = allocated_peak(lambda: run(x).backward())
    assert run.explain().predicted_peak_bytes(0) == found


def test_a_rehearsal_makes_no_node_known() -> None:
    """All of its nodes are of one kind: another model's would be taken for this one's."""
    model, x = Loop().double(), torch.randn(9, 64, H, dtype=torch.float64)
    run = ecornn.compile(model, codegen="eager")
    for _ in range(2):
        run(x).backward()
    before = set(BY_KIND)
    assert run.explain().predicted_peak_bytes(0) is not None
    assert set(BY_KIND) <= before
    assert not [kind for kind in BY_KIND if "_Part" in kind.__name__]
