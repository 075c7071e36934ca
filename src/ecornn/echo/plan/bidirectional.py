"""Echo's bidirectional analysis: keep the small ends of a cheap region, recompute its middle.

Backwards: from everything the backward pass needs, through operators that may be run again, to
what may not: products, random draws, inputs, and recurrent states, beyond which a recomputation
would run back to the first step. Keeping just those would do. Forwards: from there the kept
results are pushed on, each time a group of operators that share what they read: if keeping what
they make takes no more than what then nobody reads any more, that is kept instead, for it costs no
recomputation. So a product's own result is never kept where something made of it is as small, and
results that share one large source are decided together.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection

from ecornn.echo.analysis.repetition import repetition
from ecornn.echo.graph import RERUN
from ecornn.echo.passes import Passes


def bidirectional(
    passes: Passes,
    also: Collection[int] = (),
    one_state_in: int = 1,
    states: Collection[int] | None = None,
) -> frozenset[int]:
    """The forward results to keep; all others that are needed follow from these and the inputs.
    `also` are operations that may be run again although their kind is not cheap. Of recurrent
    states all are kept, or one in so many: then chains are so long at most. It pays where what is
    added to a state is smaller than the state, as in a residual network under autocast. `states`:
    where they are known already."""
    rerun = {i for i, op in enumerate(passes.graph.operations) if op.kind in RERUN} | set(also)
    states = repetition(passes).states if states is None else states
    frontier = _Frontier(passes, rerun - _last_of_every(one_state_in, states, passes, rerun))
    while waiting := frontier.take():
        for group in _groups(passes, waiting):
            frontier.decide(group)
    anyway = _there_anyway(passes)
    return frozenset(i for i in frontier.kept if i not in anyway)


def _last_of_every(many: int, states: Collection[int], passes: Passes, rerun: set[int]) -> set[int]:
    """Of so many states in a row the last: the first follows from what is there anyway, and is as
    large as any. Counted along what makes them, since those of several streams take turns."""
    before = [0] * len(passes.graph.operations)  # states on the way to this result, itself included
    for i, operation in enumerate(passes.graph.operations):
        if i in rerun:
            before[i] = max((before[used] for used in operation.uses), default=0) + (i in states)
    return {i for i in states if before[i] % many == 0}


def _there_anyway(passes: Passes) -> set[int]:
    """Inputs, and views of them: a view costs nothing to make again."""
    found: set[int] = set()
    for i, operation in enumerate(passes.graph.operations):
        of_those = operation.kind == "view" and found.issuperset(operation.uses)
        if operation.kind in ("input", "constant") or of_those:
            found.add(i)
    return found


class _Frontier:
    """What is kept so far. Every operator is looked at once, with its sources and readers."""

    def __init__(self, passes: Passes, rerun: set[int]) -> None:
        self._passes = passes
        self._operations = passes.graph.operations
        reached = self._reached(rerun)
        #: by result, the operators that would read it again
        self._readers: dict[int, list[int]] = {i: [] for i in reached}
        self._missing: dict[int, int] = {}  # sources that are not kept
        for i in sorted(reached & rerun):
            self._missing[i] = len(self._uses(i))
            for used in self._uses(i):
                self._readers[used].append(i)
        self._unread = {i: len(readers) for i, readers in self._readers.items()}
        self._ready = [i for i, missing in self._missing.items() if not missing]
        self._holders: Counter[int] = Counter()  # of each storage, among what is kept
        self.kept: set[int] = set()
        for i in sorted(reached - rerun):
            self._keep(i)
        #: what must not be given up for something made of it
        self._fixed = passes.needed | {i for i in self.kept if self._operations[i].kind in RERUN}

    def _reached(self, rerun: set[int]) -> set[int]:
        """What is needed, and everything between it and what cannot be recomputed."""
        found: set[int] = set()
        waiting = list(self._passes.needed)
        while waiting:
            i = waiting.pop()
            if i not in found and i not in self._passes.anywhere:
                found.add(i)
                waiting += self._operations[i].uses if i in rerun else ()
        return found

    def _uses(self, i: int) -> list[int]:
        return [used for used in self._operations[i].uses if used not in self._passes.anywhere]

    def take(self) -> list[int]:
        """Operators not decided on whose sources are all kept, in order."""
        found, self._ready = sorted(self._ready), []
        return found

    def decide(self, group: list[int]) -> None:
        """Keep a group's results in place of the sources that only it reads, if they take no
        more."""
        given_up = self._given_up(group)
        change: Counter[int] = Counter()
        for i in group:
            change.update(self._storages(i))
        for i in given_up:
            change.subtract(self._storages(i))
        sizes = self._passes.graph.storages
        more = 0
        for storage, by in change.items():
            before = self._holders[storage]
            more += sizes[storage] * (bool(before + by) - bool(before))
        if more <= 0:
            for i in group:
                self._keep(i)
            for i in given_up:
                self._give_up(i)

    def _given_up(self, group: list[int]) -> list[int]:
        reads = Counter(used for i in group for used in self._uses(i))
        return [
            used
            for used, times in reads.items()
            if used not in self._fixed and self._unread[used] == times
        ]

    def _keep(self, i: int) -> None:
        self.kept.add(i)
        self._holders.update(self._storages(i))
        for reader in self._readers[i]:
            self._missing[reader] -= 1
            if not self._missing[reader]:
                self._ready.append(reader)
        # it reads nothing again; nor does it once it is given up in turn
        for used in self._uses(i) if i in self._missing else ():
            self._unread[used] -= 1

    def _give_up(self, i: int) -> None:
        self.kept.discard(i)
        self._holders.subtract(self._storages(i))

    def _storages(self, i: int) -> set[int]:
        return set(self._operations[i].holds) - self._passes.held_anyway


def _groups(passes: Passes, waiting: list[int]) -> list[list[int]]:
    """Operators that read the same storage, which must be kept until all of them have it."""
    leader: dict[int, int] = {}  # of an operator or, below zero, a storage

    def find(x: int) -> int:
        while leader.setdefault(x, x) != x:
            leader[x] = leader[leader[x]]
            x = leader[x]
        return x

    for i in waiting:
        for used in passes.graph.operations[i].uses:
            for storage in passes.graph.operations[used].holds:
                if storage not in passes.held_anyway:
                    leader[find(-1 - storage)] = find(i)
    groups: dict[int, list[int]] = defaultdict(list)
    for i in waiting:
        groups[find(i)].append(i)
    return list(groups.values())
