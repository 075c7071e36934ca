"""How much memory a graph holds at each of its operations, and where the peak is.

The graph runs in order; a result is given up after its last use, its memory when nothing that is
still held refers to it. Scratch memory inside an operator is not known and not counted.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ecornn.echo.graph import Graph


@dataclass(frozen=True)
class Timeline:
    """`bytes_at[i]`: held while operation i has run and has not given anything up."""

    bytes_at: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        return max(self.bytes_at, default=0)

    @property
    def peak_at(self) -> int:
        """The first operation at the peak."""
        return self.bytes_at.index(self.peak_bytes)


def last_uses(graph: Graph, held: Collection[int]) -> dict[int, list[int]]:
    """Operations whose results are given up after each operation; outputs never are."""
    last = {i: i for i in range(len(graph.operations))}
    for i, operation in enumerate(graph.operations):
        for used in operation.uses:
            last[used] = i
    kept: set[int | None] = {*graph.outputs, *graph.constants, *held}
    found: dict[int, list[int]] = {}
    for operation_, user in last.items():
        if operation_ not in kept:
            found.setdefault(user, []).append(operation_)
    return found


def simulate(graph: Graph, held: Collection[int]) -> Timeline:
    """`held`: inputs that whoever runs the graph keeps, as weights and a forward pass's arguments
    are; the others are given up after their last use, as what was kept between the passes is."""
    ends = last_uses(graph, held)
    references = [0] * len(graph.storages)
    total, bytes_at = 0, []
    # all inputs and constants are there before the first operation runs
    for i in (*graph.inputs, *graph.constants):
        total += _take(graph, i, references)
    for i, operation in enumerate(graph.operations):
        if operation.kind not in ("input", "constant"):
            total += _take(graph, i, references)
        bytes_at.append(total)
        for ended in ends.get(i, ()):
            for storage in graph.operations[ended].holds:
                references[storage] -= 1
                if references[storage] == 0:
                    total -= graph.storages[storage]
    return Timeline(tuple(bytes_at))


def _take(graph: Graph, operation: int, references: list[int]) -> int:
    """Hold an operation's result; how many bytes that adds."""
    added = 0
    for storage in graph.operations[operation].holds:
        if references[storage] == 0:
            added += graph.storages[storage]
        references[storage] += 1
    return added
