"""A report for programs: CSV, and the JSON that Chrome's and Perfetto's trace viewers read."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

from ecornn.profiler.model import TENSORS, MemoryReport

COLUMNS = (
    *("module", "kind", "bytes", "at_peak", "allocated_bytes", "shape", "dtype", "operator"),
    *("line", "born", "freed", "kept_by", "why"),
)


def to_csv(report: MemoryReport) -> str:
    """A line a storage, and one for each row that no tensor stands for. The bytes of the lines
    with `at_peak` 1 add up to the whole device's."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    for held in report.held:
        writer.writerow(
            (
                *(held.module, held.kind, held.bytes, int(held.alive_at(report.peak_time))),
                *(held.allocated_bytes, "x".join(map(str, held.shape)), held.dtype),
                *(held.operator, held.line, held.born, "" if held.freed is None else held.freed),
                *("; ".join(held.kept_by), held.why),
            )
        )
    for row in report.rows:
        if row.kind not in TENSORS:
            writer.writerow((row.module, row.kind, row.bytes, 1, *("",) * 9))
    return stream.getvalue()


def to_trace(report: MemoryReport) -> str:
    """Trace events. A report counts time in operators or in allocations: one is a microsecond of
    the trace, whatever time it took."""
    timeline = report.timeline
    events: list[dict[str, Any]] = [
        _event("process_name", "M", 0, args={"name": f"memory on {report.device}"}),
        *(
            _event("thread_name", "M", 0, tid=tid, args={"name": name})
            for tid, name in ((1, "passes"), (2, f"{report.unit}s"))
        ),
    ]
    for begin, end, phase in _phases(timeline.phase):
        events.append(_event(phase, "X", begin, tid=1, dur=end - begin))
    for time in range(len(timeline)):
        counts = {kind: column[time] for kind, column in timeline.bytes.items()}
        events.append(_event("bytes", "C", time, args=counts))
        if timeline.operator[time]:
            where = {"module": timeline.module[time]}
            events.append(_event(timeline.operator[time], "X", time, tid=2, dur=1, args=where))
    peak = {"bytes": report.peak_bytes}
    events.append(_event("peak", "i", report.peak_time, tid=1, s="p", args=peak))
    about = {
        "time": f"one {report.unit} is one microsecond",
        "device": report.device,
        **report.environment,
    }
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about})


def _event(name: str, phase: str, time: int, *, tid: int = 0, **more: Any) -> dict[str, Any]:
    return {"name": name, "ph": phase, "ts": time, "pid": 0, "tid": tid, **more}


def _phases(phases: tuple[str, ...]) -> list[tuple[int, int, str]]:
    """Runs of one phase: first time, the time after the last, name."""
    found: list[tuple[int, int, str]] = []
    for time, phase in enumerate(phases):
        if found and found[-1][2] == phase:
            found[-1] = (found[-1][0], time + 1, phase)
        else:
            found.append((time, time + 1, phase))
    return found
