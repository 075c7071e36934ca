"""What making feature maps again would free and cost, as a table of modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ecornn.profiler.model import MemoryReport, WhatIf
from ecornn.profiler.render.kinds import module_text
from ecornn.sizes import size_text

if TYPE_CHECKING:
    from rich.table import Table

#: Modules that the terminal shows; the page and the files have all.
LINES = 12
TITLE = "Feature maps when they take most, and what is freed if they were made again"
ABOUT = (
    "Cheap: by Echo's analysis of this step; no product is run again and no draw repeated. Whole: "
    "the module in a checkpoint, all of it run again in the backward pass. A module has what is "
    "inside it. Times are estimated from bytes and operations."
)
Cell = str | int | tuple[float, str]

COLUMNS = {
    "module": "module",
    "kept": "feature maps",
    "cheap": "cheap frees",
    "cheap_s": "for",
    "whole": "whole frees",
    "whole_s": "for",
}


def cells(one: WhatIf) -> tuple[Cell, ...]:
    """Integers are bytes; a time is a number to sort by, and its text."""
    name = module_text(one.module) if one.module else "the whole model"
    cheap, whole = ((s, time_text(s)) for s in (one.cheap_seconds, one.whole_seconds))
    return name, one.kept_bytes, one.cheap_frees, cheap, one.whole_frees, whole


def time_text(seconds: float) -> str:
    if seconds == 0:
        return "0"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def again_table(report: MemoryReport) -> Table:
    from rich.text import Text

    from ecornn.profiler.render.text import empty_table

    names = list(COLUMNS.values())
    made = empty_table(names[:1], names[1:])
    for one in report.what_if[:LINES]:
        made.add_row(*(Text(_text(cell)) for cell in cells(one)))
    return made


def _text(cell: Cell) -> str:
    if isinstance(cell, tuple):
        return cell[1]
    return size_text(cell) if isinstance(cell, int) else cell


def left_out(report: MemoryReport) -> str:
    more = len(report.what_if) - LINES
    return f"… {more} modules with fewer" if more > 0 else ""
