"""A plan improved where its peak is: other results kept, by simulation.

The fewest kept bytes are not the lowest peak: to make a result again takes the memory of all it is
made of, at a moment when the backward pass holds much already; and what the forward pass holds at
its own peak can be kept until then for nothing. So the peak is simulated, and what is kept is
changed a little in many ways; the best is taken, until nothing lowers the peak any more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ecornn.echo.analysis.liveness import Timeline
from ecornn.echo.analysis.repetition import Repetition, repetition
from ecornn.echo.graph import RERUN
from ecornn.echo.passes import Passes
from ecornn.echo.plan.order import GIVEN, Order, just_before_use, missing, timeline

#: How far what is kept is pushed on, regardless of the bytes.
FURTHER = 3
#: Operations gone through in simulations, at most: a million took 50 s on one core.
MOST_WORK = 100_000


@dataclass(frozen=True)
class Refined:
    kept: frozenset[int]
    order: Order
    peak: int


def refined(passes: Passes, kept: frozenset[int], *, most_work: int = MOST_WORK) -> Refined:
    """From `kept` to a plan with a lower simulated peak, or the same."""
    search = _Search(passes, repetition(passes), most_work)
    best = search.look_at(kept)
    while True:
        better = best
        for kept in search.moves(best):
            if search.tired:
                break
            better = min(better, search.look_at(kept), key=_rank)
        if _rank(better) >= _rank(best):
            break
        best = better
    return Refined(best.kept, best.order, best.timeline.peak_bytes)


@dataclass(frozen=True)
class _Looked:
    kept: frozenset[int]
    order: Order
    timeline: Timeline
    first: int  # the place in the timeline at which the order begins


def _rank(looked: _Looked) -> tuple[int, int]:
    """The peak, and how often it is reached: several moments may have to be lowered in turn."""
    bytes_at = looked.timeline.bytes_at
    return looked.timeline.peak_bytes, bytes_at.count(looked.timeline.peak_bytes)


class _Search:
    def __init__(self, passes: Passes, repeated: Repetition, most_work: int) -> None:
        self.passes, self.repeated, self.left = passes, repeated, most_work
        self.given = {i for i, op in enumerate(passes.graph.operations) if op.kind in GIVEN}
        self.seen: dict[frozenset[int], _Looked] = {}

    @property
    def tired(self) -> bool:
        return self.left <= 0

    def look_at(self, kept: frozenset[int]) -> _Looked:
        kept = self._read_at_all(kept)
        if kept not in self.seen:
            order = just_before_use(self.passes, kept)
            found = timeline(self.passes, order)
            self.left -= len(order)
            self.seen[kept] = _Looked(kept, order, found, len(found.bytes_at) - len(order))
        return self.seen[kept]

    def _read_at_all(self, kept: Collection[int]) -> frozenset[int]:
        """Without what was kept only to make something that is kept now."""
        again = missing(self.passes, self.passes.needed, self.given | set(kept))
        read = {u for i in again for u in self.passes.graph.operations[i].uses}
        return frozenset(i for i in kept if i in read or i in self.passes.needed)

    def moves(self, looked: _Looked) -> Iterator[frozenset[int]]:
        """More to keep: what is run again around the peak, if that is in the backward pass; what
        is made of something kept, so that this is not kept. Each alone and with those alike. And
        what something kept was made of, in place of it."""
        again = set(missing(self.passes, self.passes.needed, self.given | looked.kept))
        readers: dict[int, list[int]] = defaultdict(list)
        for i in sorted(again):
            for u in self.passes.graph.operations[i].uses:
                readers[u].append(i)
        found: list[tuple[int, ...]] = [(i,) for i in self._around(looked)]
        for i in looked.kept - self.passes.needed:
            further = set(readers[i])
            for _ in range(FURTHER):
                found.append(tuple(sorted(further)))
                further = {
                    r for x in further for r in ((x,) if x in self.passes.needed else readers[x])
                }
        alike = {i: group for group in self.repeated.alike(again) for i in group}
        more = [tuple(sorted({j for i in some for j in alike.get(i, (i,))})) for some in found]
        # where steps repeat, one of them alone changes nothing
        for some in dict.fromkeys([*more, *found]):
            yield looked.kept | set(some)
        for i in sorted(looked.kept):
            yield self._back(looked.kept, i)

    def _back(self, kept: frozenset[int], i: int) -> frozenset[int]:
        """What a kept result is made of, in place of it and all that refers to its memory."""
        operations = self.passes.graph.operations
        memory = set(operations[i].holds)
        waiting = [j for j in kept if memory & set(operations[j].holds)]
        found, seen = set(kept.difference(waiting)), set(waiting)
        while waiting:
            j = waiting.pop()
            if operations[j].kind not in RERUN:
                return kept
            for u in operations[j].uses:
                if memory.isdisjoint(operations[u].holds):
                    found |= {u} - self.given
                elif u not in seen:
                    seen.add(u)
                    waiting.append(u)
        return frozenset(found)

    def _around(self, looked: _Looked) -> list[int]:
        """What is run again for the operation of the backward pass at the peak."""
        backward, order = self.passes.backward, looked.order
        start = end = max(looked.timeline.peak_at - looked.first, 0)
        while start > 0 and order[start - 1] not in backward:
            start -= 1
        while end < len(order) - 1 and order[end] not in backward:
            end += 1
        # if the order begins so, it is the forward pass
        return list(dict.fromkeys(order[start:end])) if start > 0 else []
