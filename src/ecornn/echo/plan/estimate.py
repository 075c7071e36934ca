"""What a plan would hold and what it would take, without building a graph for it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from ecornn.echo.analysis.liveness import simulate
from ecornn.echo.passes import Passes
from ecornn.echo.plan.fused import fused_peak
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
    #: Inputs and results of the forward pass that the backward pass does not read.
    beside: int = 0

    def peak(self, calls: int = 1) -> int:
        """When the forward pass is called so many times before the backward passes run: what the
        earlier calls keep is there at the last one. Of one call, the caller holds inputs and
        results whether they are read again or not; of many, those that are not may be gone."""
        backward = self.backward_peak + (self.beside if calls == 1 else 0)
        return (calls - 1) * self.kept_bytes + max(self.forward_peak, backward)

    def weight(self, calls: int = 1, *, among_others: bool = False) -> int:
        """The bytes by which plans are compared. While other parts of a model run, between the
        passes, nothing of this one is there but what it keeps. The peak of the step may be there
        or here, which nobody knows before all parts are compiled: both count alike. Of many calls
        the peak counts already what all but one keep."""
        return self.peak(calls) + (self.kept_bytes if among_others else 0)


def estimate(passes: Passes, plan: Plan, prices: Prices) -> Estimate:
    return Estimates(passes, prices).of(plan)


def estimate_of(passes: Passes, forward: Program, backward: Program, prices: Prices) -> Estimate:
    return Estimates(passes, prices).of_programs(forward, backward)


@dataclass
class Estimates:
    """Of many plans for one graph. Plans that keep the same have one forward pass, and often one
    backward pass however long its copies serve."""

    passes: Passes
    prices: Prices
    #: By what goes between the passes.
    _forward: dict[tuple[int, ...], tuple[int, float]] = field(default_factory=dict)
    _backward: dict[tuple[int, ...], list[tuple[Program, Estimate]]] = field(default_factory=dict)

    def of(self, plan: Plan) -> Estimate:
        between = saved(self.passes, plan.kept)
        backward = backward_program(self.passes, between, plan.window)
        known = self._backward.setdefault(tuple(between), [])
        for program, found in known:
            if program == backward:
                return found
        found = self._of(between, backward, None)
        known.append((backward, found))
        return found

    def of_programs(self, forward: Program, backward: Program) -> Estimate:
        arriving = (step.operation for step in backward.steps[: backward.given])
        between = [i for i in arriving if i not in self.passes.backward]
        return self._of(between, backward, forward)

    def _of(self, between: list[int], backward: Program, forward: Program | None) -> Estimate:
        passes, prices = self.passes, self.prices
        if forward is not None or tuple(between) not in self._forward:
            forward = forward or forward_program(passes, between)
            peak = _peak(passes, forward, range(forward.given), prices)
            self._forward[tuple(between)] = peak, prices.of(forward)
        forward_peak, forward_seconds = self._forward[tuple(between)]
        # what the model is called with, weights among it, is held by the caller in both passes
        inputs = {i for i in passes.graph.inputs if i not in passes.backward}
        arriving = [step.operation for step in backward.steps[: backward.given]]
        held = [place for place, i in enumerate(arriving) if i in inputs]
        return Estimate(
            forward_peak,
            _peak(passes, backward, held, prices),
            passes.bytes_of(frozenset(between)),
            forward_seconds + prices.of(backward) - prices.step_seconds,
            _there_beside(passes, between),
        )


def _peak(passes: Passes, program: Program, held: Collection[int], prices: Prices) -> int:
    if prices.fuses:
        return fused_peak(passes, program, held)
    return simulate(graph_of(passes, program), held).peak_bytes


def _there_beside(passes: Passes, between: Collection[int]) -> int:
    """Inputs and results of the forward pass that the backward pass does not see."""
    operations = passes.graph.operations
    seen = {s for i in between for s in operations[i].holds}
    theirs = (i for i in passes.graph.inputs if i not in passes.backward)
    results = (i for i in passes.graph.outputs[: passes.forward_outputs] if i is not None)
    beside = {s for i in (*theirs, *results) for s in operations[i].holds} - seen
    return sum(passes.graph.storages[s] for s in beside)
