"""The section of docs/results.md on what the GPU does in a call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ecornn.bench.markdown import NONE, both, digits, escaped, folded, table
from ecornn.bench.results import Results, Row
from ecornn.bench.timeline.operations import KINDS

PASSES = {"forward": "forward", "train": "forward and backward"}
HEAD = """\
Microseconds a time step, by what the GPU ran, of calls in a row under torch's profiler: the steps \
of the recurrence; products of whole sequences (and, where no persistent kernel runs, of each \
step); fills, marks among them; all other operations. Idle is what lies between them, the \
profiler's own work included. Where a kernel begins before the one ahead has ended, the parts are \
more than the whole.
"""


PARTS = (*KINDS, "idle", "span")
HEADS = ("layer", "contender", *KINDS, "idle", "from first to last", "operations a call")


def timeline_parts(results: Results) -> list[str]:
    longest = [
        f"- {row.contender}, {row.case}, {said}: {escaped(str(told))}\n"
        for row in results.rows
        for which, said in PASSES.items()
        if (told := row.metrics.get(f"{which}_longest")) is not None
    ]
    if not longest:
        return []
    named = folded("What took the longest in a call", "".join(longest))
    return [HEAD, table(HEADS, lines_of(results.rows)), named]


def lines_of(rows: Iterable[Row]) -> Iterator[list[str]]:
    """A line a row that has figures, under `HEADS`."""
    for row in rows:
        cells = [_cell(row, f"{part}_us") for part in PARTS] + [_cell(row, "operations")]
        if any(cell.strip(f"{NONE} /") for cell in cells):
            yield [str(row.case), row.contender, *cells]


def _cell(row: Row, metric: str) -> str:
    found = (row.number(f"{which}_{metric}") for which in PASSES)
    return both(NONE if value is None else digits(value) for value in found)
