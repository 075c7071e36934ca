"""Echo's bidirectional analysis: keep the small ends of a cheap region, recompute its middle.

Backwards: from everything the backward pass needs, through operators that may be run again, to
what may not: products, random draws, inputs. Keeping just those would do. Forwards: from there the
kept results are pushed on, each time a group of operators that share what they read: if keeping
what they make takes no more than what then nobody reads any more, that is kept instead, for it
costs no recomputation. So a product's own result is never kept where something made of it is as
small, and results that share one large source are decided together.
"""

from __future__ import annotations

from collections.abc import Collection

from ecornn.echo.passes import Passes

RERUN = ("cheap", "view")


def bidirectional(passes: Passes, also: Collection[int] = ()) -> frozenset[int]:
    """The forward results to keep; all others that are needed follow from these and the inputs.
    `also` are operations that may be run again although their kind is not cheap."""
    rerun = {i for i, op in enumerate(passes.graph.operations) if op.kind in RERUN} | set(also)
    kept, reached = _ends(passes, rerun)
    readers = _readers(passes, reached, rerun)
    settled: set[int] = set()
    while frontier := _frontier(passes, reached, kept, settled):
        for group in _groups(passes, frontier):
            pushed = _pushed(passes, kept, group, readers)
            if passes.bytes_of(frozenset(pushed)) <= passes.bytes_of(frozenset(kept)):
                kept = pushed
            settled |= group
    return frozenset(i for i in kept if not _there_anyway(passes, i))


def _there_anyway(passes: Passes, i: int) -> bool:
    """Inputs, and views of them: a view costs nothing to make again."""
    operation = passes.graph.operations[i]
    of_inputs = operation.kind == "view" and all(_there_anyway(passes, u) for u in operation.uses)
    return operation.kind in ("input", "constant") or of_inputs


def _ends(passes: Passes, rerun: set[int]) -> tuple[set[int], set[int]]:
    """(results that cannot be recomputed, everything between them and what is needed)"""
    operations = passes.graph.operations
    ends: set[int] = set()
    reached: set[int] = set()
    waiting = list(passes.needed)
    while waiting:
        i = waiting.pop()
        if i in reached:
            continue
        reached.add(i)
        if i in rerun:
            waiting += operations[i].uses
        else:
            ends.add(i)
    return ends, reached


def _readers(passes: Passes, reached: set[int], rerun: set[int]) -> dict[int, set[int]]:
    """By result, the operators that would read it again."""
    found: dict[int, set[int]] = {i: set() for i in reached}
    for i in reached:
        if i in rerun:
            for used in passes.graph.operations[i].uses:
                found[used].add(i)
    return found


def _frontier(passes: Passes, reached: set[int], kept: set[int], settled: set[int]) -> list[int]:
    """Operators not decided on whose sources are all kept, in order."""
    return sorted(
        i
        for i in reached - kept - settled
        if all(used in kept for used in passes.graph.operations[i].uses)
    )


def _groups(passes: Passes, frontier: list[int]) -> list[set[int]]:
    """Operators that read the same storage, which must be kept until all of them have it."""
    groups: list[tuple[set[int], set[int]]] = []  # (operators, storages)
    for i in frontier:
        uses = passes.graph.operations[i].uses
        storages = {s for used in uses for s in passes.graph.operations[used].holds}
        storages -= passes.held_anyway
        together = [group for group in groups if group[1] & storages]
        groups = [group for group in groups if not group[1] & storages]
        merged = ({i}, storages)
        for operators, read in together:
            merged = (merged[0] | operators, merged[1] | read)
        groups.append(merged)
    return [operators for operators, _ in groups]


def _pushed(
    passes: Passes, kept: set[int], group: set[int], readers: dict[int, set[int]]
) -> set[int]:
    """`kept` with a group's results in place of the sources that only it reads."""
    sources = {used for i in group for used in passes.graph.operations[i].uses}
    after = kept | group
    given_up = {u for u in sources if u not in passes.needed and readers[u] <= after}
    return after - given_up
