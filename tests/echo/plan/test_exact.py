"""The exact plan is the best of all that can be tried, and the fast one is near it."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_export_joint_simple

from ecornn.echo.graph import read_graph
from ecornn.echo.passes import Passes
from ecornn.echo.plan.bidirectional import bidirectional
from ecornn.echo.plan.exact import exact
from ecornn.echo.plan.milp import SolverMissing
from ecornn.echo.plan.order import GIVEN, Order, forward_order, just_before_use, timeline
from ecornn.echo.plan.refine import refined
from ecornn.echo.plan.stages import Stages
from ecornn.errors import InvalidInput
from support.programs import STEPS, function_of

pytest.importorskip("scipy", reason="the exact plan needs scipy")


def passes_of(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Passes:
    inputs = tuple(torch.randn(shape, requires_grad=True) for shape in shapes)
    joint: fx.GraphModule = aot_export_joint_simple(function, inputs, trace_joint=True)
    return Passes(read_graph(joint), 1)


def chain(x: Tensor, w: Tensor) -> tuple[Tensor]:
    return (torch.tanh((x @ w).exp()) @ w,)


def wide_middle(x: Tensor, w: Tensor) -> tuple[Tensor]:
    return ((x @ w).unsqueeze(1).add(x.unsqueeze(2)).tanh().sum(1),)


def shared(x: Tensor, w: Tensor) -> tuple[Tensor]:
    y = x @ w
    return (y.exp() * y.sigmoid(),)


def dropped(x: Tensor, w: Tensor) -> tuple[Tensor]:
    return (F.dropout((x @ w).exp(), 0.5) @ w,)


TINY = {f.__name__: f for f in (chain, wide_middle, shared, dropped)}


def every_order(passes: Passes) -> Iterator[tuple[Order, int]]:
    """All choices of what is kept and what each stage runs again, with how many runs that is."""
    stages = Stages.of(passes)
    some = [
        [frozenset(s) for n in range(len(of) + 1) for s in itertools.combinations(of, n)]
        for of in (sorted(stages.values), sorted(stages.rerun))
    ]
    for kept in some[0]:
        for again in itertools.product(some[1], repeat=len(stages.stages)):
            there = set(kept)
            for stage, runs in zip(stages.stages, again, strict=True):
                for i in sorted(runs):
                    if not stages.uses[i] <= there:
                        break
                    there.add(i)
                else:
                    if stage.reads <= there:
                        continue
                break
            else:
                runs_made = [set(runs) for runs in again]
                yield stages.spelled_out(runs_made, kept), sum(map(len, again))


@pytest.mark.parametrize("name", TINY)
def test_nothing_that_can_be_tried_is_better(name: str) -> None:
    passes = passes_of(TINY[name], (6, 5), (5, 5))
    tried = [(timeline(passes, order).peak_bytes, runs) for order, runs in every_order(passes)]
    assert len(tried) > 10
    found = exact(passes)
    assert found.optimal
    assert found.peak == min(peak for peak, _ in tried)
    assert timeline(passes, found.order).peak_bytes == found.peak
    # and the other way round: the least recomputation for every peak there is
    for limit in {peak for peak, _ in tried}:
        least = min(runs for peak, runs in tried if peak <= limit)
        assert exact(passes, peak_limit=limit).seconds_added == least
    for runs in {runs for _, runs in tried}:
        lowest = min(peak for peak, made in tried if made <= runs)
        assert exact(passes, added_limit=runs).peak == lowest


def reads_only_what_is_there(passes: Passes, order: Order, kept: frozenset[int]) -> bool:
    """In the backward pass, of the forward one's results, only the kept."""
    operations, made = passes.graph.operations, set(kept | passes.backward)
    for i in order[len(forward_order(passes, kept)) :]:
        if any(u not in made and operations[u].kind not in GIVEN for u in operations[i].uses):
            return False
        made.add(i)
    return True


def programs(count: int) -> list[list[tuple[str, int, int]]]:
    draw, names = random.Random(0), sorted(STEPS)
    return [
        [
            (draw.choice(names), draw.randrange(10), draw.randrange(10))
            for _ in range(draw.randint(3, 12))
        ]
        for _ in range(count)
    ]


@pytest.mark.no_cover
def test_the_fast_plan_is_near_the_best() -> None:
    """And both read only what they have kept or made."""
    gaps = []
    for program in programs(40):
        function = function_of(program, two_results=False)
        passes = passes_of(lambda x, y: (function(x, y),), (8, 8), (8, 8))  # noqa: B023
        best = exact(passes)
        assert best.optimal
        assert reads_only_what_is_there(passes, best.order, best.kept)
        assert timeline(passes, best.order).peak_bytes == best.peak
        kept = bidirectional(passes)
        fast = refined(passes, kept)
        assert timeline(passes, fast.order).peak_bytes == fast.peak
        assert fast.order == just_before_use(passes, fast.kept)
        assert reads_only_what_is_there(passes, fast.order, fast.kept)
        # no plan is better than the best, and to refine makes none worse
        for some, window in ((kept, 0), (kept, 1 << 30), (passes.needed, 0)):
            peak = timeline(passes, just_before_use(passes, some, window)).peak_bytes
            assert best.peak <= peak
            assert fast.peak <= peak or (some, window) != (kept, 0)
        gaps.append(fast.peak / best.peak - 1)
    # of 200 other programs, 199 were within 5 % and one at 5.9 %
    assert sum(gap <= 0.05 for gap in gaps) >= 39
    assert max(gaps) <= 0.10


def test_what_cannot_be_run_again_must_be_kept() -> None:
    passes = passes_of(chain, (6, 5), (5, 5))
    with pytest.raises(ValueError, match="cannot be run again"):
        just_before_use(passes, frozenset())


def test_a_limit_that_no_plan_meets_is_refused() -> None:
    passes = passes_of(chain, (6, 5), (5, 5))
    with pytest.raises(InvalidInput, match="one that some plan meets"):
        exact(passes, peak_limit=10)
    with pytest.raises(InvalidInput, match="one of the two"):
        exact(passes, peak_limit=10, added_limit=1.0)


def test_a_graph_that_is_too_large_is_refused() -> None:
    def long(x: Tensor, w: Tensor) -> tuple[Tensor]:
        for _ in range(40):
            x = torch.tanh(x @ w) * x
        return (x,)

    with pytest.raises(InvalidInput, match="use the fast plan"):
        exact(passes_of(long, (3, 3), (3, 3)))


def test_without_the_solver_the_error_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(SolverMissing, match=r"ecornn\[exact\]"):
        exact(passes_of(chain, (6, 5), (5, 5)))
