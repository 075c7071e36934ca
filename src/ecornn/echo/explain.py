"""What Echo decided, for people: a table by module, JSON, and a page that needs nothing else."""

from __future__ import annotations

import html
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ecornn.echo.graph import NotUnderstood
from ecornn.echo.report import Choice, Foretold, GraphReport, Value
from ecornn.sizes import size_text

COLUMNS = ("module", "kept", "made again", "freed", "time added", "why")


@dataclass(frozen=True)
class Row:
    """The results of one module that the backward pass needs."""

    module: str
    kept_bytes: int
    freed_bytes: int
    seconds: float
    made_again: int
    why: str

    def cells(self) -> tuple[str, ...]:
        return (
            self.module or "(the model)",
            size_text(self.kept_bytes),
            str(self.made_again),
            size_text(self.freed_bytes),
            f"{self.seconds * 1e6:.1f} µs",
            self.why,
        )


def rows_of(graph: GraphReport) -> list[Row]:
    """By module, those with most bytes first."""
    modules: dict[str, list[Value]] = {}
    for value in graph.values:
        modules.setdefault(value.module, []).append(value)
    found = []
    for module, values in modules.items():
        kept = [value for value in values if value.kept]
        again = [value for value in values if not value.kept and value.runs]
        largest = max(values, key=lambda value: value.bytes)
        found.append(
            Row(
                module,
                sum(value.bytes for value in kept),
                sum(value.bytes for value in again),
                sum(value.seconds for value in again),
                len(again),
                f"{largest.operator.removeprefix('aten.')}: {largest.why}",
            )
        )
    return sorted(found, key=lambda row: -(row.kept_bytes + row.freed_bytes))


class Explanation:
    """Prints itself; `to_json()` and `to_html()` are for programs and for others."""

    def __init__(
        self,
        graphs: Sequence[GraphReport],
        notes: Sequence[str] = (),
        *,
        rehearse: Callable[[], Callable[[], int] | None] | None = None,
    ) -> None:
        """`rehearse`: of a model of which only parts are compiled, gives as long as that lives what
        tells the most that a step holds beside what is there before it."""
        self.graphs, self.notes, self._rehearse = list(graphs), list(notes), rehearse
        #: Are the graphs all that the model runs?
        self.whole = rehearse is None
        #: Why a peak that was asked for is not predicted, where the reason is no graph's.
        self.not_predicted: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_rehearse": None}  # a copy does not know the model

    def predicted_peak_bytes(self, held: int | None = None) -> int | None:
        """The most that a forward and backward pass of the model holds. `held`: what is there when
        a step begins, weights and batch among it; by default the inputs of the graph alone, if it
        is one. Several graphs run once each, in the order in which they were compiled; what one has
        returned is taken to stay, and what runs between them is not counted. Where only parts of
        the model are compiled, a step like the first one is rehearsed. None if some graph's code is
        not known, or the rehearsal is not possible; `not_predicted` says why."""
        if not self.whole:
            return None if held is None else self._rehearsed(held)
        told = [graph.foretold for graph in self.graphs]
        known = all(g.not_foretold is None and g.calls == 1 for g in self.graphs)
        if not told or not known or (held is None and len(told) > 1):
            return None
        found = [one for one in told if one is not None]
        start = found[0].inputs if held is None else held
        return start + _most_of_sequence(found)

    def _rehearsed(self, held: int) -> int | None:
        rehearse = None if self._rehearse is None else self._rehearse()
        if rehearse is None:
            self.not_predicted = "the model is gone, or this is a copy: ask its own explain()"
            return None
        try:
            return held + rehearse()
        except NotUnderstood as error:
            self.not_predicted = str(error)
            return None

    def to_json(self) -> str:
        graphs = []
        for graph in self.graphs:
            told: dict[str, Any] = asdict(graph)
            told["predicted_peak_bytes"] = graph.predicted_peak_bytes
            told["modules"] = [asdict(row) for row in rows_of(graph)]
            graphs.append(told)
        return json.dumps({"notes": self.notes, "graphs": graphs}, indent=1)

    def __str__(self) -> str:
        from rich.console import Console

        stream = io.StringIO()
        console = Console(file=stream, width=140, color_system=None)
        for note in self.notes:
            console.print(note, highlight=False, markup=False)
        for graph in self.graphs:
            for line in _head(graph):
                console.print(line, highlight=False, markup=False)
            if graph.values:
                console.print(_table(graph))
        return stream.getvalue().rstrip()

    __repr__ = __str__

    def to_html(self) -> str:
        """A page of its own, without scripts and without anything from elsewhere."""
        parts = [f"<p>{html.escape(note)}</p>" for note in self.notes]
        for graph in self.graphs:
            head = _head(graph)
            parts.append(f"<h2>{html.escape(head[0])}</h2>")
            parts.append(f"<p>{'<br>'.join(map(html.escape, head[1:]))}</p>")
            if graph.values:
                parts.append(_html_table(COLUMNS, [row.cells() for row in rows_of(graph)]))
                parts.append(_html_values(graph))
        return _PAGE.format(body="\n".join(parts))


