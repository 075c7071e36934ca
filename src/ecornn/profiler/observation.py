"""What a collector hands over: one form, whichever way the step was observed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ecornn.profiler.model import Row
from ecornn.profiler.places import Folders, folders_now
from ecornn.profiler.storages import Record

if TYPE_CHECKING:
    from ecornn.profiler.trace import Trace

Bytes = NDArray[np.int64]


@dataclass(frozen=True)
class Beside:
    """What is counted beside tensors."""

    peak_time: int
    #: By kind, at each time.
    columns: dict[str, Bytes]
    #: At the peak, and beyond it.
    rows: list[Row]
    #: What does not add up, in sentences.
    notes: tuple[str, ...] = ()


class Count(Protocol):
    """Who knows how much memory there is in all."""

    def beside(self, tensors: Bytes, padding: Bytes, modules: Sequence[str]) -> Beside:
        """At each time: bytes of tensors, what blocks of 512 bytes add to these, and the module
        that was running."""
        ...


class NobodyCounts:
    """Without an allocator to ask: tensors are all there is, in blocks where there are some."""

    def beside(self, tensors: Bytes, padding: Bytes, modules: Sequence[str]) -> Beside:
        peak = int(np.argmax(tensors + padding))
        columns = {"rounding": padding} if padding.any() else {}
        rounding = int(padding[peak])
        return Beside(peak, columns, [Row("", "rounding", rounding, 0)] if rounding else [])


@dataclass(frozen=True)
class Observation:
    device: torch.device
    #: In the order of their birth.
    records: Sequence[Record]
    #: At each time from 1: operator, module, phase.
    times: Sequence[tuple[str, str, str]]
    count: Count
    #: In sentences.
    notes: Sequence[str]
    #: The forward pass, where it was written down.
    trace: Trace | None = None
    #: What one time is.
    unit: str = "operator"
    #: From which lines are told.
    folders: Folders = field(default_factory=folders_now)


def compiled_notes(*, saw_compiled: bool, unread: int) -> list[str]:
    notes = []
    if saw_compiled:
        notes.append(
            "operators inside compiled code are not seen where it was fused; what it keeps for the"
            " backward pass is told by its graph"
        )
    if unread:
        notes.append(
            f"the graphs of {unread} parts of compiled code could not be read: what they"
            " keep is attributed to each as a whole"
        )
    return notes


def elsewhere_notes(devices: set[str]) -> list[str]:
    return [f"tensors on {', '.join(sorted(devices))} are not counted"] if devices else []


def packed_notes(packed: int) -> list[str]:
    note = (
        f"{packed} tensors were saved through the program's own hooks (such as those of"
        " checkpoints): what these keep is counted, but not as kept for the backward pass"
    )
    return [note] if packed else []


def driver_notes(driver: int | None) -> tuple[str, ...]:
    note = "the device no longer answers: what only its driver sees is missing"
    return (note,) if driver is None else ()


def no_history_notes(reason: str | None) -> list[str]:
    note = f"every operator was observed in Python, not the allocator's own history: {reason}"
    return [] if reason is None else [note]
