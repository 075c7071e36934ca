"""What stands first in a report: which modules' feature maps, and which lines made them."""

from __future__ import annotations

from collections.abc import Mapping

from ecornn.profiler import MemoryReport
from ecornn.profiler.model import COUNTED

#: Of the translation model; Echo's finding is that these hold most, in this order.
PARTS: Mapping[str, tuple[str, ...]] = {
    "attention": ("decoder.attention",),
    "recurrent": ("encoder", "decoder.cells"),
}
FIRST = 3
Figures = dict[str, float | str]


def shares(report: MemoryReport) -> dict[str, int]:
    """Bytes of each part's feature maps, and of every other module and kind, largest first."""
    found: dict[str, int] = {}
    for row in report.rows:
        if row.kind in COUNTED:
            name = _part(row.module) if row.kind == "feature maps" else None
            name = name or f"{row.kind} of {row.module or 'the model'}"
            found[name] = found.get(name, 0) + row.bytes
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _part(module: str) -> str | None:
    for name, paths in PARTS.items():
        if any(module == path or module.startswith(f"{path}.") for path in paths):
            return name
    return None


def finding(report: MemoryReport, model: str) -> Figures:
    """The largest rows and lines as text; for the translation model the places of its parts."""
    lines: dict[str, int] = {}
    for held in report.at_peak:
        if held.kind == "feature maps" and held.line:
            lines[held.line] = lines.get(held.line, 0) + held.bytes
    of_lines = sorted(lines.items(), key=lambda item: -item[1])[:FIRST]
    counted = [row for row in report.rows if row.kind in COUNTED]  # not what the driver holds
    found: Figures = {
        "first_rows": _listed(
            [(f"{r.kind} of {r.module or 'the model'}", r.bytes) for r in counted[:FIRST]],
            report,
        ),
        "first_lines": _listed(of_lines, report),
    }
    if model == "nmt":
        order = list(shares(report))
        found |= {f"{name}_place": _place(order, name) for name in PARTS}
        found["lines_named"] = sum("attention_nmt.py:" in line for line, _ in of_lines)
    return found


def _place(order: list[str], name: str) -> int:
    """From 1; behind all where there is no such row."""
    return 1 + (order.index(name) if name in order else len(order))


def _listed(rows: list[tuple[str, int]], report: MemoryReport) -> str:
    return "; ".join(f"{name} {count / report.peak_bytes:.0%}" for name, count in rows)