def _most_of_sequence(passes: Sequence[Foretold]) -> int:
    """Forward passes run in order, backward passes in the opposite one. What earlier graphs have
    returned and kept is there while later ones run, and what later ones leave of gradients while
    the backward passes of earlier ones do."""
    most = before = 0
    after = sum(one.gradients for one in passes)
    for one in passes:
        after -= one.gradients
        most = max(most, before + one.forward, before + one.backward + after)
        before += one.results + one.kept
    return most


def _head(graph: GraphReport) -> list[str]:
    generated = f"{graph.codegen} ({graph.codegen_reason})"
    lines = [f"{graph.name}: memory {graph.memory}, code generation {generated}"]
    if graph.fallback is not None:
        lines.append(f"left to torch's own partitioner: {graph.fallback}")
    if graph.vector_products:
        lines.append(f"products with a vector that are written as sums: {graph.vector_products}")
    if graph.single_sums:
        lines.append(f"sums of rows with one entry that are written as that: {graph.single_sums}")
    lines += graph.output_losses
    if graph.fused_cells:
        lines.append(f"torch's fused cells that are written out: {graph.fused_cells}")
    if graph.sums is not None:
        lines.append(graph.sums)
    lines += graph.forms
    lines += [layer.told() for layer in graph.recurrent]
    if graph.chosen is None or graph.keep_all is None:
        if graph.fallback is None:
            lines.append("no backward pass was planned: the graph needs no gradient")
        return [*lines, *_refused(graph)]
    times = f", called {graph.calls} times" if graph.calls > 1 else ""
    chosen, before = graph.chosen, graph.keep_all
    share = 100 * chosen.seconds_added / graph.step_seconds if graph.step_seconds else 0.0
    kept = f"{size_text(chosen.kept_bytes)}, {size_text(before.kept_bytes)} when all is kept"
    if graph.gpu_bytes is not None:
        most = f"{size_text(graph.gpu_bytes)}, inputs and weights included"
        lines.append(f"no plan of little time fits the GPU: more is taken, to stay within {most}")
    lines += [
        f"plan: {chosen.strategy}{times}",
        *_peaks(graph, chosen, before),
        f"kept between the passes by one call: {kept}",
        f"predicted time added: {chosen.seconds_added * 1e6:.1f} µs, {share:.1f} % of both passes",
        *([graph.times] if graph.times else []),
    ]
    return [*lines, *_refused(graph)]


def _peaks(graph: GraphReport, chosen: Choice, before: Choice) -> list[str]:
    peaks = f"{size_text(chosen.peak_bytes)}, {size_text(before.peak_bytes)} when all is kept"
    if graph.codegen == "eager":
        return [f"predicted peak: {peaks}"]
    planned = f"peak estimated for the plan: {peaks}"
    if (found := graph.predicted_peak_bytes) is None:
        return [f"predicted peak: not known, {graph.not_foretold}", planned]
    over = [] if graph.over_budget is None else [graph.over_budget]
    tried = [f"compiled to choose among: {name}: {size_text(n)}" for name, n in graph.code_of]
    return [f"predicted peak: {size_text(found)}, from inductor's code", planned, *tried, *over]


def _refused(graph: GraphReport) -> list[str]:
    return [f"{strategy}: refused, {why}" for strategy, why in graph.refused]


def _table(graph: GraphReport) -> Any:
    from rich.table import Table

    table = Table(*COLUMNS, show_edge=False)
    for row in rows_of(graph):
        table.add_row(*row.cells())
    return table


def _html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _html_values(graph: GraphReport) -> str:
    columns = ("result", "operator", "module", "bytes", "kept", "made again", "why", "line")
    rows = [
        (
            *(value.name, value.operator, value.module, f"{value.bytes:,}"),
            *("yes" if value.kept else "no", f"{value.runs} times", value.why, value.line),
        )
        for value in sorted(graph.values, key=lambda value: -value.bytes)
    ]
    table = _html_table(columns, rows)
    return f"<details><summary>every result, the largest first</summary>{table}</details>"


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Echo: what is kept, what is made again</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem }}
table {{ border-collapse: collapse; width: 100% }}
th, td {{ text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #8884 }}
@media (prefers-color-scheme: dark) {{ body {{ background: #111; color: #ddd }} }}
</style></head><body><h1>Echo</h1>
{body}
</body></html>
"""
