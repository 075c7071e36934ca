"""What CUDA's caching allocator itself counts, read after each operator that made something.

Its peak is reset at each reading. A peak above what was there at the reading before was reached in
between, by that operator; a lower one only repeats what was there, part of which may be gone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Sizes are rounded up to it.
BLOCK = 512


@dataclass(frozen=True)
class Reading:
    time: int
    #: At most, since the reading before.
    peak: int
    current: int
    #: Of `current`, beyond what was asked for: rounding, and blocks too small to be split.
    rounding: int
    reserved: int


class Allocator:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.readings: list[Reading] = []
        torch.cuda.reset_peak_memory_stats(device)
        self.read(0)

    def read(self, time: int) -> None:
        told = torch.cuda.memory_stats_as_nested_dict(self.device)
        allocated = told["allocated_bytes"]["all"]
        asked = told["requested_bytes"]["all"]["current"]
        current = allocated["current"]
        reserved = told["reserved_bytes"]["all"]["current"]
        self.readings.append(Reading(time, allocated["peak"], current, current - asked, reserved))
        torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def at_peak(self) -> Reading:
        return max(self.readings, key=lambda reading: reading.peak)

    def driver_bytes(self) -> int:
        """Used on the device by all processes and not reserved by this allocator."""
        free, whole = torch.cuda.mem_get_info(self.device)
        return int(whole - free - torch.cuda.memory_reserved(self.device))


def rounded(count: int) -> int:
    return -(-count // BLOCK) * BLOCK
