"""From what was collected to a `MemoryReport`, at once or when that is first read."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from ecornn.profiler.allocator import BLOCK
from ecornn.profiler.model import (
    TENSORS,
    Held,
    MemoryReport,
    Part,
    Row,
    Timeline,
    WhatIf,
    largest_first,
)
from ecornn.profiler.observation import Bytes, Observation
from ecornn.profiler.places import Folders, line_text
from ecornn.profiler.storages import Record
from ecornn.profiler.taken import UNIT, Taken

_NUMBER = {kind: number for number, kind in enumerate(TENSORS)}
_KEPT, _MADE = _NUMBER["feature maps"], _NUMBER["workspace"]


def assemble(seen: Observation, error: BaseException | None) -> MemoryReport:
    told = _told(seen, in_blocks=_in_blocks(seen.device))
    known = {**_known(seen.device, seen.unit, error), **told.fields}
    return MemoryReport.made_later(told.rest, **known)


def assemble_later(taken: Taken, error: BaseException | None) -> MemoryReport:
    """Rows, timeline and notes when the first of them is asked for, storages when they are."""
    in_blocks = _in_blocks(taken.device)
    return MemoryReport.made_later(
        lambda: _told(taken.observation(), in_blocks=in_blocks),
        **_known(taken.device, UNIT, error),
    )


def _known(device: torch.device, unit: str, error: BaseException | None) -> dict[str, Any]:
    """What is so at the end of the step, and what that raised: as texts."""
    return {
        "device": str(device),
        "error": None if error is None else f"{type(error).__name__}: {error}",
        "environment": _environment(device),
        "unit": unit,
    }


def _told(seen: Observation, *, in_blocks: bool) -> Part:
    length = len(seen.times) + 1
    # Alone: what makes storages later must not hold on to the rest of what was seen.
    records, folders = seen.records, seen.folders
    sums = _Sums(records, length, in_blocks=in_blocks)
    columns = {kind: sums.of(kind) for kind in TENSORS}
    columns = {kind: column for kind, column in columns.items() if column.any()}
    operators, modules, phases = zip(("", "", "before"), *seen.times, strict=True)
    beside = seen.count.beside(sum(columns.values(), sums.nothing), sums.padding, modules)
    columns |= beside.columns
    rows = [*sums.rows(beside.peak_time), *beside.rows]
    fields = {
        "peak_time": beside.peak_time,
        "rows": tuple(largest_first(rows)),
        "timeline": Timeline(
            phase=phases,
            operator=operators,
            module=modules,
            bytes={kind: tuple(column.tolist()) for kind, column in columns.items()},
        ),
        "notes": (*_notes(seen, phases[beside.peak_time]), *beside.notes),
        "what_if": _what_if(seen, columns.get("feature maps")),
    }
    return Part(fields, lambda: Part({"held": _held(records, folders, in_blocks=in_blocks)}))


def _what_if(seen: Observation, kept: Bytes | None) -> tuple[WhatIf, ...]:
    """When feature maps take most."""
    if seen.trace is None or kept is None:
        return ()
    from ecornn.profiler.what_if import what_if

    return what_if(seen.trace.calls, seen.records, int(np.argmax(kept)))


def kind_of(record: Record) -> str:
    return record.role or ("feature maps" if record.kept_by else "workspace")


def _held(records: Sequence[Record], folders: Folders, *, in_blocks: bool) -> tuple[Held, ...]:
    lines: dict[tuple[int, int], str] = {}  # each one's text is made once
    found = []
    for number, record in enumerate(records):
        count, line = record.bytes, record.line_text
        if not line and record.line is not None:
            key = (id(record.line[0]), record.line[1])
            line = lines.get(key) or lines.setdefault(key, line_text(record.line, folders))
        fields = {
            "id": number,
            "bytes": count,
            "allocated_bytes": -(-count // BLOCK) * BLOCK if in_blocks else count,
            "shape": tuple(record.shape),
            "dtype": dtype_name(record.dtype),
            "kind": kind_of(record),
            "module": record.module,
            "operator": record.operator,
            "line": line,
            "born": record.born,
            "freed": record.freed,
            "kept_by": record.kept_by,
            "why": _why(record),
        }
        found.append(Held.made_of(fields))
    return tuple(found)


@cache
def dtype_name(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def _why(record: Record) -> str:
    if not (record.role_text or record.kept_by):
        if record.born == 0:
            return "was there before the step"
        if record.freed is None:
            return "still held by the program when the step ended"
        return "held until its last reader is done"
    reasons = [record.role_text] if record.role_text else []
    if record.kept_by:
        first = record.kept_by[0]
        more = f" and {len(record.kept_by) - 1} more" if len(record.kept_by) > 1 else ""
        reasons.append(f"kept for the backward pass of {first}{more}")
    return "; ".join(reasons)


class _Sums:
    """Bytes at each time of those that are alive."""

    def __init__(self, records: Sequence[Record], length: int, *, in_blocks: bool) -> None:
        self._records, self._length = records, length
        self._born = np.asarray([one.born for one in records], np.int64)
        ends = [length if one.freed is None else one.freed for one in records]
        self._freed = np.minimum(np.asarray(ends, np.int64), length)
        self._bytes = np.asarray([one.bytes for one in records], np.int64)
        self._kinds = np.asarray(
            [_NUMBER[one.role] if one.role else _KEPT if one.kept_by else _MADE for one in records],
            np.int64,
        )
        padding = -self._bytes % BLOCK if in_blocks else np.zeros_like(self._bytes)
        self.padding = self._over_time(padding)

    @property
    def nothing(self) -> Bytes:
        return np.zeros(self._length, np.int64)

    def of(self, kind: str) -> Bytes:
        return self._over_time(np.where(self._kinds == _NUMBER[kind], self._bytes, 0))

    def _over_time(self, counts: Bytes) -> Bytes:
        changes = np.zeros(self._length + 1, np.int64)
        np.add.at(changes, self._born, counts)
        np.subtract.at(changes, self._freed, counts)
        found: Bytes = np.cumsum(changes[: self._length])
        return found

    def rows(self, time: int) -> list[Row]:
        """By module and kind."""
        found: dict[tuple[str, str], list[int]] = {}
        for i in np.flatnonzero((self._born <= time) & (time < self._freed)).tolist():
            one = self._records[i]
            if one.bytes:
                found.setdefault((one.module, kind_of(one)), []).append(one.bytes)
        return [Row(*key, sum(sizes), len(sizes)) for key, sizes in found.items()]


def _notes(seen: Observation, phase: str) -> list[str]:
    notes = []
    if seen.trace is not None and phase == "optimizer":
        notes.append(
            "the peak is in the optimizer's step: making feature maps again does not lower it"
        )
    return [*notes, *seen.notes]


def _environment(device: torch.device) -> dict[str, str]:
    name = platform.machine() if device.type != "cuda" else torch.cuda.get_device_name(device)
    return {"device": name, "torch": torch.__version__, "python": platform.python_version()}


def _in_blocks(device: torch.device) -> bool:
    return device.type == "cuda"
