"""What is in memory when elementwise operators are fused into the kernels that read them."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ecornn.echo.graph import read_graph
from ecornn.echo.passes import Passes
from ecornn.echo.pipeline import decide
from ecornn.echo.plan import fused as fused_module
from ecornn.echo.plan.estimate import Plan, estimate
from ecornn.echo.plan.prices import fused, one_by_one
from ecornn.echo.request import Request
from support.joints import joint_of, leaf

ROWS, WIDTH = 32, 16
ONE = ROWS * WIDTH * 4  # bytes of a value
WEIGHT = WIDTH * WIDTH * 4


def forward_peaks(function: Callable[..., Tensor]) -> tuple[int, int]:
    """(fused, one by one), beside the inputs, nothing but those kept."""
    inputs = [leaf((ROWS, WIDTH)), leaf((WIDTH, WIDTH))]
    passes = Passes(read_graph(joint_of(function, *inputs)), 1)
    count = len(passes.graph.operations)
    both = fused(passes, [0.0] * count, 1e9, 1e-6), one_by_one([0.0] * count)
    kept = frozenset(i for i in passes.needed if passes.graph.operations[i].kind == "product")
    found = (estimate(passes, Plan("", kept), prices).forward_peak for prices in both)
    one, other = (peak - ONE - WEIGHT for peak in found)
    return one, other


def test_a_chain_between_products_is_one_kernel_that_writes_over_what_it_reads() -> None:
    """One by one a step holds its source and its result."""
    found = forward_peaks(lambda x, w: (x @ w).detach().sin().cos().exp() @ w)
    assert found == (2 * ONE, 2 * ONE)
    found = forward_peaks(lambda x, w: x.detach().sin().cos().exp() + w.sum())
    assert found[0] == ONE + 4
    assert found[1] > found[0]


def test_what_a_reduction_reads_is_not_in_memory() -> None:
    fused_peak, others = forward_peaks(lambda x, w: (x.detach().sin() * 2).sum(1) * w.sum())
    assert fused_peak <= 3 * ROWS * 4 + 4
    assert others >= 2 * ONE


def test_what_takes_many_reads_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum of products that is read again after many others: if it were not in memory, all the
    products that it is made of would have to stay."""

    def sum_of_products(x: Tensor, w: Tensor) -> Tensor:
        found = x @ w
        for k in range(2, 8):
            found = found + x @ (w * k)
        return found

    def many(x: Tensor, w: Tensor) -> Tensor:
        total = sum_of_products(x.detach(), w)
        return sum_of_products(total.sin(), w) + total

    with_limits, _ = forward_peaks(many)
    for limit in ("READS_IF_SHARED", "READS", "READS_ON_CPU"):
        monkeypatch.setattr(fused_module, limit, 99)
    without, _ = forward_peaks(many)
    assert without >= with_limits + 5 * ONE


def test_planning_leaves_the_collector_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    read = read_graph

    def watched(module: torch.fx.GraphModule) -> object:
        seen.append(gc.isenabled())
        return read(module)

    monkeypatch.setattr("ecornn.echo.joint.read_graph", watched)
    joint = joint_of(lambda x, w: (x @ w).sin().sum(), leaf((3, 4)), leaf((4, 5)))
    assert gc.isenabled()
    decide(joint, [], 1, Request())
    assert seen == [False]
    assert gc.isenabled()
