"""The peak as a function of the batch size, from reports at a few sizes.

Each storage's bytes are a line in the batch size, and so is their sum at each operator; the peak is
the highest of these lines. Where it changes its place, the operator at the peak changes, and the
lines know that, which a line through the peaks does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ecornn.profiler.alignment import Key, aligned, key_of
from ecornn.profiler.allocator import BLOCK
from ecornn.profiler.blocks import Steps, Story
from ecornn.profiler.model import COUNTED, Held, MemoryReport, Timeline

#: Blocks take a little more than the peak: by how much a batch is first tried to be smaller.
NEAR = 0.03
#: Of the bytes at the peak: those that may have no counterpart in a smaller batch's.
UNKNOWN = 0.02
BEFORE = "before"
#: Does not grow with the batch as tensors do: taken as at the largest size.
_CONSTANT = ("rounding", "other")
GROWING = tuple(kind for kind in COUNTED if kind not in _CONSTANT)


@dataclass(frozen=True)
class Run:
    batch: int
    peak_bytes: int
    #: At each time, without what is taken as constant; and that.
    totals: NDArray[np.float64]
    constant: int
    operators: tuple[str, ...]
    #: For the allocator's blocks: storages' bytes, and memory without a tensor at each time.
    story: Story
    sizes: NDArray[np.float64]
    beside: NDArray[np.float64]
    #: By which a storage is that of another run.
    keys: tuple[Key, ...]
    #: Whether every allocation is a storage: then nothing is beside them.
    exact: bool


def run_of(batch: int, report: MemoryReport) -> Run:
    columns = report.timeline.bytes
    nothing = np.zeros(len(report.timeline))
    growing = [np.asarray(columns[kind], float) for kind in GROWING if kind in columns]
    constant = sum(columns[kind][report.peak_time] for kind in _CONSTANT if kind in columns)
    held = report.held
    story = Story(
        tuple(one.born for one in held),
        tuple(one.freed for one in held),
        tuple(one.kind for one in held),
        tuple(one.why for one in held),
    )
    return Run(
        batch,
        report.peak_bytes,
        sum(growing, nothing),
        constant,
        report.timeline.operator,
        story,
        np.asarray([one.bytes for one in held], float),
        np.asarray(columns.get("no tensor", nothing), float),
        tuple(_key(one, report.timeline) for one in held),
        report.unit == "allocation",
    )


def _key(one: Held, timeline: Timeline) -> Key:
    if not one.born:
        return BEFORE, one.kind, one.why
    at = (timeline.operator[one.born], timeline.module[one.born], timeline.phase[one.born])
    return key_of(at, one.born, one.freed)


@dataclass(frozen=True)
class Curve:
    """Lines through the two largest runs."""

    runs: tuple[Run, ...]

    @property
    def same_operators(self) -> bool:
        """Whether the lines are those of the operators, or one through the peaks alone."""
        return len({run.operators for run in self.runs[-2:]}) == 1

    @cached_property
    def _places(self) -> NDArray[np.int64]:
        """For each storage of the largest run, its place in the one below; -1 if it has none. What
        was there before for other reasons has none, and does not grow."""
        places = aligned(self.runs[-2].keys, self.runs[-1].keys)
        places[self._others] = -1
        return places

    @property
    def _others(self) -> NDArray[np.bool_]:
        return np.asarray([key[:2] == (BEFORE, "other") for key in self.runs[-1].keys], bool)

    @cached_property
    def unknown_share(self) -> float:
        """Of the bytes at the largest run's peak: of storages that only it has."""
        above = self.runs[-1]
        peak = int(np.argmax(above.totals))
        alive = [
            born <= peak and (freed is None or peak < freed)
            for born, freed in zip(above.story.born, above.story.freed, strict=True)
        ]
        sizes = np.where(alive, above.sizes, 0)
        without = (self._places < 0) & ~self._others
        return float(sizes[without].sum() / max(1.0, sizes.sum()))

    def _sizes(self, batch: int) -> NDArray[np.float64]:
        """Of each storage; what only the largest run has is taken as it is there."""
        below, above = self.runs[-2:]
        share = (batch - below.batch) / (above.batch - below.batch)
        smaller = np.where(self._places < 0, above.sizes, below.sizes[self._places])
        found: NDArray[np.float64] = smaller + share * (above.sizes - smaller)
        return found

    def _most(self, batch: int) -> int:
        """Of all that grows and is alive at a time, in the allocator's blocks."""
        above = self.runs[-1]
        length = len(above.totals)
        changes = np.zeros(length + 1)
        ends = [length if end is None else min(end, length) for end in above.story.freed]
        sizes = np.ceil(self._sizes(batch) / BLOCK) * BLOCK
        sizes[self._others] = 0
        np.add.at(changes, np.asarray(above.story.born, int), sizes)
        np.subtract.at(changes, np.asarray(ends, int), sizes)
        return int(np.cumsum(changes).max())

    def __call__(self, batch: int) -> int:
        """The predicted peak, in bytes; what was observed, where it was."""
        for run in self.runs:
            if run.batch == batch:
                return run.peak_bytes
        below, above = self.runs[-2:]
        share = (batch - below.batch) / (above.batch - below.batch)
        if above.exact and self.same_storages:
            # the rest: blocks that are not split, and what does not grow
            rest = above.peak_bytes - self._most(above.batch)
            return self._most(batch) + rest
        if not self.same_operators:
            return round(below.peak_bytes + share * (above.peak_bytes - below.peak_bytes))
        at_batch = below.totals + share * (above.totals - below.totals)
        return round(float(at_batch.max())) + above.constant

    @property
    def same_storages(self) -> bool:
        """Whether those of the two largest runs are the same but for their sizes, and perhaps some
        scratch. When each is given up may differ: Python collects some as it likes."""
        if all(run.exact for run in self.runs[-2:]):
            return self.unknown_share <= UNKNOWN
        below, above = (run.story for run in self.runs[-2:])
        alike = below.born == above.born and below.kinds == above.kinds
        return self.same_operators and alike

    def runs_within(self, memory: int, batch: int) -> bool:
        """Whether the caching allocator of CUDA, limited to `memory`, finds its blocks."""
        below, above = self.runs[-2:]
        share = (batch - below.batch) / (above.batch - below.batch)
        beside = above.beside
        if len(below.beside) == len(above.beside):
            beside = below.beside + share * (above.beside - below.beside)
        library = max(0, round(float(beside[0])))
        scratch = {
            time: round(float(count)) - library
            for time, count in enumerate(beside)
            if count - library >= BLOCK
        }
        found = [max(1, round(float(size))) for size in self._sizes(batch)]
        return Steps(above.story).run_within(memory, found, scratch, library)

    def largest_within(self, memory: int, most: int) -> int | None:
        """The largest batch of at most `most` whose predicted peak fits; None if not even one."""
        if self(1) > memory:
            return None
        fits, fails = 1, most + 1
        while fails - fits > 1:
            middle = (fits + fails) // 2
            if self(middle) <= memory:
                fits = middle
            else:
                fails = middle
        return fits


def largest_running(runs: Callable[[int], bool], most: int) -> int | None:
    """The largest batch of at most `most` that finds its blocks; None if not even one."""
    fits, fails = 0, most + 1
    guess = most
    while fails - fits > 1:
        fits, fails = (guess, fails) if runs(guess) else (fits, guess)
        # mostly near
        near = fails - max(1, round(NEAR * fails))
        guess = near if not fits and near > 0 else (fits + fails) // 2
    return fits or None


def curve_of(runs: Sequence[Run]) -> Curve:
    return Curve(tuple(sorted(runs, key=lambda run: run.batch)))
