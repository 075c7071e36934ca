"""Two reports side by side: what each module holds of each kind at its peak, before and after."""

from __future__ import annotations

import html
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ecornn.profiler.model import COUNTED, MemoryReport
from ecornn.profiler.render import page
from ecornn.profiler.render.kinds import COLOURS, module_text, shown
from ecornn.profiler.render.text import WIDTH, empty_table, head
from ecornn.profiler.render.timeline import points_of
from ecornn.sizes import size_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

#: Changes that are printed; the others are one line. The page has all.
LINES = 40
#: Characters under which module and kind share a column.
NARROW = 90
#: What `torch.compile` puts before the path of every module.
WRAPPER = "_orig_mod"


@dataclass(frozen=True)
class Change:
    """What one module holds of one kind at each report's own peak."""

    module: str
    kind: str
    before: int
    after: int

    @property
    def difference(self) -> int:
        return self.after - self.before


@dataclass(frozen=True)
class Difference:
    """Prints itself; `to_html()` is a page of its own."""

    before: MemoryReport
    after: MemoryReport
    #: Every module and kind of either report once, the largest difference first.
    changes: tuple[Change, ...]
    #: What the two are called, such as "eager" and "echo".
    names: tuple[str, str] = ("before", "after")

    @property
    def sum(self) -> Change:
        return Change("sum", "", self.before.peak_bytes, self.after.peak_bytes)

    def __str__(self) -> str:
        return self.as_text()

    def as_text(self, width: int = WIDTH) -> str:
        from rich.console import Console

        stream = io.StringIO()
        Console(file=stream, width=width, color_system=None).print(render(self, width))
        return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())

    def to_html(self) -> str:
        return to_html(self)


def compare(
    before: MemoryReport, after: MemoryReport, names: tuple[str, str] = ("before", "after")
) -> Difference:
    sums: dict[tuple[str, str], list[int]] = {}
    for place, report in enumerate((before, after)):
        for row in report.rows:
            if row.kind in COUNTED:
                sums.setdefault((_unwrapped(row.module), row.kind), [0, 0])[place] += row.bytes
    changes = [Change(module, kind, *pair) for (module, kind), pair in sums.items()]
    changes.sort(key=lambda change: (-abs(change.difference), -change.before, change.module))
    return Difference(before, after, tuple(changes), names)


def _unwrapped(path: str) -> str:
    """A compiled model's modules are compared with those of the model that was compiled."""
    return ".".join(name for name in path.split(".") if name != WRAPPER)


def render(difference: Difference, width: int) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    lines = []
    for name, report in zip(difference.names, (difference.before, difference.after), strict=True):
        lines += [Text(f"{shown(name)}: {line}") for line in head(report)]
    return Group(*lines, Text(), _table(difference, width))


def _table(difference: Difference, width: int) -> Table:
    from rich.text import Text

    narrow = width < NARROW
    names = ["module and kind"] if narrow else ["module", "kind"]
    made = empty_table(names, [*map(shown, difference.names), "difference"])
    for change in [*_lines(difference), difference.sum]:
        told = [module_text(change.module), change.kind]
        names = [", ".join(filter(None, told))] if narrow else told
        figures = (size_text(change.before), size_text(change.after), signed(change.difference))
        made.add_row(*map(Text, (*names, *figures)))
    return made


def _lines(difference: Difference) -> list[Change]:
    """The largest changes, and all else in one: they add up to the sum."""
    count = min(LINES, sum(change.difference != 0 for change in difference.changes))
    rest = difference.changes[count:]
    lines = list(difference.changes[:count])
    if rest:
        sums = (sum(change.before for change in rest), sum(change.after for change in rest))
        lines.append(Change(f"… {len(rest)} others", "", *sums))
    return lines


def signed(count: int) -> str:
    return f"+{size_text(count)}" if count > 0 else size_text(count)


def to_html(difference: Difference) -> str:
    reports = (difference.before, difference.after)
    kinds = page.kinds_of(*reports)
    data = {
        "kinds": kinds,
        "colours": [COLOURS[kind] for kind in kinds],
        "timelines": [points_of(report, kinds) for report in reports],
    }
    parts = [page.key(kinds)]
    for i, (name, report) in enumerate(zip(difference.names, reports, strict=True)):
        parts += [
            f"<h2>{html.escape(shown(name))}</h2>",
            page.paragraph(head(report)),
            page.timeline_place(i),
        ]
    before, after = map(shown, difference.names)
    columns = {
        "module": "module",
        "kind": "kind",
        "before": before,
        "after": after,
        "difference": "difference",
    }
    rows = [_row(change) for change in difference.changes]
    parts += [
        "<h2>By module and kind, each at its peak</h2>",
        page.table(columns, rows, [_row(difference.sum)], id="changes"),
    ]
    title = f"Memory of a training step: {before} and {after}"
    return page.document(title, "\n".join(parts), data)


def _row(change: Change) -> tuple[str | int, ...]:
    module = module_text(change.module)
    return module, change.kind, change.before, change.after, change.difference
