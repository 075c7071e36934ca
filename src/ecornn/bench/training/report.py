"""The section of docs/results.md on training steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from ecornn.bench.compare import ratio
from ecornn.bench.markdown import NONE, digits, escaped, figure, table
from ecornn.bench.results import Results, Row, rows_by_case
from ecornn.bench.training.cases import ModelCase
from ecornn.bench.training.contenders import EAGER, GRAPH

MIB = 2**20

Rows = Mapping[str, Row]
#: A column: its head, and what stands in it for a contender's row beside the case's others.
Column = tuple[str, Callable[[Row, Rows], str]]


def training_parts(results: Results) -> list[str]:
    parts = [
        f"### {title}\n\n{table(heads, lines)}" for title, heads, lines in tables(results.rows)
    ]
    return [*parts, _wrong(results)]


def tables(rows: Iterable[Row]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Title, heads and lines for each case; without lines and columns that have no figures."""
    for case, contenders in rows_by_case(rows).items():
        if not isinstance(case, ModelCase):
            continue
        columns = COLUMNS[case.part]
        body = [
            [name, *(cell(row, contenders) for _, cell in columns)]
            for name, row in contenders.items()
        ]
        told = [i for i in range(1, len(columns) + 1) if any(line[i] != NONE for line in body)]
        lines = [
            [line[0], *(line[i] for i in told)]
            for line in body
            if any(line[i] != NONE for i in told)
        ]
        if lines:
            heads = ["contender", *(columns[i - 1][0] for i in told)]
            yield TITLES[case.part].format(case=case), heads, lines


def _wrong(results: Results) -> str:
    lines = [
        f"- {row.contender}, {row.case}: {escaped(str(row.metrics['wrong']))}"
        for row in results.rows
        if "wrong" in row.metrics
    ]
    return "### Unlike eager\n\n" + "\n".join(lines) + "\n" if lines else ""


TITLES = {
    "step": "{case}: a training step, median ± distance between the quartiles",
    "batch": "{case}: the largest batch that fits",
    "check": "{case}: loss, gradients and buffers beside eager's",
    "plan": "{case}: the unrolled decoder, planned as a whole; plans of small graphs",
}


def _peer(row: Row) -> str:
    """Plain beside plain, replayed beside replayed."""
    return EAGER.name + (GRAPH if row.contender.endswith(GRAPH) else "")


def _time(row: Row, _: Rows) -> str:
    median, spread = row.number("step_ms"), row.number("step_ms_spread")
    if median is None:
        return NONE
    return digits(median) + ("" if spread is None else f" ± {spread / median:.0%}")


def _times_eager(metric: str, *, inverse: bool = False) -> Callable[[Row, Rows], str]:
    """Eager's figure over the row's, or the other way round."""

    def cell(row: Row, rows: Rows) -> str:
        peer = rows.get(_peer(row))
        found = None if peer is None else ratio(row, peer, metric)
        if found is not None and inverse:
            found = 1 / found if found else None
        return figure(found, "{:.2f}×")

    return cell


def _number(metric: str, form: str, unit: float = 1.0) -> Callable[[Row, Rows], str]:
    def cell(row: Row, _: Rows) -> str:
        value = row.number(metric)
        return figure(None if value is None else value / unit, form)

    return cell


def largest_batch(row: Row, _: Rows) -> str:
    """≥: of a search that time ended."""
    value = row.number("largest_batch")
    at_least = "≥ " if row.number("search_stopped") else ""
    return figure(value, at_least + "{:,.0f}")


def batch_over_eager(row: Row, rows: Rows) -> str:
    """Nothing where eager's may be larger."""
    peer = rows.get(EAGER.name)
    if peer is None or (peer.number("search_stopped") and row is not peer):
        return NONE
    at_least = "≥ " if row.number("search_stopped") and row is not peer else ""
    found = ratio(peer, row, "largest_batch")
    return figure(found, at_least + "{:.2f}×")


def _foretold(row: Row, _: Rows) -> str:
    predicted, measured = row.number("predicted_peak_bytes"), row.number("peak_bytes")
    if predicted is None or measured is None:
        return NONE
    return f"{predicted / MIB:,.0f} ({predicted / measured - 1:+.1%})"


COLUMNS: dict[str, tuple[Column, ...]] = {
    "step": (
        ("ms", _time),
        ("time ÷ eager", _times_eager("step_ms", inverse=True)),
        ("peak MiB", _number("peak_bytes", "{:,.0f}", MIB)),
        ("eager ÷ peak", _times_eager("peak_bytes")),
        ("foretold MiB", _foretold),
        ("samples/s", _number("samples_per_s", "{:,.0f}")),
        ("set-up s", _number("setup_s", "{:.1f}")),
        ("error", _number("error", "{:.1e}")),
    ),
    "batch": (
        ("batch", largest_batch),
        ("÷ eager", batch_over_eager),
        ("did not fit", _number("refused_batch", "{:,.0f}")),
        ("samples/s", _number("samples_per_s", "{:,.0f}")),
        ("÷ eager", _times_eager("samples_per_s", inverse=True)),
        ("ms", _time),
        ("peak MiB", _number("peak_bytes", "{:,.0f}", MIB)),
    ),
    "check": (
        ("error", _number("error", "{:.1e}")),
        ("error of buffers", _number("state_error", "{:.1e}")),
        ("equal bits", _number("bitwise", "{:.0f}")),
        ("eager repeats its bits", _number("eager_repeats", "{:.0f}")),
    ),
    "plan": (
        ("nodes", _number("plan_nodes", "{:,.0f}")),
        ("planning s", _number("plan_s", "{:.1f}")),
        ("worst peak ÷ the exact plan's", _number("plan_over_exact", "{:.3f}×")),
        ("small graphs", _number("exact_graphs", "{:.0f}")),
    ),
}
