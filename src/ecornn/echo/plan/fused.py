"""What a program holds when inductor fuses it, before inductor has seen it.

Elementwise results live in registers: each kernel that reads one computes it anew from memory.
In memory are what products, draws by other means and unknown operators read and make, results of
reductions, what leaves the program, and what would take a kernel too many reads to compute anew.
The order is the program's; inductor may choose another one.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache

from ecornn.echo.passes import Passes
from ecornn.echo.schedule import Program

#: Operators whose results are in memory although they are cheap, by the name of their packet.
REDUCTIONS = frozenset(
    {
        *("sum", "mean", "amax", "amin", "max", "min", "prod", "any", "all", "argmax", "argmin"),
        *("var", "var_mean", "std", "std_mean", "logsumexp", "norm", "cumsum", "cumprod"),
    }
)
IN_MEMORY = REDUCTIONS | {
    *("cat", "index_put", "_unsafe_index_put", "scatter", "scatter_add", "scatter_reduce"),
    *("slice_scatter", "select_scatter", "sort", "topk", "embedding_dense_backward"),
}
#: Inductor's own limits: a result of several readers that takes more reads than the first is put
#: into memory, and any that takes more than the second; on the CPU also one of several readers that
#: is made by slow functions.
READS_IF_SHARED, READS, READS_ON_CPU = 4, 8, 12
SLOW_ON_CPU = frozenset({"exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh"})


def fused_peak(passes: Passes, program: Program, held: Collection[int]) -> int:
    """`held`: given steps that whoever runs the program keeps."""
    return _Kernels(passes, program).peak(held)


class _Kernels:
    def __init__(self, passes: Passes, program: Program) -> None:
        self._operations, self._sizes = passes.graph.operations, passes.graph.storages
        self._program, self._steps, self._given = program, program.steps, program.given
        self._light = [
            place >= program.given and self._is_light(step.operation)
            for place, step in enumerate(program.steps)
        ]
        self._stored = self._in_memory()
        self._reads: list[frozenset[int]] = []  # by step: steps in memory that it is made of
        self._follow()

    def _is_light(self, i: int) -> bool:
        """Drawn by inductor's own generator, a random number is computed where it is read."""
        operation = self._operations[i]
        drawn = operation.kind == "random" and "inductor_random" in operation.target
        return drawn or operation.kind in ("cheap", "view", "number")

    def _is_view(self, place: int) -> bool:
        return self._operations[self._steps[place].operation].kind == "view"

    def _in_memory(self) -> list[bool]:
        found = [not light for light in self._light]
        for place in range(self._given, len(self._steps)):
            operation = self._operations[self._steps[place].operation]
            if operation.kind == "cheap":
                found[place] = operation.several or _packet(operation.target) in IN_MEMORY
        for leaving in self._program.outputs:
            if leaving is not None:
                found[leaving] = True
        for place in range(len(self._steps) - 1, self._given - 1, -1):
            if not self._light[place] or (self._is_view(place) and found[place]):
                for source in self._steps[place].sources:
                    found[source] = True
        return found

    def _follow(self) -> None:
        readers = [0] * len(self._steps)
        for step in self._steps:
            for source in step.sources:
                readers[source] += 1
        level = [0] * len(self._steps)  # heavy operators on the way
        slow = [False] * len(self._steps)
        chosen: list[int] = []
        for place, step in enumerate(self._steps):
            reads: set[int] = set()
            for source in step.sources if place >= self._given else ():
                reads |= {source} if self._stored[source] else self._reads[source]
                level[place] = max(level[place], level[source] + (not self._light[source]))
                slow[place] |= slow[source] and not self._stored[source]
            self._reads.append(frozenset(reads))
            if self._stored[place] or not self._light[place] or self._is_view(place):
                continue
            operation = self._operations[step.operation]
            on_cpu = operation.work.device is not None and operation.work.device.type == "cpu"
            slow[place] |= on_cpu and _packet(operation.target) in SLOW_ON_CPU
            limit = READS_ON_CPU if on_cpu else READS
            shared = readers[place] > 1 and (slow[place] or len(reads) > READS_IF_SHARED)
            if shared or len(reads) > limit:
                self._stored[place] = True
                chosen.append(place)
        self._fuse(chosen, level)

    def _fuse(self, chosen: list[int], level: list[int]) -> None:
        """What was put into memory for readers that are one kernel with it is not written."""
        readers: dict[int, list[int]] = {place: [] for place in chosen}
        for place, reads in enumerate(self._reads):
            if self._stored[place]:
                for read in reads:
                    if read in readers:
                        readers[read].append(place)
        for place in chosen:
            if all(level[r] == level[place] and self._light[r] for r in readers[place]):
                self._stored[place] = False
                for r in readers[place]:
                    self._reads[r] = (self._reads[r] - {place}) | self._reads[place]

    def _memory(self) -> tuple[list[tuple[int, ...]], list[int]]:
        """(by step: the memory that it refers to, if it is in memory; bytes of each)"""
        sizes: list[int] = []
        arrived: dict[int, int] = {}
        maps: list[dict[int, int]] = []
        for place, step in enumerate(self._steps):
            operation, mine = self._operations[step.operation], dict[int, int]()
            for storage in operation.holds if self._stored[place] else ():
                there = place < self._given or operation.kind == "constant"
                known = arrived.get(storage) if there else None
                for source in step.sources:
                    known = maps[source].get(storage, known)
                if known is None:
                    known = len(sizes)
                    sizes.append(self._sizes[storage])
                    if there:
                        arrived[storage] = known
                mine[storage] = known
            maps.append(mine)
        return [tuple(mine.values()) for mine in maps], sizes

    def peak(self, held: Collection[int]) -> int:
        memory, sizes = self._memory()
        last = [-1] * len(sizes)
        for place in range(len(self._steps)):
            if self._stored[place]:
                for read in (place, *self._reads[place]):
                    for m in memory[read]:
                        last[m] = place
        never = len(self._steps)
        for place in (*held, *(p for p in self._program.outputs if p is not None)):
            for m in memory[place]:
                last[m] = never
        ends: list[list[int]] = [[] for _ in range(never + 1)]
        for m, place in enumerate(last):
            ends[place].append(m)
        there = {m for place in range(self._given) for m in memory[place]}
        total = most = sum(sizes[m] for m in there)
        for place in range(self._given, never):
            if not self._stored[place]:
                continue
            ending = [m for m in ends[place] if m in there]
            for m in memory[place]:
                if m not in there:
                    total += sizes[m]
                    there.add(m)
                    if self._light[place]:
                        total -= self._taken_over(ending, sizes, sizes[m])
            most = max(most, total)
            total -= sum(sizes[m] for m in ending)
            total -= sum(sizes[m] for m in memory[place] if last[m] == place and m not in ending)
        return most

    @staticmethod
    def _taken_over(ending: list[int], sizes: list[int], count: int) -> int:
        """A kernel writes over what it reads last, if that is as large."""
        for m in ending:
            if sizes[m] == count:
                ending.remove(m)
                return count
        return 0


@cache
def _packet(target: str) -> str:
    """ "aten.sum.dim_IntList" is "sum"."""
    return target.split(".")[1] if target.count(".") > 1 else target
