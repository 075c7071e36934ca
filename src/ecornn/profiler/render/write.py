"""A report, or two beside each other, to a file whose suffix says how."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ecornn.errors import InvalidInput
from ecornn.profiler.model import MemoryReport
from ecornn.profiler.render import picture
from ecornn.profiler.render.difference import Difference
from ecornn.profiler.render.export import to_csv, to_trace
from ecornn.profiler.render.page import to_html

#: The longest suffix that fits counts.
TEXTS: dict[str, Callable[[MemoryReport], str]] = {
    ".trace.json": to_trace,
    ".json": MemoryReport.to_json,
    ".csv": to_csv,
    ".html": to_html,
}
SUFFIXES = (*TEXTS, *picture.FORMATS)


def suffix_of(path: Path) -> str:
    """The one that decides; refused if there is no view for it."""
    found = next((suffix for suffix in SUFFIXES if path.name.lower().endswith(suffix)), None)
    if found is None:
        raise InvalidInput(
            "out", str(path), f"a name that ends in {', '.join(SUFFIXES)}", "choose one of these"
        )
    return found


def check(path: Path) -> None:
    """What would be refused after minutes of work is refused before it."""
    suffix_of(path)
    if not path.parent.is_dir():
        raise InvalidInput("out", str(path), "a folder that exists", f"make {path.parent} first")


def write(report: MemoryReport, path: Path) -> None:
    check(path)
    suffix = suffix_of(path)
    if suffix in picture.FORMATS:
        picture.draw(report, path)
    else:
        _write(path, TEXTS[suffix](report))


def write_difference(difference: Difference, path: Path) -> None:
    check(path)
    if suffix_of(path) != ".html":
        raise InvalidInput("out", str(path), "a name that ends in .html", "compare to a page")
    _write(path, difference.to_html())


def _write(path: Path, text: str) -> None:
    # Names may hold what has no place in UTF-8 (half a surrogate pair).
    path.write_bytes(text.encode("utf-8", "replace"))
