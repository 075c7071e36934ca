"""What a part of a divided model keeps counts as much as its own peak: the peak of a step may be
where other parts run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_module
from torch._inductor.decomposition import select_decomp_table

import ecornn
from ecornn.bench.models.speech import Frontend
from ecornn.echo.options import read_memory
from ecornn.echo.pipeline import Decision, decide
from ecornn.echo.plan.estimate import Estimate
from ecornn.echo.request import Request


class Traced(BaseException):
    """torch does not catch this."""


@pytest.fixture(scope="module")
def joint() -> tuple[fx.GraphModule, Sequence[Any], int]:
    """The convolutions of the speech model, as inductor's partitioner is given them."""
    found: list[tuple[fx.GraphModule, Sequence[Any], int]] = []

    def partition(
        joint: fx.GraphModule, inputs: Sequence[Any], *, num_fwd_outputs: int, **_: Any
    ) -> Any:
        found.append((joint, inputs, num_fwd_outputs))
        raise Traced

    def never(*_: Any) -> Any:
        raise AssertionError("nothing is compiled")

    traced = aot_module(
        *(Frontend(8), never, never, partition), decompositions=select_decomp_table()
    )
    with pytest.raises(Traced):
        traced(torch.randn(4, 161, 200))
    return found[0]


def decided(joint: tuple[fx.GraphModule, Sequence[Any], int], **asked: Any) -> Decision:
    return decide(*joint, Request(settings={"compiler": "inductor"}, **asked))


def test_of_like_peaks_the_part_takes_the_one_that_keeps_less(joint: Any) -> None:
    """By itself the quickest of them is taken, which keeps two thirds more here."""
    alone, part = (decided(joint, among_others=among) for among in (False, True))
    assert part.chosen.estimate.peak() <= 1.05 * alone.chosen.estimate.peak()
    assert part.chosen.estimate.kept_bytes < 0.7 * alone.chosen.estimate.kept_bytes
    assert part.chosen.estimate.seconds_added <= part.limits.seconds


def test_of_equal_peaks_the_least_memory_keeps_least_too(joint: Any) -> None:
    found = decided(joint, memory=read_memory("min"), among_others=True)
    weights = [one.estimate.weight(among_others=True) for one in found.candidates]
    assert found.chosen.estimate.weight(among_others=True) == min(weights)


def test_a_budget_is_still_one_of_the_peak(joint: Any) -> None:
    found = decided(joint, memory=read_memory(0.9), among_others=True)
    assert found.limits.bytes is not None
    assert found.chosen.estimate.peak() <= found.limits.bytes
    assert found.chosen.estimate.weight(among_others=True) > found.limits.bytes


def test_what_is_kept_is_weighed_for_every_call() -> None:
    estimate = Estimate(100, 120, 30, 0.0, beside=5)
    assert estimate.weight() == estimate.peak() == 125
    assert estimate.weight(among_others=True) == 125 + 30
    assert estimate.weight(10, among_others=True) == estimate.peak(10) + 30


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
        self.layer = nn.GRU(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.front(x))[0].sum()


@pytest.mark.parametrize("divided", [True, False])
def test_parts_know_that_they_are_parts(divided: bool) -> None:
    torch._dynamo.reset()
    model = Recurrent()
    compiled = ecornn.compile(model if divided else model.front)
    compiled(torch.randn(5, 2, 4)).sum().backward()
    (backend,) = compiled._regions._backends.values()
    assert backend.among_others is divided
    torch._dynamo.reset()
