"""What is taken of a step when it has ended, and from which its report is made when that is read.

Numbers and texts alone: an unread report holds on to no tensor, no module and no optimizer. What
may be otherwise by the time of reading, such as what the driver counts, is asked for before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ecornn.profiler.history import History
from ecornn.profiler.lives import Lives, Said
from ecornn.profiler.observation import Observation
from ecornn.profiler.places import Folders
from ecornn.profiler.recorded import HistoryCounts
from ecornn.profiler.sightings import Seen

UNIT = "allocation"


@dataclass(frozen=True)
class Taken:
    device: torch.device
    history: History
    said: Said
    seen: Seen
    #: Of the device's memory: what is not the allocator's; None if it did not answer.
    driver: int | None
    #: In sentences.
    notes: tuple[str, ...]
    #: From which lines are told.
    folders: Folders

    def observation(self) -> Observation:
        """The same each time: nothing of this is changed by it."""
        found = Lives(self.history, self.said, self.seen.addresses, self.folders)
        self.seen.apply(found)
        count = HistoryCounts(self.history, found.reserved_at, self.driver)
        told = (self.device, found.records, found.times, count, self.notes)
        return Observation(*told, unit=UNIT, folders=self.folders)
