"""The section of docs/results.md on the profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ecornn.bench.markdown import NONE, digits, figure, table
from ecornn.bench.results import Results, Row
from ecornn.bench.training.cases import ModelCase

MIB = 2**20

Cell = Callable[[Row], str]
#: Columns of what was asked, not found.
ASKED = ("batch", "limit GiB")


def profiler_parts(results: Results) -> list[str]:
    return [f"### {title}\n\n{table(heads, lines)}" for title, heads, lines in tables(results.rows)]


def tables(rows: Iterable[Row]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Title, heads and lines; without models of which a table has no figures."""
    listed_rows = list(rows)
    for title, columns in TABLES.items():
        lines = [[_name(row), *(cell(row) for _, cell in columns)] for row in listed_rows]
        told = [
            line
            for line, row in zip(lines, listed_rows, strict=True)
            if any(cell(row) != NONE for head, cell in columns if head not in ASKED)
        ]
        if told:
            yield title, ["model", *(head for head, _ in columns)], told


def _name(row: Row) -> str:
    return row.case.name if isinstance(row.case, ModelCase) else str(row.case)


def _of_case(field: str, form: str) -> Cell:
    return lambda row: figure(getattr(row.case, field, None), form)


def _number(metric: str, form: str = "{:,.0f}", unit: float = 1.0) -> Cell:
    def cell(row: Row) -> str:
        value = row.number(metric)
        return figure(None if value is None else value / unit, form)

    return cell


def _off(said: str, so: str, form: str = "{:+.2%}") -> Cell:
    def cell(row: Row) -> str:
        one, other = row.number(said), row.number(so)
        return figure(None if one is None or not other else one / other - 1, form)

    return cell


def _over(metric: str, of: str, form: str) -> Cell:
    def cell(row: Row) -> str:
        one, other = row.number(metric), row.number(of)
        return figure(None if one is None or not other else one / other, form)

    return cell


def _time(metric: str) -> Cell:
    def cell(row: Row) -> str:
        median, spread = row.number(metric), row.number(f"{metric}_spread")
        if median is None:
            return NONE
        return digits(median) + ("" if spread is None else f" ± {spread / median:.0%}")

    return cell


def _text(metric: str) -> Cell:
    def cell(row: Row) -> str:
        return str(row.metrics.get(metric, NONE))

    return cell


def _exact(device: str) -> Cell:
    def cell(row: Row) -> str:
        reason = row.metrics.get(f"{device}_not_measured")
        return _number(f"{device}_bytes_off")(row) if reason is None else "no such operator"

    return cell


TABLES: dict[str, tuple[tuple[str, Cell], ...]] = {
    "The sum of a report's rows beside the peak of a step that nobody observes": (
        ("batch", _of_case("batch", "{}")),
        ("peak MiB", _number("peak_bytes", "{:,.1f}", MIB)),
        ("rows MiB", _number("rows_bytes", "{:,.1f}", MIB)),
        ("off", _off("rows_bytes", "peak_bytes")),
        ("tensors", _over("tensors_bytes", "rows_bytes", "{:.1%}")),
        ("feature maps", _over("feature_map_bytes", "rows_bytes", "{:.1%}")),
        ("reserved MiB", _number("reserved_bytes", "{:,.0f}", MIB)),
        ("rows with it", _number("rows_reserved_bytes", "{:,.0f}", MIB)),
        ("bytes off on the CPU", _exact("cpu")),
        ("on meta", _exact("meta")),
    ),
    "Predictions from small batches beside what is so": (
        ("seen up to", _number("seen_batch")),
        ("unseen batch", _number("unseen_batch")),
        ("predicted MiB", _number("unseen_predicted_bytes", "{:,.0f}", MIB)),
        ("measured MiB", _number("unseen_peak_bytes", "{:,.0f}", MIB)),
        ("off", _off("unseen_predicted_bytes", "unseen_peak_bytes")),
        ("limit GiB", _of_case("memory_gib", "{:g}")),
        ("largest within, predicted", _number("predicted_largest_batch")),
        ("measured", _number("largest_within")),
        ("off", _off("predicted_largest_batch", "largest_within", "{:+.1%}")),
        ("largest that runs, predicted", _number("predicted_running_batch")),
        ("measured", _number("largest_batch")),
        ("off", _off("predicted_running_batch", "largest_batch", "{:+.1%}")),
    ),
    "Milliseconds a step, median ± distance between the quartiles": (
        ("alone", _time("step_ms")),
        ("observed", _time("observed_ms")),
        ("with `profile(…)`", _time("profile_ms")),
        ("÷ alone", _over("profile_ms", "step_ms", "{:.2f}×")),
        ("and the report read", _time("read_ms")),
        ("÷ alone", _over("read_ms", "step_ms", "{:.2f}×")),
        ("after", _time("after_ms")),
        ("÷ alone", _over("after_ms", "step_ms", "{:.3f}×")),
    ),
    "What stands first": (
        ("rows", _text("first_rows")),
        ("lines of feature maps", _text("first_lines")),
    ),
}
