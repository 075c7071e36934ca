"""The best plan there is, by mixed-integer programming, for graphs of some dozens of operations.

What is chosen, given the graph's own order of operations in both passes: which results of the
forward pass are kept; before each operation of the backward pass that reads some, which are run
again; and which of all those are held on to for later. So a result may be made several times, kept
for some readers and made again for others, or given up half way. What is minimized is the peak of
both passes as `liveness.simulate` counts it, under a limit on the time that is spent on running
things again; or that time, under a limit on the peak.

Every schedule that leaves the order of the backward pass alone and makes results between its
operations is one of these choices. So the optimum is a lower bound for all of them, whoever made
them, and `Exact.order` shows that it can be had: simulated, it has that very peak.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ecornn.echo.passes import Passes
from ecornn.echo.plan.milp import Program, Variable
from ecornn.echo.plan.order import Order
from ecornn.echo.plan.stages import Stages
from ecornn.errors import InvalidInput

#: Products of stages and the square of what may be kept: beyond, the program takes too long.
LARGEST = 60_000


@dataclass(frozen=True)
class Exact:
    """`bound`: no plan has a lower peak, or less added time; what was asked for is reached if
    `optimal`."""

    kept: frozenset[int]
    order: Order
    peak: int
    seconds_added: float
    bound: float
    optimal: bool


def exact(
    passes: Passes,
    seconds: Sequence[float] | None = None,
    *,
    added_limit: float | None = None,
    peak_limit: int | None = None,
    time_limit: float = 60.0,
) -> Exact:
    """The lowest peak, with at most `added_limit` seconds of recomputation; or, with a
    `peak_limit`, the least recomputation. `seconds` are the times of the operations."""
    if added_limit is not None and peak_limit is not None:
        raise InvalidInput("added_limit", "one beside peak_limit", "one of the two", "drop one")
    return _Model(passes, seconds).solved(added_limit, peak_limit, time_limit)


class _Model:
    """Variables, all between 0 and 1: `there[t][i]`, result i is there when stage t begins (kept,
    for the first); `again[t][i]`, it is run in stage t; `wanted[t][k][i]`, it is read by run k of
    stage t or later; and, by the first of these, the memory at every moment."""

    def __init__(self, passes: Passes, seconds: Sequence[float] | None) -> None:
        self.passes = passes
        self.seconds = seconds
        self.stages = stages = Stages.of(passes)
        size = len(stages.stages) * len(stages.values) ** 2
        if size > LARGEST:
            raise InvalidInput(
                "passes",
                f"{len(stages.values)} results and {len(stages.stages)} operations that read them",
                f"stages · results² up to {LARGEST:,}",
                "use the fast plan; the exact one is for small graphs",
            )
        self.program = Program()
        self.peak = self.program.real(upper=float("inf"))
        self.there: list[dict[int, Variable]] = []
        self.again: list[dict[int, Variable]] = []
        self._choices()
        self._forward_memory()
        for t in range(len(stages.stages)):
            self._backward_memory(t)

    def _choices(self) -> None:
        program, stages = self.program, self.stages
        for t, stage in enumerate(stages.stages):
            useful = stages.useful[t]
            self.there.append({i: program.choice() for i in useful})
            self.again.append({i: program.choice() for i in useful if i in stages.rerun})
            for i in useful:
                if t:  # from the stage before, held or made there
                    before = [(self.there[t - 1].get(i), 1.0), (self.again[t - 1].get(i), 1.0)]
                    program.at_most([(self.there[t][i], 1.0), *_minus(before)], 0)
                if i in self.again[t]:
                    program.at_most([(self.again[t][i], 1.0), (self.there[t][i], 1.0)], 1)
                    for u in stages.uses[i]:
                        have = [(self.there[t][u], 1.0), (self.again[t].get(u), 1.0)]
                        program.at_most([(self.again[t][i], 1.0), *_minus(have)], 0)
            for i in stage.reads:
                have = [(self.there[t][i], 1.0), (self.again[t].get(i), 1.0)]
                program.at_most(_minus(have), -1)

    def _forward_memory(self) -> None:
        """While the forward pass runs, what is kept is held from when it is made."""
        stages = self.stages
        kept = self.there[0] if self.there else {}
        for place, (fixed, alive) in stages.forward.items():
            terms = self._held(
                {i: [(v, 1.0)] for i, v in kept.items() if stages.made[i] <= place}, alive, 0.0
            )
            self._within(fixed, terms)
        # and all of it until something reads it
        self._within(stages.lead_in, self._held({i: [(v, 1.0)] for i, v in kept.items()}, set(), 0))

    def _backward_memory(self, t: int) -> None:
        program, stages = self.program, self.stages
        stage, there, again = stages.stages[t], self.there[t], self.again[t]
        after = self.there[t + 1] if t + 1 < len(self.there) else {}
        # wanted from a moment on, from the last moment back to the first
        wanted = {i: program.real() for i in there}
        for i, want in wanted.items():
            if i in after:
                program.at_most([(after[i], 1.0), (want, -1.0)], 0)
            if i in stage.reads:
                program.at_most([(want, -1.0)], -1)
        self._moment(stage.at, wanted, there, again)
        for k in sorted(again, reverse=True):
            earlier = {i: program.real() for i in there}
            for i, want in earlier.items():
                program.at_most([(wanted[i], 1.0), (want, -1.0)], 0)
                if i == k or i in stages.uses[k]:
                    program.at_most([(again[k], 1.0), (want, -1.0)], 0)
            wanted = earlier
            made = {i: v for i, v in again.items() if i <= k}
            self._moment(stage.before, wanted, there, made)
        self._within(stage.later, self._held({i: [(v, 1.0)] for i, v in after.items()}, set(), 0.0))

    def _moment(
        self,
        fixed: int,
        wanted: dict[int, Variable],
        there: dict[int, Variable],
        made: dict[int, Variable],
    ) -> None:
        """Held is what is there or made, and wanted."""
        terms = {
            i: [(there[i], 1.0), (made.get(i), 1.0), (want, 1.0)] for i, want in wanted.items()
        }
        self._within(fixed, self._held(terms, set(), -1.0))

    def _held(
        self,
        terms: dict[int, list[tuple[Variable | None, float]]],
        alive: set[int],
        offset: float,
    ) -> list[tuple[Variable | None, float]]:
        """Bytes of storages, each once: held if any result is that refers to it."""
        sizes = self.passes.graph.storages
        held: dict[int, Variable] = {}
        for i, sum_of in terms.items():
            for s in self.stages.storages[i]:
                if s not in alive:
                    held.setdefault(s, self.program.real())
                    self.program.at_most([*sum_of, (held[s], -1.0)], -offset)
        return [(v, float(sizes[s])) for s, v in held.items()]

    def _within(self, fixed: int, terms: list[tuple[Variable | None, float]]) -> None:
        self.program.at_most([*terms, (self.peak, -1.0)], -float(fixed))

    def solved(self, added_limit: float | None, peak_limit: int | None, time_limit: float) -> Exact:
        program = self.program
        runs = [(v, self._time(i)) for again in self.again for i, v in again.items()]
        if added_limit is not None:
            program.at_most(runs, added_limit)
        if peak_limit is not None:
            program.at_most([(self.peak, 1.0)], float(peak_limit))
        goal = runs if peak_limit is not None else [(self.peak, 1.0)]
        answer = program.minimized(goal, time_limit)
        if answer is None:
            wish = f"{peak_limit:,} bytes" if peak_limit is not None else "this limit"
            raise InvalidInput(
                "peak_limit" if peak_limit is not None else "added_limit",
                wish,
                "one that some plan meets",
                "raise it; `exact(passes)` gives the lowest peak",
            )
        return self._told(answer.values, answer.bound, answer.optimal, runs)

    def _time(self, i: int) -> float:
        return 1.0 if self.seconds is None else self.seconds[i]

    def _told(
        self,
        values: Sequence[float],
        bound: float,
        optimal: bool,
        runs: list[tuple[Variable, float]],
    ) -> Exact:
        first = self.there[0] if self.there else {}
        kept = frozenset(i for i, v in first.items() if values[v] > 0.5)
        order = self.stages.spelled_out(
            [{i for i, v in again.items() if values[v] > 0.5} for again in self.again], kept
        )
        added = sum(cost for variable, cost in runs if values[variable] > 0.5)
        return Exact(kept, order, round(values[self.peak]), added, bound, optimal)


def _minus(
    terms: list[tuple[Variable | None, float]],
) -> list[tuple[Variable | None, float]]:
    return [(variable, -factor) for variable, factor in terms]
