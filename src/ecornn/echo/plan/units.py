"""What a plan runs again, one result at a time, for code that is fused.

A result that only elementwise operators and reductions of the backward pass read is made within
their kernels: to run it again costs what it is made of, read instead of it. A result that a product
reads has to be in memory, and costs a kernel. Each is a group of its own, so that what is free is
taken whatever the rest costs.
"""

from __future__ import annotations

from collections import Counter

from ecornn.echo.passes import Passes
from ecornn.echo.plan.groups import Group, run_again
from ecornn.echo.plan.prices import HEAVY, Prices


def units_of(passes: Passes, kept: frozenset[int], prices: Prices) -> list[Group]:
    """The units of a plan, those that free most a second first."""
    again = run_again(passes, kept)
    results = _results(passes, again)
    made_of = {i: _made_of(passes, again, values) for i, values in results.items()}
    readers = Counter(
        end for _, ends in made_of.values() for end in ends if end not in passes.needed
    )
    found = []
    for i, values in results.items():
        operations, ends = made_of[i]
        charged = sum(
            passes.bytes_of(frozenset({end})) / readers[end] for end in ends if end in readers
        )
        own = passes.bytes_of(values)
        seconds = _seconds(passes, operations, ends, values, prices)
        found.append(Group(operations, values, ends, seconds, own - charged))
    return sorted(found, key=lambda g: (-g.worth, min(g.operations)))


def _results(passes: Passes, again: frozenset[int]) -> dict[int, frozenset[int]]:
    """What the backward pass reads of what is run again, views together with what they show."""
    operations = passes.graph.operations
    shown: dict[int, set[int]] = {}
    for i in sorted(again & passes.needed):
        base = i
        while operations[base].kind == "view" and len(operations[base].uses) == 1:
            (source,) = operations[base].uses
            if source not in again:
                break
            base = source
        shown.setdefault(base, set()).add(i)
    return {base: frozenset(values) for base, values in shown.items()}


def _made_of(
    passes: Passes, again: frozenset[int], values: frozenset[int]
) -> tuple[frozenset[int], frozenset[int]]:
    """(operations that make some results, what is kept and they read)"""
    found: set[int] = set()
    ends: set[int] = set()
    waiting = list(values)
    while waiting:
        i = waiting.pop()
        if i not in again:
            ends.add(i)
        elif i not in found:
            found.add(i)
            waiting += passes.graph.operations[i].uses
    return frozenset(found), frozenset(ends)


def _seconds(
    passes: Passes,
    operations: frozenset[int],
    ends: frozenset[int],
    values: frozenset[int],
    prices: Prices,
) -> float:
    kinds = {passes.graph.operations[i].kind for i in operations}
    heavy = sum(prices.seconds[i] for i in operations if passes.graph.operations[i].kind in HEAVY)
    heavy += sum(prices.draws.get(i, 0.0) for i in operations)
    if kinds.isdisjoint({"cheap", *HEAVY}):
        return 0.0  # nothing but views
    own = passes.bytes_of(values)
    read = sum(map(passes.graph.shown_bytes, ends))
    if _in_memory(passes, values):
        return heavy + prices.kernel_seconds(read + own)
    return heavy + prices.kernel_seconds(max(read - own, 0), launches=0)


def _in_memory(passes: Passes, values: frozenset[int]) -> bool:
    """Does an operator of the backward pass that is a kernel of its own read one of them, or the
    pass return one?"""
    operations = passes.graph.operations
    seen, waiting = set(values), list(values)
    while waiting:
        i = waiting.pop()
        for reader in passes.readers[i]:
            if reader not in passes.backward:
                continue
            if operations[reader].kind in HEAVY:
                return True
            if operations[reader].kind == "view" and reader not in seen:
                seen.add(reader)
                waiting.append(reader)
    return bool(seen & set(passes.graph.outputs[passes.forward_outputs :]))
