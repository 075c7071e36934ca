"""A report as a page of its own: no network, no file beside it, and its tables work without script.

Every text of the report is escaped, and the page forbids itself by its policy all scripts and
styles but the two it brings, and every request.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from ecornn.profiler.model import BEYOND, COUNTED, KINDS, MemoryReport, Row
from ecornn.profiler.render import again
from ecornn.profiler.render.again import Cell
from ecornn.profiler.render.kinds import COLOURS, module_text, shown
from ecornn.profiler.render.storages import COLUMNS, lines_of_storages
from ecornn.profiler.render.text import head
from ecornn.profiler.render.timeline import points_of
from ecornn.profiler.render.tree import Node, joined, tree_of
from ecornn.sizes import size_text

ABOUT_STORAGES = (
    "Tensors that share their storage are counted once; those that are alike, made by one line, "
    "are one row. Times are counted in {unit}s."
)


def to_html(report: MemoryReport) -> str:
    kinds = kinds_of(report)
    tree = tree_of(row for row in report.rows if row.kind in COUNTED)
    data = {
        "kinds": kinds,
        "colours": [COLOURS[kind] for kind in kinds],
        "timelines": [points_of(report, kinds)],
        "tree": _node(tree, kinds),
    }
    parts = [
        paragraph(head(report)),
        paragraph([f"note: {note}" for note in map(shown, report.notes)]),
        "<h2>Memory over the step</h2>",
        key(kinds),
        timeline_place(0),
        "<h2>By layer, at the peak</h2>",
        '<div id="treemap"><p>The picture needs JavaScript.</p></div>',
        "<h2>By module and kind, at the peak</h2>",
        _rows_table(report),
        *_again(report),
        "<h2>Why is this alive?</h2>",
        paragraph([ABOUT_STORAGES.format(unit=shown(report.unit))]),
        _storages_table(report),
    ]
    return document("Where the memory of a training step goes", "\n".join(parts), data)


def _again(report: MemoryReport) -> list[str]:
    if not report.what_if:
        return []
    rows = [again.cells(one) for one in report.what_if]
    table_ = table(again.COLUMNS, rows, id="what-if")
    return [f"<h2>{html.escape(again.TITLE)}</h2>", paragraph([again.ABOUT]), table_]


def kinds_of(*reports: MemoryReport) -> list[str]:
    """The kinds that occur, at the peak or at another time."""
    found = {kind for report in reports for kind in (*report.timeline.bytes, *report.by_kind())}
    return [kind for kind in COUNTED if kind in found]


def document(title: str, body: str, data: Mapping[str, Any]) -> str:
    """The page around `body`, whose parts are escaped already."""
    folder = files("ecornn.profiler.render")
    script = (folder / "page.js").read_text(encoding="utf-8")
    style = (folder / "page.css").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}';"
        " base-uri 'none'; form-action 'none'"
    )
    # In a script's text only "<" could end it; "&" and ">" are for readers of the source.
    told = json.dumps(data, separators=(",", ":"))
    for character in "<>&":
        told = told.replace(character, f"\\u{ord(character):04x}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(title)}</title>\n<style>{style}</style></head>\n"
        f"<body><h1>{html.escape(title)}</h1>\n{body}\n"
        f'<script type="application/json" id="data">{told}</script>\n'
        f"<script>{script}</script>\n</body></html>\n"
    )


def paragraph(lines: Sequence[str]) -> str:
    return f"<p>{'<br>'.join(map(html.escape, lines))}</p>" if lines else ""


def table(
    columns: Mapping[str, str],
    rows: Sequence[Sequence[Cell]],
    sums: Sequence[Sequence[Cell]] = (),
    *,
    id: str = "",
) -> str:
    """`columns`: name and title. An integer is a number of bytes; other numbers have a text.
    End tags of cells and rows are left out, as HTML allows: a page of thousands of rows is a fifth
    smaller."""
    numbers = {i for row in rows[:1] for i, cell in enumerate(row) if not isinstance(cell, str)}
    heads = "".join(
        f'<th data-name="{name}"{" class=n" if i in numbers else ""} scope=col>{html.escape(title)}'
        for i, (name, title) in enumerate(columns.items())
    )
    body = "".join(f"<tr>{''.join(map(cell, row))}" for row in rows)
    foot = "".join(f"<tr>{''.join(map(cell, row))}" for row in sums)
    name = f' id="{id}"' if id else ""
    return (
        f'<div class="scroll"><table{name} class="sortable"><thead><tr>{heads}</thead>'
        f"<tbody>{body}</tbody><tfoot>{foot}</tfoot></table></div>"
    )


def cell(value: Cell) -> str:
    if isinstance(value, tuple):
        return f"<td data-v={value[0]!r}>{html.escape(value[1])}"
    if isinstance(value, int):
        return f"<td data-v={value}>{size_text(value)}"
    return f"<td>{html.escape(value)}"


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def timeline_place(number: int) -> str:
    return (
        f'<div class="timeline" id="timeline-{number}"></div>'
        f'<p id="moment-{number}">The picture needs JavaScript.</p>'
    )


def key(kinds: Sequence[str]) -> str:
    marks = (
        f'<span><svg viewBox="0 0 1 1"><rect width="1" height="1" fill="{COLOURS[kind]}"/></svg>'
        f" {html.escape(kind)}</span>"
        for kind in kinds
    )
    return f'<p class="key">{"".join(marks)}</p>'


def _node(node: Node, kinds: Sequence[str]) -> list[Any]:
    """Name, own bytes by kind, and the modules inside: what the script's treemap reads."""
    name, node = joined(node)
    own = [node.own.get(kind, 0) for kind in kinds]
    return [shown(name), own, [_node(part, kinds) for part in node.inside.values()]]


def _rows_table(report: MemoryReport) -> str:
    columns = {"module": "module", "kind": "kind", "bytes": "size", "count": "tensors"}
    sums: list[tuple[str | int, ...]] = [("the peak", "", report.peak_bytes, "")]
    if any(row.kind in BEYOND for row in report.rows):
        sums.append(("of the device", "", report.device_bytes, ""))
    rows = sorted(report.rows, key=lambda row: (row.kind in BEYOND, -row.bytes))
    return table(columns, [_row(row) for row in rows], sums, id="rows")


def _row(row: Row) -> tuple[str | int, ...]:
    return module_text(row.module), row.kind, row.bytes, str(row.count or "")


def _storages_table(report: MemoryReport) -> str:
    lines = lines_of_storages(report)
    present = {line[2] for line in lines}
    options = "".join(f"<option>{html.escape(kind)}" for kind in KINDS if kind in present)
    form = (
        '<form class="filter" data-table="storages" hidden>'
        '<label>words <input name="words" type="search"></label> '
        f'<label>kind <select name="kind"><option value="">all{options}</select></label> '
        '<label><input name="peak" type="checkbox" checked> at the peak</label>'
        "<output></output></form>"
    )
    return form + table(COLUMNS, lines, id="storages")
