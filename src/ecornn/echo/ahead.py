"""Both passes of a graph, compiled by inductor ahead of its first call, for one aim after another.

torch compiles a backward pass when it first runs, and only then knows whether its graph is kept for
another one, which changes the code. So nothing that is compiled here runs, or has kernels
(`without_kernels.py`): what is chosen is compiled once more when it is called, and inductor finds
its code in its cache.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch._functorch.config as functorch_config
from torch import fx
from torch._guards import TracingContext, tracing

from ecornn.echo.by_code import Aim, Tried, least_by_code, within_by_code
from ecornn.echo.graph import NotUnderstood
from ecornn.echo.options import Memory
from ecornn.echo.pipeline import Decision
from ecornn.echo.recorded import Recorded
from ecornn.echo.report import GraphReport, of_operators
from ecornn.echo.traced import copied


class _NoNeed(Exception):
    """A plan need not be compiled: its code is known, or (None) holds more than is of interest."""

    def __init__(self, known: Tried | None) -> None:
        super().__init__()
        self.known = known


class _NothingToChoose(Exception):
    """There is no backward pass, or torch's own partitioner splits the graph."""


class Ahead:
    """`told`: what will be told of the graph. `partition`: for the report and record of one aim.
    `generate`: has a graph compiled, split by it."""

    def __init__(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        told: GraphReport,
        partition: Callable[[GraphReport, Recorded, Aim], Any],
        generate: Callable[..., Any],
    ) -> None:
        self.module, self.inputs, self._told = module, inputs, told
        self._partition, self._generate = partition, generate
        self._known: dict[Any, Tried] = {}

    def least(self) -> Aim | None:
        """None: as it is asked for."""
        try:
            return least_by_code(self._attempt)
        except _NothingToChoose:
            return None

    def within(self, memory: Memory) -> Aim | None:
        """Raises where the code of no plan is within a budget, or that is not known."""
        try:
            return within_by_code(memory, self._attempt)
        except _NothingToChoose:
            return None

    def told(self) -> list[tuple[str, int]]:
        """By plan, what its code holds."""
        return [(one.strategy, one.peak) for one in self._known.values()]

    def _attempt(self, aim: Aim, most: int | None) -> Tried | None:
        told = GraphReport(self._told.name, self._told.codegen, "", aim.memory, ahead=True)
        recorded, found = Recorded(""), []
        partition = self._partition(told, recorded, aim)

        def heed(decision: Decision) -> None:
            found.append(decision)
            if decision.passes is None:
                raise _NothingToChoose
            if (known := self._known.get(_key(decision))) is not None:
                raise _NoNeed(known)
            if most is not None and _at_least(decision) >= most:
                raise _NoNeed(None)

        partition.heed = heed
        try:
            self._compile(partition)
        except _NoNeed as one:
            return one.known
        except NotUnderstood:
            if aim.of_torch is None:
                raise
            return None  # it is not made of large graphs, and not used where it is wrong
        if not found:
            raise _NothingToChoose
        (decision,) = found
        peak, chosen = told.predicted_peak_bytes, told.chosen
        if peak is None or told.foretold is None or chosen is None:
            raise NotUnderstood(f"what its code holds is not known: {told.not_foretold}")
        tried = Tried(
            *(aim, chosen.strategy, peak, told.foretold.inputs, chosen.peak_bytes),
            *(chosen.seconds_added, told.limit_bytes),
        )
        self._known[_key(decision)] = tried
        return tried

    def _compile(self, partition: Any) -> None:
        context = TracingContext.try_get()
        # torch notes in it what it has compiled, and counts it where a model is split for DDP
        own = tracing(None if context is None else copy.copy(context))
        ahead = functorch_config.patch(force_non_lazy_backward_lowering=True)
        with own, ahead, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it will be warned of when the graph is compiled
            self._generate(copied(self.module), self.inputs, partition)


def _key(decision: Decision) -> Any:
    """Alike for the same two passes."""
    chosen = decision.chosen
    assert chosen.joint is not None
    of = chosen.joint.gates, chosen.joint.apart
    if chosen.plan is None:
        return of, chosen.strategy
    return of, chosen.plan.kept, chosen.plan.window


def _at_least(decision: Decision) -> int:
    """What is there between the passes, whatever code is made of them."""
    found = of_operators(decision)
    return found.inputs + found.results + found.kept
