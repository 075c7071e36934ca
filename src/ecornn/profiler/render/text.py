"""A report in the terminal: what is held at the peak, as a tree of modules with a column a kind."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ecornn.profiler.model import BEYOND, COUNTED, MemoryReport
from ecornn.profiler.render.again import ABOUT, TITLE, again_table, left_out
from ecornn.profiler.render.kinds import OUTSIDE, shown
from ecornn.profiler.render.tree import Line, lines_of, tree_of
from ecornn.sizes import size_text

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

#: Modules with a line of their own; the page and the files have all.
LINES = 40
#: How many of the largest tensors are named below the table.
TENSORS_NAMED = 5
#: Characters: of a figure such as "1023.99 MiB" with its margin, and the least for names.
FIGURE_WIDTH = 13
NAME_WIDTH = 24
#: For those who print a report, where no terminal says how wide it is.
WIDTH = 140


def as_text(report: MemoryReport, width: int = WIDTH) -> str:
    from rich.console import Console

    stream = io.StringIO()
    console = Console(file=stream, width=width, color_system=None)
    console.print(render(report, console))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def render(report: MemoryReport, console: Console, depth: int | None = None) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    return Group(
        *(Text(line) for line in head(report)),
        Text(),
        module_table(report, console.width, depth),
        *(Text(line) for line in _beyond(report)),
        *(Text(line) for line in _largest(report)),
        *_again(report),
        *(Text(f"note: {shown(note)}") for note in report.notes),
    )


def _again(report: MemoryReport) -> list[RenderableType]:
    from rich.text import Text

    if not report.what_if:
        return []
    more = left_out(report)
    below = [Text(more)] if more else []
    return [Text(), Text(f"{TITLE}:"), again_table(report), *below, Text(ABOUT)]


def head(report: MemoryReport) -> list[str]:
    """What the peak was, and when."""
    where = report.environment.get("device", "")
    lines = [
        f"peak: {size_text(report.peak_bytes)} ({report.peak_bytes:,} bytes) on {report.device}"
        + (f", {shown(where)}" if where else ""),
        f"reached {moment(report, report.peak_time)}",
        f"by kind: {_shares(report)}",
    ]
    if report.error is not None:
        lines.append(f"the step raised, and the report ends there: {shown(report.error)}")
    return lines


def _shares(report: MemoryReport) -> str:
    found = [(kind, count) for kind, count in report.by_kind().items() if kind in COUNTED]
    found.sort(key=lambda pair: -pair[1])
    whole = report.peak_bytes or 1
    parts = (f"{kind} {size_text(count)} ({count / whole:.1%})" for kind, count in found)
    return ", ".join(parts) or "nothing"


def moment(report: MemoryReport, time: int) -> str:
    """Such as "in the backward pass, at operator 212 of 400, aten.mul in decoder.attention"."""
    timeline = report.timeline
    if not 0 <= time < len(timeline):
        return f"at {shown(report.unit)} {time}"
    phases = {"before": "before the step", "optimizer": "in the optimizer's step"}
    phase = timeline.phase[time]
    told = phases.get(phase, f"in the {phase} pass")
    if time:
        told += f", at {shown(report.unit)} {time} of {len(timeline) - 1}"
    if timeline.operator[time]:
        told += f", {shown(timeline.operator[time])}"
    if timeline.module[time]:
        told += f" in {shown(timeline.module[time])}"
    return told


def module_table(report: MemoryReport, width: int, depth: int | None = None) -> Table:
    """As many kinds as the width has room for, the largest; the others in one column."""
    from rich.text import Text

    rows = [row for row in report.rows if row.kind in COUNTED]
    sums = {kind: count for kind, count in report.by_kind().items() if kind in COUNTED}
    largest = sorted(sums, key=lambda kind: -abs(sums[kind]))
    room = max(0, (width - NAME_WIDTH) // FIGURE_WIDTH - 1)
    kinds = largest if len(largest) <= room else largest[: max(0, room - 1)]
    others = [kind for kind in largest if kind not in kinds] if room else []

    columns = [*kinds, *(["other kinds"] if others and kinds else [])]
    made = empty_table(["module"], ["all", *columns])
    lines = lines_of(tree_of(rows), depth, LINES)
    total = Line("sum", 0, sums, True)
    for i, line in enumerate([*lines, total]):
        made.add_row(
            Text("  " * line.depth + line_name(line)),
            size_text(line.bytes),
            *(_cell(line, [kind]) for kind in kinds),
            *([_cell(line, others)] if len(columns) > len(kinds) else []),
            style="bold" if line is total else None,
            end_section=i == len(lines) - 1,
        )
    return made


def line_name(line: Line) -> str:
    return shown(line.name) or ("(itself)" if line.depth else OUTSIDE)


def empty_table(names: Sequence[str], figures: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in names:
        made.add_column(name, overflow="fold")
    for name in figures:
        made.add_column(name, justify="right", min_width=8)
    return made


def _cell(line: Line, kinds: Sequence[str]) -> str:
    count = sum(line.by_kind.get(kind, 0) for kind in kinds)
    return size_text(count) if count else "–"


def _beyond(report: MemoryReport) -> list[str]:
    found = {kind: n for kind, n in report.by_kind().items() if kind in BEYOND}
    if not found:
        return []
    parts = ", ".join(f"{kind} {size_text(count)}" for kind, count in found.items())
    return [f"beyond: {parts}; in all {size_text(report.device_bytes)} of the device"]


def _largest(report: MemoryReport) -> list[str]:
    found = report.at_peak[:TENSORS_NAMED]
    if not found:
        return []
    lines = ["", "the largest tensors then, and why they are alive:"]
    for held in found:
        made = f" by {shown(held.operator)}" if held.operator else ""
        line = f", {shown(held.line)}" if held.line else ""
        what = f" {shown(held.dtype)}{list(held.shape)}" if held.dtype else ""
        lines.append(
            f"  {size_text(held.bytes)}{what} in {shown(held.module) or OUTSIDE}{made}{line}:"
            f" {shown(held.why)}"
        )
    return lines
