"""Every storage of a report as lines for people: those that are alike are one line."""

from __future__ import annotations

from collections.abc import Sequence

from ecornn.profiler.model import Held, MemoryReport
from ecornn.profiler.render.kinds import module_text, shown

#: Lines; beyond, the smallest are put together. The CSV and JSON files have each by itself.
LINES = 2000

COLUMNS = {
    "bytes": "size",
    "module": "module",
    "kind": "kind",
    "tensor": "tensor",
    "operator": "made by",
    "line": "line",
    "lives": "lives",
    "peak": "at the peak",
    "why": "why",
}

#: In the place of a shape, where only the allocator has seen it.
UNKNOWN = "shape not known"

Line = tuple[int, str, str, str, str, str, str, str, str]


def lines_of_storages(report: MemoryReport, at_most: int = LINES) -> list[Line]:
    """What is alive at the peak first, then the largest. Their bytes are those of all storages."""
    alike: dict[tuple[object, ...], list[Held]] = {}
    for held in report.held:
        if held.bytes:
            key = (
                *(held.alive_at(report.peak_time), held.module, held.kind, held.shape, held.dtype),
                *(held.bytes, held.operator, held.line, held.why),
            )
            alike.setdefault(key, []).append(held)
    groups = [(_bytes(group), bool(key[0]), group) for key, group in alike.items()]
    groups.sort(key=lambda found: (not found[1], -found[0]))
    lines = [_line(group, at_peak) for _, at_peak, group in groups[:at_most]]
    rest: dict[tuple[str, bool], list[Held]] = {}
    for _, at_peak, group in groups[at_most:]:
        rest.setdefault((group[0].kind, at_peak), []).extend(group)
    return lines + [_together(group, at_peak) for (_, at_peak), group in rest.items()]


def _bytes(group: Sequence[Held]) -> int:
    return sum(held.bytes for held in group)


def _line(group: Sequence[Held], at_peak: bool) -> Line:
    first = group[0]
    shape = "×".join(map(str, first.shape)) or "scalar"
    what = f"{shape} {shown(first.dtype)}" if first.dtype else UNKNOWN
    times = f"{len(group)} of " if len(group) > 1 else ""
    return (
        _bytes(group),
        module_text(first.module),
        first.kind,
        f"{times}{what}",
        shown(first.operator),
        shown(first.line),
        _lives(group),
        "yes" if at_peak else "no",
        shown(first.why),
    )


def _together(group: Sequence[Held], at_peak: bool) -> Line:
    what = f"{len(group)} smaller tensors"
    alive = "yes" if at_peak else "no"
    return _bytes(group), "…", group[0].kind, what, "", "", _lives(group), alive, "see the CSV file"


def _lives(group: Sequence[Held]) -> str:
    ends = [held.freed for held in group]
    end = "end" if any(freed is None for freed in ends) else str(max(filter(None, ends)) - 1)
    return f"{min(held.born for held in group)}–{end}"
