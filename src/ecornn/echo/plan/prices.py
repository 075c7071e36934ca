"""How long the two passes take: operators one by one, or fused as inductor fuses them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ecornn.echo.graph import Operation
from ecornn.echo.passes import Passes
from ecornn.echo.schedule import Program, backward_program, forward_program, saved

#: Kinds that are kernels of their own.
HEAVY = ("product", "random", "opaque")
LIGHT = ("cheap", "view")


@dataclass(frozen=True)
class Prices:
    """`seconds`: of each operation run by itself, which also orders what is worth most."""

    seconds: tuple[float, ...]
    of: Callable[[Program], float]
    step_seconds: float  # both passes, when all is kept
    fuses: bool = False  # what runs is fused, and holds less than operators one by one
    bandwidth: float = float("inf")  # of the device, where it fuses
    launch: float = 0.0
    draws: Mapping[int, float] = field(default_factory=dict)  # seconds of drawing, by operation
    told: str = ""  # where the seconds come from, if some were measured

    def kernel_seconds(self, moved: int, launches: int = 1) -> float:
        """Of light kernels that read and write so many bytes."""
        return moved / self.bandwidth + launches * self.launch


def within_a_kernel(operation: Operation) -> bool:
    """Is never run again, and yet no kernel of its own: a batch norm's statistics are moved, and
    copied into their buffers, by the kernel that makes them. ResNet-50 has 318 such operations."""
    target = None if operation.work.call is None else operation.work.call.target
    tags = getattr(target, "tags", ())
    return operation.kind == "opaque" and (
        torch.Tag.pointwise in tags or target is torch.ops.aten.copy_.default
    )


#: Made of a seed by arithmetic alone, within the kernels that read it.
DRAWN = "prims.inductor_random"
#: What one such number takes, as operations on float32: a second dropout of 64 Mi numbers in the
#: same kernel took 185 µs more on an H200, of 67 TFLOP/s.
DRAWING = 185
_DRAWN_BYTES = 4  # of each


def draws_of(passes: Passes, vector_rate: float) -> dict[int, float]:
    """Seconds that each draw takes in a kernel, by operation."""
    return {
        i: passes.graph.shown_bytes(i) / _DRAWN_BYTES * DRAWING / vector_rate
        for i, operation in enumerate(passes.graph.operations)
        if operation.target.startswith(DRAWN)
    }


def read_by_heavy(passes: Passes) -> frozenset[int]:
    """Operations whose results a kernel of its own reads in the backward pass: made again, they
    take one as well."""
    operations = passes.graph.operations
    found: set[int] = set()
    waiting = [
        u for i in passes.backward if operations[i].kind in HEAVY for u in operations[i].uses
    ]
    while waiting:
        i = waiting.pop()
        if i not in found:
            found.add(i)
            waiting += operations[i].uses if operations[i].kind == "view" else ()
    return frozenset(found)


def one_by_one(seconds: Sequence[float]) -> Prices:
    def of(program: Program) -> float:
        return sum(seconds[step.operation] for step in program.steps[program.given :])

    return Prices(tuple(seconds), of, sum(seconds))


def fused(
    passes: Passes,
    seconds: Sequence[float],
    bandwidth: float,
    launch: float,
    draws: Mapping[int, float] | None = None,
) -> Prices:
    """Products cost what they cost; of everything else, a kernel costs its launch and what it reads
    and writes, and what stays within it costs nothing, unless that is drawn again."""
    drawn = {} if draws is None else draws

    def of(program: Program) -> float:
        kernels = _Kernels(passes, program)
        heavy = sum(
            seconds[step.operation]
            for step in program.steps[program.given :]
            if passes.graph.operations[step.operation].kind in HEAVY
        )
        again = sum(drawn.get(i, 0.0) for i in kernels.drawn_again())
        return heavy + kernels.bytes_moved() / bandwidth + kernels.count() * launch + again

    between = saved(passes, passes.needed)
    before = of(forward_program(passes, between)) + of(backward_program(passes, between))
    return Prices(tuple(seconds), of, before, True, bandwidth, launch, drawn)


class _Kernels:
    """Light operators that read each other's results are one kernel, unless a heavy one stands
    between them. What follows from given values by light operators alone, as everything that is
    run again does, is made in every kernel that reads it."""

    def __init__(self, passes: Passes, program: Program) -> None:
        self._graph, self._steps, self._given = passes.graph, program.steps, program.given
        self._kinds = [
            "input" if place < program.given else passes.graph.operations[step.operation].kind
            for place, step in enumerate(program.steps)
        ]
        self._stored = self._in_memory(program)
        self._leader = list(range(len(program.steps)))
        self._reads: dict[int, set[int]] = {}
        self._draws: dict[int, set[int]] = {}  # by light value: draws that are made along with it
        self._divide()

    def _in_memory(self, program: Program) -> list[bool]:
        """Inputs, results, and what heavy operators read or make."""
        found = [kind not in (*LIGHT, "number") for kind in self._kinds]
        for place in program.outputs:
            if place is not None:
                found[place] = True
        for place in range(len(self._steps) - 1, self._given - 1, -1):
            through = self._kinds[place] == "view" and found[place]
            if self._kinds[place] in HEAVY or through:
                for source in self._steps[place].sources:
                    found[source] = True
        for place in range(self._given, len(self._steps)):
            sources = self._steps[place].sources
            if self._kinds[place] == "view" and sources and all(found[s] for s in sources):
                found[place] = True
        return found

    def _divide(self) -> None:
        level = [0] * len(self._steps)
        free: dict[int, set[int]] = {}  # by light value that follows from given ones: these
        for place in range(self._given, len(self._steps)):
            sources = self._steps[place].sources
            level[place] = max((level[s] + (self._kinds[s] in HEAVY) for s in sources), default=0)
            if self._kinds[place] not in LIGHT:
                continue
            reads: set[int] = set()
            draws: set[int] = set()
            for source in sources:
                if source in free and not self._stored[source]:
                    reads |= free[source]
                    draws |= self._draws[source]
                elif self._kinds[source] in LIGHT and level[source] == level[place]:
                    self._leader[self._top(source)] = self._top(place)
                elif self._stored[source]:
                    reads.add(source)
            if level[place] == 0 and all(s < self._given or s in free for s in sources):
                free[place] = reads
                if self._graph.operations[self._steps[place].operation].target.startswith(DRAWN):
                    draws.add(place)
            self._reads[place], self._draws[place] = reads, draws

    def _top(self, place: int) -> int:
        while self._leader[place] != place:
            self._leader[place] = self._leader[self._leader[place]]
            place = self._leader[place]
        return place

    def _made(self) -> list[int]:
        """Light values that some kernel writes."""
        return [
            place
            for place in range(self._given, len(self._steps))
            if self._kinds[place] == "cheap" and self._stored[place]
        ]

    def bytes_moved(self) -> int:
        kernels: dict[int, set[int]] = {}
        for place in self._made():
            kernels.setdefault(self._top(place), set()).add(place)
        for place, reads in self._reads.items():
            if (top := self._top(place)) in kernels:
                kernels[top] |= reads
        return sum(self._bytes(place) for values in kernels.values() for place in values)

    def drawn_again(self) -> list[int]:
        """Operations that draw, in every kernel in which they do so of a seed that is given: in the
        forward pass seeds are not, and each draws once."""
        kernels: dict[int, set[int]] = {self._top(place): set() for place in self._made()}
        for place, draws in self._draws.items():
            if (top := self._top(place)) in kernels:
                kernels[top] |= draws
        return [self._steps[place].operation for draws in kernels.values() for place in draws]

    def count(self) -> int:
        return len({self._top(place) for place in self._made()})

    def _bytes(self, place: int) -> int:
        return self._graph.shown_bytes(self._steps[place].operation)
