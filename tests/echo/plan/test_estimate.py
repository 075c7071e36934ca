"""What is estimated for a plan is what the graphs hold that are built for it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ecornn.echo.graph import read_graph
from ecornn.echo.passes import Passes
from ecornn.echo.plan.bidirectional import bidirectional
from ecornn.echo.plan.estimate import Plan, estimate
from ecornn.echo.plan.prices import one_by_one
from ecornn.echo.schedule import FOR_ALL, backward_program, saved
from support.joints import joint_of, leaf


def far_apart(x: Tensor, w: Tensor) -> Tensor:
    """One large value from a small one, read at both ends of the backward pass."""
    large = (x @ w).unsqueeze(1).expand(8, 64, 8).sin()
    first = (large * large.cos()).sum(1)
    for _ in range(6):
        first = (first @ w).tanh()
    middle = (first.unsqueeze(1) * torch.ones(8, 64, 8)).exp().sum(1)
    return (large * middle.unsqueeze(1)).sum()


def test_two_copies_where_one_would_be_alive_for_long() -> None:
    passes = Passes(read_graph(joint_of(far_apart, *map(leaf, ((8, 8), (8, 8))))), 1)
    prices = one_by_one([1.0] * len(passes.graph.operations))
    kept = bidirectional(passes)
    once, twice = (estimate(passes, Plan("", kept, w), prices) for w in (FOR_ALL, 4))
    assert twice.seconds_added > once.seconds_added
    assert twice.backward_peak < once.backward_peak


@pytest.mark.parametrize("window", [0, FOR_ALL])
def test_nothing_is_run_again_where_all_is_kept(window: int) -> None:
    passes = Passes(read_graph(joint_of(far_apart, *map(leaf, ((8, 8), (8, 8))))), 1)
    program = backward_program(passes, saved(passes, passes.needed), window)
    again = [passes.graph.operations[i] for i in program.again(passes)]
    assert [op for op in again if op.kind != "constant" and op.uses] == []
