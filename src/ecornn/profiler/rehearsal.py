"""Whether a batch runs, from all that smaller ones allocate: the model's making and some steps.

What stays from the first step, such as an optimizer's state, lies where that step has left room,
and in the way of the next. So everything is recorded from the making of the model on, and played
through in its order on an allocator without memory, with the sizes of the batch in question.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from ecornn.profiler.alignment import Key, aligned, key_of
from ecornn.profiler.blocks import STEPS, Blocks, OutOfBlocks
from ecornn.profiler.history import Recording
from ecornn.profiler.light import LightCollector
from ecornn.profiler.session import run_to_end
from ecornn.profiler.steps import Made

BEFORE: Key = ("", "", "before")
#: Of the bytes allocated: those that may have no counterpart in a smaller batch's.
UNKNOWN = 0.02


@dataclass(frozen=True)
class Rehearsal:
    """Everything that was allocated for one batch, in order; what was there before, at time 0."""

    batch: int
    born: tuple[int, ...]
    freed: tuple[int | None, ...]
    sizes: NDArray[np.float64]
    keys: tuple[Key, ...]

    @cached_property
    def events(self) -> list[tuple[int, bool, int]]:
        """Time, whether something comes (after what goes), and what."""
        comes = [(born, True, i) for i, born in enumerate(self.born)]
        goes = [(freed, False, i) for i, freed in enumerate(self.freed) if freed is not None]
        return sorted([*comes, *goes])


def rehearse(
    batch: int, make: Callable[[], Made], recorder: Recording, device: torch.device
) -> Rehearsal:
    """Some steps of a batch, recorded from its making on."""
    gc.collect()
    recorder.start()
    try:
        made = make()
        collector = LightCollector(made.model, made.optimizers, device, recorder)
        try:
            collector.start()
            for _ in range(STEPS):
                run_to_end(made.step)
            collector.stop(failed=False)
        finally:
            collector.close()
        seen = collector.taken().observation()
    finally:
        recorder.close()
    records = seen.records
    return Rehearsal(
        batch,
        tuple(record.born for record in records),
        tuple(record.freed for record in records),
        np.asarray([record.bytes for record in records], float),
        tuple(
            key_of(seen.times[one.born - 1], one.born, one.freed) if one.born else BEFORE
            for one in records
        ),
    )


@dataclass(frozen=True)
class Rehearsed:
    """Lines through two batches, allocation by allocation."""

    below: Rehearsal
    above: Rehearsal

    @cached_property
    def _places(self) -> NDArray[np.int64]:
        """For each allocation of the larger batch its place in the smaller; -1 if it has none. What
        was there before has none: it is not theirs."""
        places = aligned(self.below.keys, self.above.keys)
        places[np.asarray(self.above.born) == 0] = -1
        return places

    @property
    def unknown_share(self) -> float:
        """Of the bytes that the larger batch allocates: those that only it does."""
        made = np.asarray(self.above.born) > 0
        sizes = self.above.sizes
        return float(sizes[made & (self._places < 0)].sum() / max(1.0, sizes[made].sum()))

    @property
    def are_alike(self) -> bool:
        return self.unknown_share <= UNKNOWN

    def sizes(self, batch: int) -> Sequence[int]:
        """What only the larger batch allocates is taken as it is there."""
        share = (batch - self.below.batch) / (self.above.batch - self.below.batch)
        larger = self.above.sizes
        smaller = np.where(self._places < 0, larger, self.below.sizes[self._places])
        found = np.rint(smaller + share * (larger - smaller))
        return [max(1, int(size)) for size in found]

    def runs_within(self, memory: int, batch: int) -> bool:
        """Whether the caching allocator of CUDA, limited to `memory`, finds its blocks."""
        blocks, at, sizes = Blocks(memory), {}, self.sizes(batch)
        try:
            for _, comes, i in self.above.events:
                if comes:
                    at[i] = blocks.take(sizes[i])
                else:
                    blocks.give(at.pop(i))
        except OutOfBlocks:
            return False
        return True
