"""What CUDA's caching allocator itself counts.

A reading takes longer than many an operator, so not every operator has one. Its peak is reset at
each reading, and so none is missed: what a reading says of the time since the one before is all
that was reached in it. An operator that took memory beside its results, or may have done so, is
read for itself from then on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from ecornn.profiler.model import Row
from ecornn.profiler.observation import Beside, Bytes, driver_notes
from ecornn.profiler.storages import Record

#: Sizes are rounded up to it.
BLOCK = 512
#: Operators between two readings, at most, where nothing else is said.
EVERY = 64
#: A block may be so much larger than what lies in it without being split.
UNSPLIT = 1 << 20


#: Allocators that have statistics.
BACKENDS = ("native", "cudaMallocAsync")


@dataclass(frozen=True)
class Reading:
    #: When its peak was reached, as far as can be told; and when it was taken.
    time: int
    taken: int
    #: At most, since the reading before.
    peak: int
    current: int
    #: Of `current`, beyond what was asked for: rounding, and blocks too small to be split.
    rounding: int
    reserved: int


@dataclass(frozen=True)
class Told:
    """What the allocator says; `peak` since it was asked before."""

    peak: int
    current: int
    asked_for: int
    reserved: int


def missing(device: torch.device) -> str | None:
    """Why the allocator of a device does not tell, if it does not."""
    name = torch.cuda.memory.get_allocator_backend()
    told = torch.cuda.memory_stats_as_nested_dict(device) if name in BACKENDS else {}
    if all(key in told for key in ("allocated_bytes", "requested_bytes", "reserved_bytes")):
        return None
    return f"the allocator {name!r} does not tell what it counts: sizes are rounded to its blocks"


class Allocator:
    def __init__(self, device: torch.device, tensors: int = 0, every: int = EVERY) -> None:
        """`tensors`: bytes of those that are known already."""
        self.device, self._every = device, every
        self.readings: list[Reading] = []
        #: Operators that are known to take nothing beside their results.
        self._quiet: set[str] = set()
        #: Since the last reading: operators, and when tensors held most.
        self._since: list[str] = []
        self._most, self._most_at = 0, 0
        #: Of the last reading: memory beyond the tensors.
        self._beyond = 0
        self.ask()  # forgets the peaks of before
        self.read(0, tensors)

    def ask(self) -> Told:
        told = torch.cuda.memory_stats_as_nested_dict(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        allocated = told["allocated_bytes"]["all"]
        return Told(
            allocated["peak"],
            allocated["current"],
            # not every allocator counts what it is asked for
            told["requested_bytes"]["all"]["current"] or allocated["current"],
            told["reserved_bytes"]["all"]["current"],
        )

    def after(self, operator: str, time: int, tensors: int) -> None:
        """An operator has run, and tensors now take so many bytes."""
        if tensors >= self._most:
            self._most, self._most_at = tensors, time
        self._since.append(operator)
        if operator not in self._quiet or len(self._since) >= self._every:
            self.read(time, tensors)

    def read(self, time: int, tensors: int) -> None:
        told = self.ask()
        beyond = told.current - tensors
        # The peak that tensors explain. Unsplit blocks go with them, and come and go.
        explained = max(self._beyond, beyond) + max(self._most, tensors)
        scratch = bool(self.readings) and told.peak > explained + UNSPLIT
        last = self._since[-1] if self._since else ""
        reached = time if scratch and last not in self._quiet else min(self._most_at, time)
        if scratch:
            self._quiet.difference_update(self._since)
        else:
            self._quiet.update(self._since)
        rounding = told.current - told.asked_for
        self.readings.append(
            Reading(reached, time, told.peak, told.current, rounding, told.reserved)
        )
        self._since.clear()
        self._most, self._most_at, self._beyond = tensors, time, beyond

    @property
    def at_peak(self) -> Reading:
        return max(self.readings, key=lambda reading: reading.peak)

    def unexplained(self, records: Iterable[Record]) -> float:
        """What was there before the step beside the tensors known, as a share of the peak."""
        first = self.readings[0]
        tensors = sum(record.bytes for record in records if record.born == 0)
        return (first.current - first.rounding - tensors) / max(1, self.at_peak.peak)

    def beside(self, tensors: Bytes, padding: Bytes, modules: Sequence[str]) -> Beside:
        columns = self._columns([int(total) for total in tensors])
        peak = self.at_peak
        time = peak.time
        # What had no tensor before the step either, such as buffers of libraries, is nobody's.
        before = max(0, min(columns["no tensor"][0], columns["no tensor"][time]))
        inside = columns["no tensor"][time] - before
        if not modules[time]:
            before, inside = before + inside, 0
        driver = self.driver_bytes()
        rows = [
            Row("", "rounding", columns["rounding"][time], 0),
            Row("", "no tensor", before, 0),
            Row(modules[time], "no tensor", inside, 0),
            Row("", "reserved, unused", max(0, peak.reserved - peak.peak), 0),
            Row("", "driver", driver or 0, 0),
        ]
        told = {kind: np.asarray(column, np.int64) for kind, column in columns.items()}
        return Beside(time, told, [row for row in rows if row.bytes], driver_notes(driver))

    def _columns(self, totals: Sequence[int]) -> dict[str, list[int]]:
        """Rounding and memory without a tensor. Between two readings both are as at the earlier
        one, but for the peak of the time between, which is where it was reached, and nowhere
        exceeded."""
        first = self.readings[0]
        rounding = [first.rounding] * len(totals)
        rest = [first.current - totals[0] - first.rounding] * len(totals)
        for before, now in pairwise(self.readings):
            persisting = before.current - totals[before.taken] - before.rounding
            for time in range(before.taken + 1, now.taken):
                rounding[time] = before.rounding
                rest[time] = min(persisting, now.peak - totals[time] - before.rounding)
            if now.taken > before.taken:
                rounding[now.taken] = now.rounding
                rest[now.taken] = now.current - totals[now.taken] - now.rounding
            if now.peak > before.current:
                reached = now.peak - totals[now.time] - rounding[now.time]
                rest[now.time] = max(rest[now.time], reached)
        return {"rounding": rounding, "no tensor": rest}

    def driver_bytes(self) -> int | None:
        return driver_bytes(self.device)


def driver_bytes(device: torch.device) -> int | None:
    """Used on the device by all processes and not reserved by this allocator; None of a device that
    an error has broken."""
    try:
        free, whole = torch.cuda.mem_get_info(device)
    except RuntimeError:
        return None
    return int(whole - free - torch.cuda.memory_reserved(device))


def rounded(count: int) -> int:
    return -(-count // BLOCK) * BLOCK
