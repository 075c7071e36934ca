"""From what was collected to a `MemoryReport`."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise

import torch

from ecornn.profiler.allocator import Allocator, Reading, rounded
from ecornn.profiler.collect import Collector
from ecornn.profiler.model import (
    TENSORS,
    Held,
    MemoryReport,
    Row,
    Timeline,
    WhatIf,
    largest_first,
    rows_of,
)
from ecornn.profiler.places import line_text
from ecornn.profiler.storages import Record


def assemble(collector: Collector, error: BaseException | None) -> MemoryReport:
    device = collector.ledger.device
    in_blocks = _in_blocks(device)
    records = sorted(collector.ledger.records, key=lambda record: record.born)
    texts = _LineTexts()
    held = tuple(_held(i, record, texts, in_blocks=in_blocks) for i, record in enumerate(records))
    length = len(collector.times) + 1
    columns = {kind: _over_time(held, kind, length) for kind in TENSORS}
    columns = {kind: column for kind, column in columns.items() if any(column)}
    totals = [sum(at) for at in zip(*columns.values(), strict=True)] or [0] * length
    allocator = collector.allocator
    if in_blocks and allocator is None:
        columns["rounding"] = _rounding_over_time(held, length)
        totals = [total + columns["rounding"][time] for time, total in enumerate(totals)]
    if allocator is None:
        peak_time = max(range(length), key=totals.__getitem__)
        rounding = columns["rounding"][peak_time] if in_blocks else 0
        beyond = [Row("", "rounding", rounding, 0)] if rounding else []
    else:
        peak_time = allocator.at_peak.time
        columns |= _allocator_columns(allocator, totals)
        beyond = _allocator_rows(allocator, collector, columns)
    timeline = Timeline(
        phase=("before", *(phase for _, _, phase in collector.times)),
        operator=("", *(operator for operator, _, _ in collector.times)),
        module=("", *(module for _, module, _ in collector.times)),
        bytes=columns,
    )
    return MemoryReport(
        device=str(device),
        peak_time=peak_time,
        rows=tuple(largest_first([*rows_of(held, peak_time), *beyond])),
        held=held,
        timeline=timeline,
        notes=tuple(_notes(collector, timeline.phase[peak_time])),
        error=None if error is None else f"{type(error).__name__}: {error}",
        environment=_environment(device),
        what_if=_what_if(collector, records, columns),
    )


def _what_if(
    collector: Collector, records: Sequence[Record], columns: Mapping[str, Sequence[int]]
) -> tuple[WhatIf, ...]:
    """When feature maps take most."""
    kept = columns.get("feature maps")
    if collector.trace is None or kept is None:
        return ()
    from ecornn.profiler.what_if import what_if

    return what_if(collector.trace.calls, records, max(range(len(kept)), key=kept.__getitem__))


def kind_of(record: Record) -> str:
    if record.role:
        return record.role
    return "feature maps" if record.kept_by else "workspace"


class _LineTexts(dict[tuple[int, int], str]):
    """Each line's text is made once."""

    def of(self, record: Record) -> str:
        if record.line_text or record.line is None:
            return record.line_text
        code, number = record.line
        found = self.get((id(code), number))
        if found is None:
            found = self[id(code), number] = line_text(record.line)
        return found


def _held(number: int, record: Record, texts: _LineTexts, *, in_blocks: bool) -> Held:
    return Held.made_of(
        {
            "id": number,
            "bytes": record.bytes,
            "allocated_bytes": rounded(record.bytes) if in_blocks else record.bytes,
            "shape": tuple(record.shape),
            "dtype": dtype_name(record.dtype),
            "kind": kind_of(record),
            "module": record.module,
            "operator": record.operator,
            "line": texts.of(record),
            "born": record.born,
            "freed": record.freed,
            "kept_by": tuple(record.kept_by),
            "why": _why(record),
        }
    )


@cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _why(record: Record) -> str:
    reasons = [record.role_text] if record.role_text else []
    if record.kept_by:
        first = record.kept_by[0]
        more = f" and {len(record.kept_by) - 1} more" if len(record.kept_by) > 1 else ""
        reasons.append(f"kept for the backward pass of {first}{more}")
    if not reasons and record.born == 0:
        reasons.append("was there before the step")
    if not reasons and record.freed is None:
        reasons.append("still held by the program when the step ended")
    return "; ".join(reasons) or "held until its last reader is done"


def _over_time(held: Sequence[Held], kind: str, length: int) -> tuple[int, ...]:
    return _sums(((one, one.bytes) for one in held if one.kind == kind), length)


def _rounding_over_time(held: Sequence[Held], length: int) -> tuple[int, ...]:
    return _sums(((one, one.allocated_bytes - one.bytes) for one in held), length)


def _sums(counts: Iterable[tuple[Held, int]], length: int) -> tuple[int, ...]:
    """At each time, the counts of those alive."""
    changes = [0] * (length + 1)
    for one, count in counts:
        changes[one.born] += count
        if one.freed is not None:
            changes[min(one.freed, length)] -= count
    return tuple(accumulate(changes[:length]))


def _allocator_columns(allocator: Allocator, totals: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Rounding and memory without a tensor. Between two readings both are as at the earlier one,
    but for the peak of the time between, which is where it was reached, and nowhere exceeded."""
    first = allocator.readings[0]
    rounding = [first.rounding] * len(totals)
    rest = [first.current - totals[0] - first.rounding] * len(totals)
    for before, now in pairwise(allocator.readings):
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
    return {"rounding": tuple(rounding), "no tensor": tuple(rest)}


def _allocator_rows(
    allocator: Allocator, collector: Collector, columns: dict[str, tuple[int, ...]]
) -> list[Row]:
    peak: Reading = allocator.at_peak
    time = peak.time
    # What had no tensor before the step either, such as buffers of libraries, is nobody's.
    before = max(0, min(columns["no tensor"][0], columns["no tensor"][time]))
    module = collector.times[time - 1][1] if time else ""
    inside = columns["no tensor"][time] - before
    if not module:
        before, inside = before + inside, 0
    rows = [
        Row("", "rounding", columns["rounding"][time], 0),
        Row("", "no tensor", before, 0),
        Row(module, "no tensor", inside, 0),
        Row("", "reserved, unused", max(0, peak.reserved - peak.peak), 0),
        Row("", "driver", allocator.driver_bytes(), 0),
    ]
    return [row for row in rows if row.bytes]


def _notes(collector: Collector, phase: str) -> list[str]:
    notes = []
    if collector.trace is not None and phase == "optimizer":
        notes.append(
            "the peak is in the optimizer's step: making feature maps again does not lower it"
        )
    if collector.untold is not None:
        notes.append(collector.untold)
    elsewhere = sorted(collector.ledger.elsewhere)
    if elsewhere:
        notes.append(f"tensors on {', '.join(elsewhere)} are not counted")
    if collector.saw_compiled:
        notes.append(
            "operators inside compiled code are not seen where it was fused; what it keeps for the"
            " backward pass is told by its graph"
        )
    if collector.unread:
        notes.append(
            f"the graphs of {collector.unread} parts of compiled code could not be read: what they"
            " keep is attributed to each as a whole"
        )
    if collector.graph.packed:
        notes.append(
            f"{collector.graph.packed} tensors were saved through the program's own hooks (such as"
            " those of checkpoints): what these keep is counted, but not as kept for the backward"
            " pass"
        )
    return notes


def _environment(device: torch.device) -> dict[str, str]:
    name = platform.machine() if device.type != "cuda" else torch.cuda.get_device_name(device)
    return {"device": name, "torch": torch.__version__, "python": platform.python_version()}


def _in_blocks(device: torch.device) -> bool:
    return device.type == "cuda"
