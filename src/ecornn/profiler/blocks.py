"""torch's native caching allocator for CUDA, without memory: whether a step finds its blocks.

Memory that is free is not always of use: a block is free beside one that is not, and what comes
next is larger. This follows the allocator's own rules with its default settings: sizes in multiples
of 512 bytes; two pools, of segments of 2 MiB for up to 1 MiB, and for more of 20 MiB or, from
10 MiB on, as large as asked for in multiples of 2 MiB; the smallest free block that is large
enough, split if enough is left; neighbours joined when they are free; and before it gives up, every
segment handed back that is free as a whole.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from ecornn.profiler.allocator import BLOCK, rounded

MIB = 1 << 20
#: Up to here from the small pool; in the large one a block is split if more than this is left.
SMALL = MIB
#: So many steps: optimizers make their state in the first, and its blocks lie where that left room.
STEPS = 3


class OutOfBlocks(Exception):
    """There is none of the size within the limit."""


class Blocks:
    def __init__(self, limit: int) -> None:
        self.limit, self.reserved = limit, 0
        self._top = 0  # of all addresses
        self._segments: dict[int, tuple[int, bool]] = {}
        #: Free blocks by (size, address): small and large.
        self._pools: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._size_at: dict[int, int] = {}
        self._starts: dict[int, int] = {}  # by end
        self._taken: dict[int, tuple[int, bool]] = {}

    def take(self, count: int) -> int:
        """The address of a block; raises `OutOfBlocks`."""
        size = rounded(max(count, 1))
        small = size <= SMALL
        pool = self._pools[small]
        place = bisect_left(pool, (size, 0))
        if place < len(pool):
            found, address = pool.pop(place)
            self._forget(address, found)
        else:
            found = _segment(size)
            address = self._reserve(found, small=small)
        left = found - size
        if left >= BLOCK if small else left > SMALL:
            self._put(address + size, left, small=small)
            found = size
        self._taken[address] = (found, small)
        return address

    def give(self, address: int) -> None:
        size, small = self._taken.pop(address)
        before = self._starts.get(address)
        if before is not None:
            size += self._out(before, small=small)
            address = before
        if address + size in self._size_at:
            size += self._out(address + size, small=small)
        self._put(address, size, small=small)

    def _reserve(self, size: int, *, small: bool) -> int:
        if self.reserved + size > self.limit:
            self._hand_back()
        if self.reserved + size > self.limit:
            raise OutOfBlocks
        address = self._top
        self._top += size + BLOCK  # segments are no neighbours
        self.reserved += size
        self._segments[address] = (size, small)
        return address

    def _hand_back(self) -> None:
        for address, (size, small) in list(self._segments.items()):
            if self._size_at.get(address) == size:
                self._out(address, small=small)
                del self._segments[address]
                self.reserved -= size

    def _put(self, address: int, size: int, *, small: bool) -> None:
        insort(self._pools[small], (size, address))
        self._size_at[address] = size
        self._starts[address + size] = address

    def _out(self, address: int, *, small: bool) -> int:
        size = self._size_at[address]
        pool = self._pools[small]
        pool.pop(bisect_left(pool, (size, address)))
        self._forget(address, size)
        return size

    def _forget(self, address: int, size: int) -> None:
        del self._size_at[address], self._starts[address + size]


def _segment(size: int) -> int:
    if size <= SMALL:
        return 2 * MIB
    return 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB


@dataclass(frozen=True)
class Story:
    """When each storage of a step comes and goes, and what it is, without sizes."""

    born: tuple[int, ...]
    freed: tuple[int | None, ...]
    kinds: tuple[str, ...]
    #: By which a gradient of one step is that of the next.
    names: tuple[str, ...]


class Steps:
    """Whether steps with storages of some sizes run within a limit."""

    def __init__(self, story: Story) -> None:
        self._story = story
        self._given = [i for i, born in enumerate(story.born) if born == 0 and not self._later(i)]
        self._made_first = [i for i, born in enumerate(story.born) if born == 0 and self._later(i)]
        comes = [(born, 1, i) for i, born in enumerate(story.born) if born]
        goes = [(freed, 0, i) for i, freed in enumerate(story.freed) if freed is not None]
        self._events = sorted([*comes, *goes])

    def _later(self, i: int) -> bool:
        """There before the observed step, but not before the first one."""
        return self._story.kinds[i] in ("optimizer state", "gradients")

    def run_within(
        self, limit: int, sizes: Sequence[int], scratch: Mapping[int, int], library: int
    ) -> bool:
        """`scratch`: bytes beside tensors at some times of the step; `library`: at all times."""
        blocks = Blocks(limit)
        try:
            if library:
                blocks.take(library)
            at = {i: blocks.take(sizes[i]) for i in self._given}
            carried: dict[str, int] = {}
            for number in range(STEPS):
                carried = self._step(blocks, at, carried, sizes, scratch)
                if number == 0:
                    lasting = [i for i in self._made_first if self._story.freed[i] is None]
                    at |= {i: blocks.take(sizes[i]) for i in lasting if i not in at}
        except OutOfBlocks:
            return False
        return True

    def _step(
        self,
        blocks: Blocks,
        at: dict[int, int],
        carried: dict[str, int],
        sizes: Sequence[int],
        scratch: Mapping[int, int],
    ) -> dict[str, int]:
        """The gradients that it leaves, by name."""
        made: dict[int, int] = {}
        story = self._story
        for time, events in groupby(self._events, key=lambda event: event[0]):
            for _, comes, i in events:
                if comes:
                    made[i] = blocks.take(sizes[i])
                    continue
                # what was there before goes in every step but the first, unless it was given
                address = made.pop(i, None)
                if address is None and story.born[i] == 0:
                    address = (
                        carried.pop(story.names[i], None) if self._later(i) else at.pop(i, None)
                    )
                if address is not None:
                    blocks.give(address)
            if time in scratch:
                blocks.give(blocks.take(scratch[time]))
        left = {}
        for i, address in made.items():
            if story.kinds[i] == "gradients":
                left[story.names[i]] = address
            else:  # the program gives it up with the next step
                blocks.give(address)
        for address in carried.values():
            blocks.give(address)
        return left
