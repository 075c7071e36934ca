"""What a plan would hold and what it would take, without building a graph for it."""

from __future__ import annotations

from dataclasses import dataclass

from ecornn.echo.analysis.liveness import simulate
from ecornn.echo.passes import Passes
from ecornn.echo.plan.prices import Prices
from ecornn.echo.schedule import (
    FOR_ALL,
    Program,
    backward_program,
    forward_program,
    graph_of,
    saved,
)


@dataclass(frozen=True)
class Plan:
    """What is kept between the passes, and for how long a copy of what is run again serves."""

    label: str
    kept: frozenset[int]
    window: int = FOR_ALL


@dataclass(frozen=True)
class Estimate:
    forward_peak: int
    backward_peak: int
    kept_bytes: int  # between the passes, beside the graph's inputs and results
    seconds_added: float  # to what both passes take when all is kept

    def peak(self, calls: int = 1) -> int:
        """When the forward pass is called so many times before the backward passes run: what the
        earlier calls keep is there at the last one."""
        return (calls - 1) * self.kept_bytes + max(self.forward_peak, self.backward_peak)


def estimate(passes: Passes, plan: Plan, prices: Prices) -> Estimate:
    between = saved(passes, plan.kept)
    backward = backward_program(passes, between, plan.window)
    return estimate_of(passes, forward_program(passes, between), backward, prices)


def estimate_of(passes: Passes, forward: Program, backward: Program, prices: Prices) -> Estimate:
    forward_graph, backward_graph = (graph_of(passes, program) for program in (forward, backward))
    arriving = [step.operation for step in backward.steps[: backward.given]]
    between = frozenset(i for i in arriving if i not in passes.backward)
    # what the model is called with, weights among it, is held by the caller in both passes
    inputs = between.intersection(passes.graph.inputs)
    held = [place for place, i in enumerate(arriving) if i in inputs]
    return Estimate(
        simulate(forward_graph, forward_graph.inputs).peak_bytes,
        simulate(backward_graph, held).peak_bytes,
        passes.bytes_of(between),
        prices.added(forward, backward),
    )
