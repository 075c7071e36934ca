"""An order of runs: a joint graph's operations as they are run, some of them again.

What an operation reads is the latest run of what it uses. Both passes are one order, so that one
simulation covers both, and two plans are compared by it whatever made them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from ecornn.echo.analysis.liveness import Timeline, simulate
from ecornn.echo.graph import RERUN, Graph, Operation
from ecornn.echo.passes import Passes

Order = tuple[int, ...]
#: Kinds that are there without being run.
GIVEN = ("input", "constant", "number")


def forward_order(passes: Passes, kept: Iterable[int]) -> list[int]:
    """What the results and the kept take, in the graph's order, without inputs."""
    operations = passes.graph.operations
    results = passes.graph.outputs[: passes.forward_outputs]
    waiting = [i for i in (*results, *kept) if i is not None]
    # what draws or writes is run, whoever reads it
    waiting += [i for i, op in enumerate(operations) if op.kind in ("random", "opaque")]
    found: set[int] = set()
    while waiting:
        i = waiting.pop()
        if i not in found and i not in passes.backward:
            found.add(i)
            waiting += operations[i].uses
    return sorted(i for i in found if operations[i].kind not in GIVEN)


def just_before_use(passes: Passes, kept: frozenset[int], window: int = 0) -> Order:
    """Keep these results; make the others just before the backward pass reads them. A copy serves
    the operation that it is made for, and the `window` ones after it."""
    operations = passes.graph.operations
    order = forward_order(passes, kept)
    there = {i for i, op in enumerate(operations) if op.kind in GIVEN} | kept
    copies: deque[tuple[int, list[int]]] = deque()  # which operation they serve last
    own = [b for b in sorted(passes.backward) if operations[b].kind not in GIVEN]
    for place, b in enumerate(own):
        while copies and copies[0][0] < place:
            there.difference_update(copies.popleft()[1])
        again = missing(passes, operations[b].uses, there)
        order += [*again, b]
        there.update(again)
        copies.append((place + window, again))
    returned = passes.graph.outputs[passes.forward_outputs :]
    order += missing(passes, (i for i in returned if i is not None), there)
    return tuple(order)


def missing(passes: Passes, wanted: Iterable[int], there: Collection[int]) -> list[int]:
    """What must run so that these results are there, if some are already."""
    operations = passes.graph.operations
    found: set[int] = set()
    waiting = list(wanted)
    while waiting:
        i = waiting.pop()
        if i not in there and i not in found and i not in passes.backward:
            if operations[i].kind not in RERUN:
                name = f"{operations[i].name} ({operations[i].kind})"
                raise ValueError(f"{name} is needed, is not kept, and cannot be run again")
            found.add(i)
            waiting += operations[i].uses
    return sorted(found)


def replayed(passes: Passes, order: Order) -> Graph:
    """The graph of one run in that order. Arriving gradients are made where the backward pass
    begins; a result that is made again has memory of its own."""
    operations, sizes = passes.graph.operations, passes.graph.storages
    steps: list[Operation] = []
    storages: list[int] = []
    latest: dict[int, int] = {}
    memory: dict[tuple[int, int], int] = {}  # (step that made it, storage there) -> storage here

    def run(i: int) -> None:
        operation = operations[i]
        # the size of a result is known before the result is there
        sources = [u for u in operation.uses if u in latest or operation.kind != "number"]
        uses = tuple(latest[u] for u in sources)
        inherited: dict[int, int] = {}
        for u in sources:
            for s in operations[u].holds:
                inherited.setdefault(s, memory[latest[u], s])
        place, holds = len(steps), []
        for s in operation.holds:
            if s not in inherited:
                inherited[s] = len(storages)
                storages.append(sizes[s])
            memory[place, s] = inherited[s]
            holds.append(inherited[s])
        kind = operation.kind
        if kind == "input" and i in passes.backward:
            kind = "opaque"
        steps.append(Operation(operation.name, operation.target, kind, uses, tuple(holds)))
        latest[i] = place

    arriving = [i for i in passes.graph.inputs if i in passes.backward]
    for i, operation in enumerate(operations):
        if operation.kind in GIVEN and i not in arriving:
            run(i)
    results: list[int | None] = []

    def arrive() -> None:
        # the results of the forward pass are those of this moment
        results.extend(None if r is None else latest[r] for r in _results(passes))
        for tangent in arriving:
            run(tangent)
        arriving.clear()

    for i in order:
        if i in passes.backward and arriving:
            arrive()
        run(i)
    if arriving:  # the backward pass has no operation: the gradients that arrive are the inputs'
        arrive()
    returned = passes.graph.outputs[passes.forward_outputs :]
    results += [None if r is None else latest[r] for r in returned]
    return Graph(tuple(steps), tuple(storages), tuple(results))


def _results(passes: Passes) -> tuple[int | None, ...]:
    return passes.graph.outputs[: passes.forward_outputs]


def timeline(passes: Passes, order: Order) -> Timeline:
    """Inputs are held by the caller throughout, results of the forward pass from when they are
    made; what was kept, until it was last read."""
    graph = replayed(passes, order)
    return simulate(graph, graph.inputs)
