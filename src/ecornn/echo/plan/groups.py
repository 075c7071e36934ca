"""What a plan runs again, in groups that can be taken or left one by one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ecornn.echo.passes import Passes
from ecornn.echo.schedule import saved


@dataclass(frozen=True)
class Group:
    """Operations that are run again together: what each of them reads is kept or of the group."""

    operations: frozenset[int]
    needed: frozenset[int]  # of its results, those that the backward pass reads
    ends: frozenset[int]  # kept results that it reads
    seconds: float
    freed: float  # bytes; what several groups read is charged to each in part

    @property
    def worth(self) -> float:
        """Bytes freed a second."""
        return self.freed / self.seconds if self.seconds > 0 else float("inf") * (self.freed or 1)


def run_again(passes: Passes, kept: frozenset[int]) -> frozenset[int]:
    """Operations that a plan runs again."""
    there = set(saved(passes, kept))
    found: set[int] = set()
    waiting = list(passes.needed)
    while waiting:
        i = waiting.pop()
        if i not in there and i not in found:
            found.add(i)
            waiting += passes.graph.operations[i].uses
    return frozenset(found)


def groups_of(passes: Passes, kept: frozenset[int], seconds: Sequence[float]) -> list[Group]:
    """The groups of a plan, those that free most a second first."""
    operations = passes.graph.operations
    again = run_again(passes, kept)
    members = _connected(passes, again)
    ends = [
        frozenset(u for i in group for u in operations[i].uses if u not in again)
        for group in members
    ]
    readers: dict[int, int] = defaultdict(int)
    for group_ends in ends:
        for i in group_ends - passes.needed:
            readers[i] += 1
    found = []
    for group, group_ends in zip(members, ends, strict=True):
        needed = group & passes.needed
        charged = sum(
            passes.bytes_of(frozenset({i})) / readers[i] for i in group_ends - passes.needed
        )
        found.append(
            Group(
                group,
                needed,
                group_ends,
                sum(seconds[i] for i in group),
                passes.bytes_of(needed) - charged,
            )
        )
    return sorted(found, key=lambda g: (-g.worth, min(g.operations)))


def _connected(passes: Passes, again: frozenset[int]) -> list[frozenset[int]]:
    """Operations that read each other's results; constants join nobody."""
    leader = {i: i for i in again}

    def top(i: int) -> int:
        while leader[i] != i:
            leader[i] = leader[leader[i]]
            i = leader[i]
        return i

    for i in sorted(again):
        for used in passes.graph.operations[i].uses:
            if used in again and passes.graph.operations[used].uses:
                leader[top(used)] = top(i)
    members: dict[int, set[int]] = defaultdict(set)
    for i in again:
        members[top(i)].add(i)
    return [frozenset(members[key]) for key in sorted(members)]


def kept_with(
    passes: Passes, kept: frozenset[int], groups: Sequence[Group], taken: int
) -> frozenset[int]:
    """What is kept when only the first groups are run again."""
    left: Iterable[int] = (i for group in groups[taken:] for i in group.needed)
    return kept | frozenset(left)
