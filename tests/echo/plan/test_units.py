"""What is run again in fused code, one result at a time: what is free first."""

from __future__ import annotations

from torch import Tensor

from ecornn.echo.graph import read_graph
from ecornn.echo.passes import Passes
from ecornn.echo.plan.groups import kept_with
from ecornn.echo.plan.prices import Prices, fused
from ecornn.echo.plan.search import Search
from ecornn.echo.plan.units import units_of
from support.joints import joint_of, leaf


def masked(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """The mask is needed twice: as it is, for the gradient, and within what the product reads."""
    mask = (y > 0).to(x.dtype) * 1.25
    return (x * mask) @ w


def passes_and_prices() -> tuple[Passes, Prices]:
    graph = read_graph(joint_of(masked, *map(leaf, ((8, 8), (8, 8), (8, 8)))))
    passes = Passes(graph, 1)
    seconds = [float(op.kind == "product") for op in graph.operations]
    return passes, fused(passes, seconds, bandwidth=1e9, launch=1e-3)


def test_what_only_fused_operators_read_costs_no_kernel() -> None:
    passes, prices = passes_and_prices()
    compared = next(i for i, op in enumerate(passes.graph.operations) if ".gt." in op.target)
    units = units_of(passes, frozenset({compared}), prices)
    # a view of an input, the mask as numbers, what the product reads
    assert sorted(passes.bytes_of(unit.needed) for unit in units) == [0, 256, 256]
    assert units[0].seconds == units[1].seconds == 0
    assert units[2].seconds > prices.launch
    # the boolean stays in place of the numbers it stands for, the product's operand is kept
    kept = kept_with(passes, frozenset({compared}), units, 2)
    assert passes.bytes_of(kept) == 64 + 256


def test_a_search_finds_it_without_time_for_a_kernel() -> None:
    passes, prices = passes_and_prices()
    search = Search(passes, prices)
    search.explore(products=False)
    whole = min(search.found.values(), key=search.peak)
    fewer = search.fewer(whole, 2)
    assert fewer.estimate.seconds_added <= whole.estimate.seconds_added - prices.launch / 2
    assert fewer.estimate.kept_bytes < passes.bytes_of(passes.needed)
