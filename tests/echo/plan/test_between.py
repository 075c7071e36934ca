"""What "auto" may spend beside the quickest plan, plans between torch's and ours, and what drawing
random numbers again takes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ecornn.echo.graph import Graph, Operation, read_graph
from ecornn.echo.joint import prices_of
from ecornn.echo.options import read_memory
from ecornn.echo.passes import Passes
from ecornn.echo.pipeline import Decision, decide, kept_by
from ecornn.echo.plan.budget import (
    NEARLY_FREE,
    TIMES_FREED,
    WELL_SPENT,
    Limits,
    Quickest,
)
from ecornn.echo.plan.prices import DRAWING, draws_of, fused
from ecornn.echo.plan.search import Search
from ecornn.echo.request import Request
from ecornn.echo.schedule import backward_program, saved
from support.joints import joint_of, leaf


def stack(x: Tensor, *weights: Tensor) -> Tensor:
    for weight in weights:
        y = x @ weight
        x = x + torch.tanh(y * torch.sigmoid(y)).exp()
    return x


BETWEEN = "else as torch's min-cut"
SHAPES = (512, 64), *((64, 64),) * 6


def decided(memory: str | float, function: Any = stack, shapes: Any = SHAPES) -> Decision:
    torch.manual_seed(0)
    joint = joint_of(function, *map(leaf, shapes))
    inputs = [node.meta["val"] for node in joint.graph.find_nodes(op="placeholder")]
    return decide(joint, inputs, 1, Request(read_memory(memory), settings={"compiler": "inductor"}))


def test_more_is_spent_only_where_it_frees_many_times_as_much() -> None:
    limits = Limits(None, 0.02, Quickest(seconds_added=0.0, step_seconds=1.0, weight=1000))
    assert limits.allow(0.02, 1000)
    share = WELL_SPENT / 2
    enough = round(1000 * (1 - TIMES_FREED * share))
    assert limits.allow(share, enough)
    assert not limits.allow(share, enough + 1)
    assert not limits.allow(WELL_SPENT + 1e-6, 0)
    assert not Limits(None, 0.02).allow(share, enough)


def test_limits_of_another_graph_are_told_beside_its_own_times() -> None:
    limits = Limits(None, 0.02, Quickest(0.0, 1.0, 1000))
    moved = limits.moved(0.5)
    for seconds, weight in ((0.02, 1000), (0.021, 1000), (0.05, 500), (0.05, 900)):
        assert moved.allow(seconds + 0.5, weight) == limits.allow(seconds, weight)


def test_auto_takes_little_more_than_the_quickest_plan() -> None:
    """Which is not the one that keeps all: that writes more than it spares."""
    decision = decided("auto")
    quickest = decision.limits.quickest
    assert quickest is not None
    torchs = decision.candidate("torch's min-cut").estimate
    assert quickest.seconds_added <= torchs.seconds_added < 0
    free = quickest.seconds_added + NEARLY_FREE * quickest.step_seconds
    assert decision.limits.seconds == pytest.approx(free)
    chosen = decision.chosen.estimate
    assert decision.limits.allow(chosen.seconds_added, chosen.peak())
    assert chosen.peak() <= torchs.peak()
    assert any(BETWEEN in c.strategy for c in decision.candidates)


def test_plans_between_torch_s_and_ours() -> None:
    decision = decided("auto")
    assert decision.passes is not None
    assert decision.prices is not None
    of_torch = kept_by(decision.candidate("torch's min-cut"))
    search = Search(decision.passes, decision.prices, of_torch=of_torch)
    search.explore(products=False)
    assert search.far_from_torch
    for one in search.far_from_torch:
        groups = search.groups_of_torch(one)
        found = [search.nearer(one, taken) for taken in range(len(groups) + 1)]
        assert found[-1].plan.kept == one.plan.kept
        kept = [set(step.plan.kept) for step in found]
        assert all(more >= less for more, less in pairwise(kept))
        assert kept[0] - kept[-1] <= of_torch
        rates = [
            group.seconds / search.passes.bytes_of(group.operations & of_torch) for group in groups
        ]
        assert rates == sorted(rates)


def test_a_budget_is_met_by_the_quickest_of_them_too() -> None:
    """With less to spare, a plan takes more time; none is slower than the plans at its ends."""
    added = []
    for memory in (0.9, 0.7, 0.6):
        decision = decided(memory)
        limit = decision.limits.bytes
        assert limit is not None
        assert decision.chosen.estimate.peak() <= limit
        fitting = [c.estimate for c in decision.candidates if c.estimate.peak() <= limit]
        assert decision.chosen.estimate.seconds_added == min(e.seconds_added for e in fitting)
        added.append(decision.chosen.estimate.seconds_added)
        assert any(BETWEEN in c.strategy for c in decision.candidates)
    assert added == sorted(added)


def drawn(readers: int) -> Passes:
    """x · mask, and on the way back so many kernels that read the mask, with products between."""
    aten = "aten.mul.Tensor"
    operations = [
        Operation("x", "x", "input", (), (0,)),
        Operation("tangents_1", "tangents_1", "input", (), (1,)),
        Operation("seeds", "prims.inductor_seeds.default", "random", (), (2,)),
        Operation("draw", "prims.inductor_random.default", "cheap", (2,), (3,)),
        Operation("mask", "aten.gt.Scalar", "cheap", (3,), (4,)),
        Operation("y", aten, "cheap", (0, 4), (5,)),
    ]
    sizes, arriving = [400, 400, 8, 400, 100, 400], 1
    for k in range(readers):
        operations.append(Operation(f"g{k}", aten, "cheap", (arriving, 4), (len(sizes),)))
        sizes.append(400)
        operations.append(
            Operation(f"p{k}", "aten.mm.default", "product", (len(operations) - 1,), (len(sizes),))
        )
        sizes.append(400)
        arriving = len(operations) - 1
    return Passes(Graph(tuple(operations), tuple(sizes), (5, arriving)), 1)


@pytest.mark.parametrize("readers", [1, 3])
def test_what_is_drawn_again_takes_time_in_every_kernel(readers: int) -> None:
    passes = drawn(readers)
    seeds, draw, mask = 2, 3, 4
    draws = draws_of(passes, vector_rate=100.0 * DRAWING)
    assert draws == {draw: 1.0}  # a hundred numbers
    nothing = [0.0] * len(passes.graph.operations)
    prices = fused(passes, nothing, float("inf"), 0.0, draws)
    times = {
        kept: prices.of(backward_program(passes, saved(passes, frozenset({kept}))))
        for kept in (seeds, mask)
    }
    assert times == {seeds: float(readers), mask: 0.0}


def test_a_mask_that_is_drawn_again_is_worth_less() -> None:
    passes = drawn(1)
    nothing = [0.0] * len(passes.graph.operations)
    for draws, seconds in (({}, 0.0), ({3: 1.0}, 1.0)):
        search = Search(passes, fused(passes, nothing, float("inf"), 0.0, draws))
        (group,) = search.groups(search.look_at("seeds", frozenset({2})))
        assert group.seconds == seconds


def test_compiled_graphs_have_a_price_for_their_draws() -> None:
    assert prices_of(drawn(1), fuses=True).draws.keys() == {3}
    passes = Passes(read_graph(joint_of(lambda x: F.dropout(x, 0.5), leaf((4, 8)))), 1)
    assert not prices_of(passes, fuses=True).draws  # torch's own is a kernel, and not run again
