"""What an exact plan is about: the results that may be kept or made again, and when they are read.

A result that refers to the same memory as what it views stands for it: to have the one is to have
the other. Inputs, and what follows from them by views, are always there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ecornn.echo.graph import RERUN, NotUnderstood
from ecornn.echo.passes import Passes
from ecornn.echo.plan.order import GIVEN, Order, forward_order


@dataclass(frozen=True)
class Stage:
    """An operation of the backward pass that reads results of the forward one. Bytes of the
    backward pass's own results: `before` it runs, `at` its run, and the most `later`, until the
    next stage."""

    operation: int
    reads: frozenset[int]
    before: int
    at: int
    later: int


@dataclass(frozen=True)
class Stages:
    passes: Passes
    stages: tuple[Stage, ...]
    lead_in: int  # bytes of the backward pass before the first of them
    values: tuple[int, ...]
    rerun: frozenset[int]  # of the values
    uses: dict[int, frozenset[int]]  # values of a value
    storages: dict[int, tuple[int, ...]]  # that count, of a value
    made: dict[int, int]  # the operation of the forward pass by which a value is there
    useful: tuple[tuple[int, ...], ...]  # by stage, values that it or a later one may want
    #: By operation of the forward pass: bytes at its run whatever is kept, and which storages.
    forward: dict[int, tuple[int, set[int]]]
    _stands_for: dict[int, int]

    @classmethod
    def of(cls, passes: Passes) -> Stages:
        return _Builder(passes).built()

    def spelled_out(self, again: Sequence[set[int]], kept: frozenset[int]) -> Order:
        """The order of runs in which each stage first makes what was chosen for it. Views are made
        where they are read."""
        passes, operations = self.passes, self.passes.graph.operations
        order = forward_order(passes, kept)
        at = {stage.operation: t for t, stage in enumerate(self.stages)}
        latest: dict[int, int] = dict.fromkeys(kept, 0)  # the run of a value
        viewed: dict[int, int] = {}  # the run that a view was made of

        def view(i: int) -> None:
            """Make a view of what is there now, unless that was done."""
            root = self._stands_for.get(i)
            if operations[i].kind in GIVEN or i in passes.backward or i == root:
                return
            run = latest[root] if root is not None else 0
            if viewed.get(i) != run:
                for u in operations[i].uses:
                    view(u)
                viewed[i] = run
                order.append(i)

        for b in sorted(passes.backward):
            if operations[b].kind in GIVEN:
                continue
            for i in sorted(again[at[b]]) if b in at else ():
                for u in operations[i].uses:
                    view(u)
                order.append(i)
                latest[i] = len(order)
            for u in operations[b].uses:
                view(u)
            order.append(b)
        return tuple(order)


class _Builder:
    def __init__(self, passes: Passes) -> None:
        self.passes, self.operations = passes, passes.graph.operations
        self.always: set[int] = set()
        self.root: dict[int, int] = {}
        for i, operation in enumerate(self.operations):
            if i in passes.backward:
                continue
            if operation.kind in GIVEN or (
                operation.kind == "view" and self.always.issuperset(operation.uses)
            ):
                self.always.add(i)
                continue
            same = [u for u in operation.uses if self.operations[u].holds == operation.holds]
            stands_for = operation.kind == "view" and len(operation.uses) == 1 and same
            self.root[i] = self.root[same[0]] if stands_for else i

    def built(self) -> Stages:
        passes = self.passes
        returned = passes.graph.outputs[passes.forward_outputs :]
        if any(i is not None and i not in passes.backward for i in returned):
            raise NotUnderstood("the backward pass returns what does not depend on a gradient")
        uses: dict[int, frozenset[int]] = {}
        rerun: set[int] = set()
        waiting = list(self._values_of(passes.needed))
        while waiting:
            i = waiting.pop()
            if i in uses:
                continue
            again = self.operations[i].kind in RERUN
            uses[i] = self._values_of(self.operations[i].uses) if again else frozenset()
            rerun |= {i} if again else set()
            waiting += uses[i]
        stages, lead_in = self._stages()
        storages = {
            i: tuple(s for s in self.operations[i].holds if s not in passes.held_anyway)
            for i in uses
        }
        return Stages(
            passes,
            tuple(stages),
            lead_in,
            tuple(sorted(uses)),
            frozenset(rerun),
            uses,
            storages,
            {i: i for i in uses},
            tuple(self._useful(stages, uses)),
            self._forward(),
            self.root,
        )

    def _values_of(self, some: Sequence[int] | frozenset[int]) -> frozenset[int]:
        return frozenset(self.root[i] for i in some if i in self.root)

    def _useful(
        self, stages: list[Stage], uses: dict[int, frozenset[int]]
    ) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        wanted: set[int] = set()
        for stage in reversed(stages):
            waiting = list(stage.reads)
            while waiting:
                i = waiting.pop()
                if i not in wanted:
                    wanted.add(i)
                    waiting += uses[i]
            found.append(tuple(sorted(wanted)))
        return found[::-1]

    def _forward(self) -> dict[int, tuple[int, set[int]]]:
        """Memory of the forward pass's own making. What is run in it for a kept result alone is
        left out until it is kept: less than in truth, as a bound must be."""
        passes, operations = self.passes, self.operations
        order = forward_order(passes, ())
        last: dict[int, int] = {}
        for i in order:
            last[i] = i
            for u in operations[i].uses:
                last[u] = i
        results = {i for i in passes.graph.outputs[: passes.forward_outputs] if i is not None}
        inputs = {
            s
            for i, op in enumerate(operations)
            if op.kind in GIVEN and i not in passes.backward
            for s in op.holds
        }
        sizes = passes.graph.storages
        found: dict[int, tuple[int, set[int]]] = {}
        alive: list[int] = []
        for i in order:
            alive = [j for j in alive if last[j] >= i or j in results] + [i]
            held = {s for j in alive for s in operations[j].holds} | inputs
            found[i] = (sum(sizes[s] for s in held), held)
        return found

    def _stages(self) -> tuple[list[Stage], int]:
        passes, operations, sizes = self.passes, self.operations, self.passes.graph.storages
        order = [b for b in sorted(passes.backward) if operations[b].kind not in GIVEN]
        last: dict[int, int] = {}
        for b in order:
            for u in (b, *operations[b].uses):
                last[u] = b
        outputs = set(passes.graph.outputs)
        base = set(passes.held_anyway)
        arriving = [b for b in passes.graph.inputs if b in passes.backward]
        base -= {s for b in arriving for s in operations[b].holds}
        alive: list[int] = list(arriving)
        at: Counter[int] = Counter()
        before: Counter[int] = Counter()
        for b in order:
            held = base | {s for j in alive for s in operations[j].holds}
            before[b] = sum(sizes[s] for s in held)
            alive.append(b)
            held |= set(operations[b].holds)
            at[b] = sum(sizes[s] for s in held)
            alive = [j for j in alive if last.get(j, -1) > b or j in outputs]
        reading = [b for b in order if self._values_of(operations[b].uses)]
        found = []
        for n, b in enumerate(reading):
            end = reading[n + 1] if n + 1 < len(reading) else len(operations)
            between = [at[c] for c in order if b < c < end]
            reads = self._values_of(operations[b].uses)
            found.append(Stage(b, reads, before[b], at[b], max(between, default=0)))
        start = reading[0] if reading else len(operations)
        return found, max((at[b] for b in order if b < start), default=0)
