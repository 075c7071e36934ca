"""What each pass runs, in which order, and how often: the two programs that a plan leads to.

The backward pass follows the gradient. What it needs and was not kept is run again just before it
is read. A copy serves the readers of the next `window` operations on the gradient; a reader
further on gets a copy of its own, since one copy alive until then may be what makes the peak.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ecornn.echo.graph import Graph, Operation
from ecornn.echo.passes import Passes

#: One copy serves all readers.
FOR_ALL = 1 << 60


@dataclass(frozen=True)
class Step:
    """`operation` is run on the results of earlier steps, one for each that it uses."""

    operation: int
    sources: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """The first `given` steps are results that arrive."""

    steps: tuple[Step, ...]
    given: int
    outputs: tuple[int | None, ...]  # steps

    def again(self, passes: Passes) -> list[int]:
        """Operations of the forward pass that run, once for each time they do."""
        operations = (step.operation for step in self.steps[self.given :])
        return [i for i in operations if i not in passes.backward]


def saved(passes: Passes, kept: frozenset[int]) -> list[int]:
    """Everything that goes from the forward to the backward pass: what is kept, and the inputs that
    it or what is run again reads. A tensor each: an operation of several results is passed by those
    that are read."""
    operations = passes.graph.operations
    found: set[int] = set()
    seen: set[int] = set()
    waiting = list(passes.needed)
    while waiting:
        i = waiting.pop()
        if i in seen:
            continue
        seen.add(i)
        if operations[i].kind == "constant" and not operations[i].holds:
            continue  # a graph within the graph, such as a branch: both passes have it
        if i in kept or operations[i].kind in ("input", "number"):
            found.add(i)
        else:
            waiting += operations[i].uses
    several = {i for i in found if operations[i].several}
    parts = {i for i in seen if set(operations[i].uses) & several}
    return sorted((found - several) | parts)


def forward_program(passes: Passes, between: list[int]) -> Program:
    """What the results and everything `between` the passes take, in the graph's order."""
    operations = passes.graph.operations
    results = passes.graph.outputs[: passes.forward_outputs]
    wanted = {i for i in (*results, *between) if i is not None}
    # what draws or writes runs, whoever reads it
    wanted |= {i for i, op in enumerate(operations) if op.kind in ("random", "opaque")}
    waiting = list(wanted - passes.backward)
    wanted = set()
    while waiting:
        i = waiting.pop()
        if i not in wanted:
            wanted.add(i)
            waiting += operations[i].uses
    given = [i for i in passes.graph.inputs if i not in passes.backward]
    order = given + sorted(wanted.difference(given))
    place = {i: step for step, i in enumerate(order)}
    steps = tuple(Step(i, tuple(place[used] for used in operations[i].uses)) for i in order)
    leaving = (*results, *between)
    return Program(steps, len(given), tuple(None if i is None else place[i] for i in leaving))


def backward_program(passes: Passes, between: list[int], window: int = FOR_ALL) -> Program:
    tangents = [i for i in passes.graph.inputs if i in passes.backward]
    writer = _Writer(passes, [*between, *tangents], window)
    for position, i in enumerate(sorted(passes.backward.difference(tangents))):
        writer.position = position
        writer.run(i)
    returned = passes.graph.outputs[passes.forward_outputs :]
    outputs = [None if i is None else writer.made(i) for i in returned]
    return _without_unread(passes, Program(tuple(writer.steps), writer.given, tuple(outputs)))


@dataclass
class _Writer:
    passes: Passes
    arriving: list[int]
    window: int
    position: int = 0
    steps: list[Step] = field(default_factory=list)
    #: By operation: its latest step, and the position of the gradient then; None: stays.
    latest: dict[int, tuple[int, int | None]] = field(default_factory=dict)
    parts: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for i in self.arriving:
            self._write(i, (), stays=True)
        self.given = len(self.arriving)
        for i, operation in enumerate(self.passes.graph.operations):
            for used in operation.uses:
                if self.passes.graph.operations[used].several and i not in self.passes.backward:
                    self.parts.setdefault(used, []).append(i)

    def run(self, i: int) -> None:
        """An operation on the gradient."""
        sources = tuple(self.made(used) for used in self.passes.graph.operations[i].uses)
        self._write(i, sources, stays=True)

    def made(self, wanted: int) -> int:
        """The step of a result, made again if no copy is near."""
        operations = self.passes.graph.operations
        waiting = [(wanted, False)]
        while waiting:
            i, ready = waiting.pop()
            if self._near(i):
                continue
            if not ready:
                waiting.append((i, True))
                waiting += [(used, False) for used in operations[i].uses[::-1]]
                continue
            self._write(i, tuple(self.latest[used][0] for used in operations[i].uses))
            # all parts at once: the whole is not held for those that are read late
            for part in self.parts.get(i, ()):
                if not self._stays(part):
                    self._write(part, (self.latest[i][0],))
        return self.latest[wanted][0]

    def _near(self, i: int) -> bool:
        if i not in self.latest:
            return False
        made_at = self.latest[i][1]
        return made_at is None or self.position - made_at <= self.window

    def _stays(self, i: int) -> bool:
        return i in self.latest and self.latest[i][1] is None

    def _write(self, i: int, sources: tuple[int, ...], *, stays: bool = False) -> None:
        self.latest[i] = (len(self.steps), None if stays else self.position)
        self.steps.append(Step(i, sources))


def _without_unread(passes: Passes, program: Program) -> Program:
    """Without what nobody reads. Random draws of the forward pass go too: the model draws nothing
    again. What belongs to the backward pass and draws or writes stays."""
    operations = passes.graph.operations
    read = {step for step in program.outputs if step is not None}
    for place in range(len(program.steps) - 1, -1, -1):
        step = program.steps[place]
        own = step.operation in passes.backward
        if own and operations[step.operation].kind in ("random", "opaque"):
            read.add(place)
        if place in read:
            read |= set(step.sources)
    stays = [p for p in range(len(program.steps)) if p in read or p < program.given]
    place_of = {place: k for k, place in enumerate(stays)}
    steps = tuple(
        Step(program.steps[p].operation, tuple(place_of[s] for s in program.steps[p].sources))
        for p in stays
    )
    outputs = tuple(None if step is None else place_of[step] for step in program.outputs)
    return Program(steps, program.given, outputs)


def graph_of(passes: Passes, program: Program) -> Graph:
    """A program as a graph of its own, whose memory can be simulated. What is run again makes new
    memory, unless it is a view."""
    storages: list[int] = []
    maps: list[dict[int, int]] = []  # by step: storage of the joint graph -> storage here
    arrived: dict[int, int] = {}
    operations: list[Operation] = []
    for place, step in enumerate(program.steps):
        operation = passes.graph.operations[step.operation]
        mine: dict[int, int] = {}
        for storage in operation.holds:
            there = arrived if place < program.given or operation.kind == "constant" else {}
            found = there.get(storage, _of_sources(maps, step.sources, storage))
            if found is None:
                found = len(storages)
                storages.append(passes.graph.storages[storage])
                if place < program.given or operation.kind == "constant":
                    arrived[storage] = found
            mine[storage] = found
        maps.append(mine)
        kind = "input" if place < program.given else operation.kind
        operations.append(
            Operation(
                f"{operation.name}@{place}",
                operation.target,
                kind,
                step.sources,
                tuple(sorted(mine.values())),
                operation.several,
            )
        )
    return Graph(tuple(operations), tuple(storages), program.outputs)


def _of_sources(maps: list[dict[int, int]], sources: Iterable[int], storage: int) -> int | None:
    return next((maps[s][storage] for s in sources if storage in maps[s]), None)
