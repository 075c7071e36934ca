"""What an allocator counts, from its history.

Each allocation takes its bytes in blocks of 512. Blocks too small to be split are larger than that;
by how much is known when the history begins, and at the peak, which the allocator itself counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ecornn.profiler.history import History
from ecornn.profiler.model import Row
from ecornn.profiler.observation import Beside, Bytes, driver_notes

#: Of the peak: what the events and the allocator's own count may differ by without a word.
APART = 0.01


class HistoryCounts:
    def __init__(
        self, history: History, reserved: Callable[[int], int], driver: int | None
    ) -> None:
        """`reserved`: at a time."""
        self._history, self._reserved, self._driver = history, reserved, driver

    def beside(self, tensors: Bytes, padding: Bytes, modules: Sequence[str]) -> Beside:
        blocks = tensors + padding
        time = int(np.argmax(blocks))
        peak = self._history.peak
        rounding = padding + np.minimum(self._unsplit_before(blocks), peak - blocks)
        rounding[time] = peak - tensors[time]
        rows = [
            Row("", "rounding", int(rounding[time]), 0),
            Row("", "reserved, unused", max(0, self._reserved(time) - peak), 0),
            Row("", "driver", self._driver or 0, 0),
        ]
        told = [row for row in rows if row.bytes]
        counted = int(blocks[time]) + self._unsplit_before(blocks)
        return Beside(time, {"rounding": rounding}, told, tuple(self._notes(counted)))

    def _unsplit_before(self, blocks: Bytes) -> int:
        return self._history.allocated_before - int(blocks[0])

    def _notes(self, counted: int) -> Iterator[str]:
        peak = self._history.peak
        yield from driver_notes(self._driver)
        if self._history.cut_off:
            yield (
                "the allocator did more than is kept of its history: what happened first is"
                " missing, and the rows are wrong; profile a shorter part"
            )
        if abs(counted - peak) > APART * peak:
            yield (
                f"the allocator's history adds up to {counted:,} bytes at most, its own count to"
                f" {peak:,}: the difference stands under rounding"
            )
