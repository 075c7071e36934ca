"""What a graph does again and again: operations that are alike, and states carried between them.

An unrolled loop is the same piece many times. Two operations are alike if they make the same call
on tensors of the same form, and so do what they use, what that uses, and so on for a few levels:
few, so that the steps of a loop are alike soon after its first. A *state* is what such a piece
hands to the next one through operators that may be run again, as an LSTM's cell does: to recompute
one would be to recompute all before it, so states are always kept.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from ecornn.echo.analysis.circles import circles
from ecornn.echo.graph import RERUN, Graph
from ecornn.echo.passes import Passes

#: Levels of sources that must be alike. Two reach from one cell state to the one before it.
DEPTH = 2
#: Steps of the shortest loop: of two, the second may be alike by chance.
SHORTEST = 3
#: Steps that are asked for the way back to the step before; all must not be, in a long graph.
ASKED = 8


@dataclass(frozen=True)
class Repetition:
    """`kind_of[i]` is a number that all operations alike share."""

    kind_of: tuple[int, ...]
    states: frozenset[int]

    @property
    def unique(self) -> int:
        return len(set(self.kind_of))

    def alike(self, operations: Iterable[int]) -> list[list[int]]:
        """These operations in groups of those alike, in order: what to decide together."""
        groups: dict[int, list[int]] = {}
        for i in sorted(operations):
            groups.setdefault(self.kind_of[i], []).append(i)
        return list(groups.values())

    def explain(self) -> str:
        return (
            f"{len(self.kind_of):,} operations, {self.unique:,} of them different; "
            f"{len(self.states):,} states carried from step to step"
        )


def repetition(passes: Passes) -> Repetition:
    kind_of = kinds(passes.graph)
    return Repetition(kind_of, _Recurrence(passes, kind_of).states())


def kinds(graph: Graph, depth: int = DEPTH) -> tuple[int, ...]:
    """For each operation a number, the same for all that are alike."""
    numbers: dict[object, int] = {}
    own = [numbers.setdefault(_form(graph, i), len(numbers)) for i in range(len(graph.operations))]
    found = own
    for _ in range(depth):
        numbers = {}
        found = [
            numbers.setdefault((own[i], *(found[u] for u in operation.uses)), len(numbers))
            for i, operation in enumerate(graph.operations)
        ]
    return tuple(found)


def _form(graph: Graph, i: int) -> tuple[object, ...]:
    """An operation without its sources. Where a view starts is left out: `x[t]` is alike for all
    `t`; so is which input it is, since layers are alike whose weights are different tensors."""
    operation = graph.operations[i]
    held = tuple(graph.storages[s] for s in operation.holds)
    call = operation.work.call
    target = "" if operation.kind == "input" else operation.target
    # a part of a tuple is told by its place (gates), unless the tuple is one step after another
    part = "getitem" in target and "unbind" not in graph.operations[operation.uses[0]].target
    if operation.kind == "view" and call is not None and not part:
        return (target, tuple(call.tensors()), operation.work.written_bytes, held)
    return (target, call.key if call else None, held)


class _Recurrence:
    """Looks for states: circles among the kinds of operations that may be run again."""

    def __init__(self, passes: Passes, kind_of: tuple[int, ...]) -> None:
        self.passes, self.kind_of = passes, kind_of
        self.operations = passes.graph.operations
        self.between = self._between()
        self.readers: dict[int, list[int]] = defaultdict(list)
        for i in self.between:
            for u in self.operations[i].uses:
                self.readers[u].append(i)

    def _between(self) -> set[int]:
        """What would be run again if nothing but products, draws and inputs were kept."""
        found: set[int] = set()
        waiting = list(self.passes.needed)
        while waiting:
            i = waiting.pop()
            if i not in found and self.operations[i].kind in RERUN:
                found.add(i)
                waiting += self.operations[i].uses
        return found

    def states(self) -> frozenset[int]:
        """Each circle is cut at what it carries, until there are none."""
        again = set(self.between)
        found: set[int] = set()
        while True:
            by_kind: dict[int, list[int]] = defaultdict(list)
            leads_to: dict[int, set[int]] = {}
            for i in sorted(again):
                by_kind[self.kind_of[i]].append(i)
                sources = (self.kind_of[u] for u in self.operations[i].uses if u in again)
                leads_to.setdefault(self.kind_of[i], set()).update(sources)
            left = circles(leads_to)
            if not left:
                return frozenset(found)
            for circle in left:
                members = {i for kind in circle for i in by_kind[kind]}
                carried = self._carried(members, by_kind) if self._is_fed(members) else set()
                # what is no recurrence is not looked at again
                again -= carried or members
                found |= carried

    def _is_fed(self, members: set[int]) -> bool:
        """Whether something new comes in at each step. A chain that lives on itself, such as a
        tanh of a tanh of a tanh, is no recurrence."""
        fed: dict[int, set[int]] = defaultdict(set)
        count = Counter(self.kind_of[i] for i in members)
        for i in members:
            fed[self.kind_of[i]].update(u for u in self.operations[i].uses if u not in members)
        return any(len(sources) >= max(2, count[kind] - 1) for kind, sources in fed.items())

    def _carried(self, members: set[int], by_kind: dict[int, list[int]]) -> set[int]:
        """The states of a circle: of the fewest bytes among what is also read from outside it. A
        sum of many terms has none: nobody wants its partial sums."""

        def wanted(i: int) -> bool:
            return i in self.passes.needed or any(r not in members for r in self.readers[i])

        count = Counter(self.kind_of[i] for i in members if wanted(i))

        def preference(kind: int) -> tuple[int, bool, int, int]:
            i = by_kind[kind][-1]
            # of a result and its view the result, since a view is free
            held = self.passes.bytes_of(frozenset({i}))
            return (held, self.operations[i].kind == "view", -count[kind], i)

        candidates = [k for k, times in count.items() if times >= max(2, len(by_kind[k]) / 2)]
        for kind in sorted(candidates, key=preference):
            asked = by_kind[kind][-ASKED:]
            ways = Counter(way for i in asked if (way := self._way_back(i, members)) is not None)
            if ways:
                # what most steps do: the first and the last may do something else
                found = self._along(ways.most_common(1)[0][0], by_kind[kind])
                return found if len(found) >= SHORTEST else set()
        return set()

    def _way_back(self, start: int, members: set[int]) -> tuple[int, ...] | None:
        """The shortest way from an operation to an earlier one of its kind, as places in `uses`."""
        waiting: deque[tuple[int, tuple[int, ...]]] = deque([(start, ())])
        seen = {start}
        while waiting:
            i, way = waiting.popleft()
            for place, u in enumerate(self.operations[i].uses):
                if u in members and self.kind_of[u] == self.kind_of[start]:
                    return (*way, place)
                if u in members and u not in seen:
                    seen.add(u)
                    waiting.append((u, (*way, place)))
        return None

    def _along(self, way: tuple[int, ...], alike: list[int]) -> set[int]:
        """All that lie on that way from the last step to the first. The first steps have other
        sources than the rest, so they are not alike in full; they make the same call."""
        found: set[int] = set()
        form = _form(self.passes.graph, alike[0])
        for start in reversed(alike):
            chain = [start]
            while chain[-1] not in found:
                before = self._at(chain[-1], way)
                if before is None or _form(self.passes.graph, before) != form:
                    break
                chain.append(before)
            # one alone carries nothing
            found |= set(chain) if len(chain) > 1 else set()
        return found

    def _at(self, i: int, way: tuple[int, ...]) -> int | None:
        for place in way:
            if i not in self.between or place >= len(self.operations[i].uses):
                return None
            i = self.operations[i].uses[place]
        return i if i in self.between else None
