"""The two passes of a joint graph: what runs forwards, what backwards, and what goes between."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ecornn.echo.graph import Graph


@dataclass(frozen=True)
class Passes:
    """A joint graph whose first `forward_outputs` outputs are the forward pass's; inputs named
    `tangents…` are the gradients that arrive. `anywhere`: operations that are made wherever they
    are read, and are kept for nobody."""

    graph: Graph
    forward_outputs: int
    anywhere: frozenset[int] = frozenset()

    @cached_property
    def backward(self) -> frozenset[int]:
        """Operations that depend on an arriving gradient."""
        found: set[int] = set()
        for i, operation in enumerate(self.graph.operations):
            arrives = operation.kind == "input" and operation.name.startswith("tangents")
            if arrives or any(used in found for used in operation.uses):
                found.add(i)
        return frozenset(found)

    @cached_property
    def needed(self) -> frozenset[int]:
        """Results of the forward pass that the backward pass uses or returns; in the place of what
        is made wherever it is read, those of which that is made."""
        operations = self.graph.operations
        waiting = [used for i in self.backward for used in operations[i].uses]
        waiting += [i for i in self.graph.outputs[self.forward_outputs :] if i is not None]
        found: set[int] = set()
        while waiting:
            i = waiting.pop()
            if i in self.anywhere:
                waiting += operations[i].uses
            elif i not in self.backward:
                found.add(i)
        return frozenset(found)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """By operation: those that use its result."""
        found: list[list[int]] = [[] for _ in self.graph.operations]
        for i, operation in enumerate(self.graph.operations):
            for used in operation.uses:
                found[used].append(i)
        return tuple(map(tuple, found))

    @cached_property
    def held_anyway(self) -> frozenset[int]:
        """Storages that are there between the passes whatever is kept: inputs and results."""
        results = self.graph.outputs[: self.forward_outputs]
        whose = {*self.graph.inputs, *self.graph.constants}
        whose |= {i for i in results if i is not None}
        return frozenset(s for i in whose for s in self.graph.operations[i].holds)

    def bytes_of(self, kept: frozenset[int]) -> int:
        """What keeping these results costs, each storage counted once."""
        storages = {s for i in kept for s in self.graph.operations[i].holds} - self.held_anyway
        return sum(self.graph.storages[s] for s in storages)
