"""A timeline with few enough points to draw, in which every peak of the long one is left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ecornn.profiler.model import MemoryReport, Timeline
from ecornn.profiler.render.kinds import shown

#: Of each, the highest and the lowest time are drawn: twice as many points as a page has columns.
BUCKETS = 800
#: Of the picture's width: what the name of a pass takes.
NAME_ROOM = 0.1


def times_to_draw(report: MemoryReport, buckets: int = BUCKETS) -> list[int]:
    """All times where there are few; else of each bucket the highest and the lowest, with the
    first, the last and the peak."""
    timeline = report.timeline
    length = len(timeline)
    if length <= 2 * buckets:
        return list(range(length))
    totals = [timeline.total(time) for time in range(length)]
    chosen = {0, length - 1, report.peak_time}
    for bucket in range(buckets):
        times = range(bucket * length // buckets, (bucket + 1) * length // buckets)
        chosen |= {max(times, key=totals.__getitem__), min(times, key=totals.__getitem__)}
    return sorted(chosen)


def marks_of(timeline: Timeline) -> list[tuple[int, str]]:
    """Where each pass begins, and its name where there is room for it before the next."""
    phases = timeline.phase
    begins = [i for i in range(1, len(phases)) if phases[i] != phases[i - 1]]
    ends = [*begins, len(phases)][1:]
    room = NAME_ROOM * len(phases)
    return [
        (begin, phases[begin] if end - begin >= room else "")
        for begin, end in zip(begins, ends, strict=True)
    ]


def points_of(report: MemoryReport, kinds: Sequence[str]) -> dict[str, Any]:
    """What the page's script draws."""
    timeline, times = report.timeline, times_to_draw(report)
    names: dict[str, int] = {}
    named = []
    for time in times:
        name = shown(timeline.operator[time]) or "before the step"
        if timeline.module[time]:
            name += f" in {shown(timeline.module[time])}"
        named.append(names.setdefault(name, len(names)))
    empty = (0,) * len(timeline)
    columns = [timeline.bytes.get(kind, empty) for kind in kinds]
    return {
        "unit": report.unit,
        "times": times,
        "values": [[column[time] for time in times] for column in columns],
        "peak": times.index(report.peak_time) if report.peak_time in times else 0,
        "marks": marks_of(timeline),
        "names": list(names),
        "named": named,
    }
