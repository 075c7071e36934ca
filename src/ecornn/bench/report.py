"""docs/results.md and the plots it shows, made from the files in benchmarks/results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ecornn.bench.cases import Case
from ecornn.bench.compare import by_target, judge, pairs, ratio, tally, worst
from ecornn.bench.draw import draw, missing
from ecornn.bench.plot import Plot, plots_of
from ecornn.bench.results import Results, Row, Scalar, layer_rows, read
from ecornn.bench.targets import TARGETS
from ecornn.errors import InvalidInput

RESULTS = Path("benchmarks/results")
PAGE = Path("docs/results.md")
#: Beside the page.
PLOTS = Path("plots")

HEAD = """\
# Results

This page is made by `ecornn bench report` from the files in `benchmarks/results/`: do not edit \
it. [benchmarks.md](benchmarks.md) says how they are measured and what the figures mean.
"""
NOTHING_YET = "Nothing has been measured yet.\n"
TIMES = ("forward_us", "train_us")

CasesByContenders = dict[tuple[str, ...], dict[Case, dict[str, Row]]]


@dataclass(frozen=True)
class Report:
    """`files`: how many the page was made from. `plots`: those it shows. `not_drawn`: why these
    are still as they were, None where they were drawn."""

    files: int
    plots: tuple[Path, ...]
    not_drawn: str | None


def write_report(folder: Path, page: Path) -> Report:
    """Make the page and its plots anew. The page is the same with and without what draws."""
    if not folder.is_dir():
        raise InvalidInput(
            "results", f"no folder {folder}", "the folder of results", "run in the project's root"
        )
    if not page.parent.is_dir():
        raise InvalidInput(
            "out", f"no folder {page.parent}", "an existing one", "run in the project's root"
        )
    files = read_all(folder)
    page.write_text(render(files), encoding="utf-8")
    plots = {
        page.parent / _path(name, plot): plot
        for name, results in files.items()
        for plot in plots_of(results)
    }
    not_drawn = missing() if plots else None
    if not_drawn is None:
        for path, plot in plots.items():
            path.parent.mkdir(exist_ok=True)
            draw(plot, path)
    return Report(len(files), tuple(plots), not_drawn)


def read_all(folder: Path) -> dict[str, Results]:
    return {path.name: read(path) for path in sorted(folder.glob("*.json"))}


def render(files: Mapping[str, Results]) -> str:
    sections = [_section(name, results) for name, results in files.items()]
    return "\n".join([HEAD, *(sections or [NOTHING_YET])])


def _section(name: str, results: Results) -> str:
    parts = [f"## {name}\n", f"{_listed(results.environment)}.\n"]
    parts += [f"![{plot.title}]({_path(name, plot).as_posix()})\n" for plot in plots_of(results)]
    groups = _by_contenders(results.rows)
    for contenders, cases in groups.items():
        parts.append(_times(contenders, cases))
    for contenders, cases in groups.items():
        parts.append(_errors(contenders, cases))
        parts.append(_memory(contenders, cases))
    parts += [_troubles(results), _earlier(results), _targets(results)]
    return "\n".join(part for part in parts if part)


def _path(name: str, plot: Plot) -> Path:
    """From the page's folder to the plot of the results in the file `name`."""
    return PLOTS / f"{Path(name).stem}-{plot.name}.svg"


def _listed(environment: Mapping[str, Scalar]) -> str:
    return "; ".join(f"{k} {v}" for k, v in environment.items() if v is not None)


def _by_contenders(rows: Iterable[Row]) -> CasesByContenders:
    """Cases that the same contenders ran share a table."""
    found: CasesByContenders = {}
    for case, contenders in layer_rows(rows).items():
        found.setdefault(tuple(contenders), {})[case] = contenders
    return found


def _times(contenders: Sequence[str], cases: Mapping[Case, Mapping[str, Row]]) -> str:
    title = (
        "Microseconds a time step, forward / forward and backward: "
        "median ± distance between the quartiles\n"
    )
    compared = pairs(contenders)
    heads = ["layer", *contenders, *(f"{theirs} ÷ {mine}" for mine, theirs in compared)]
    body = []
    for case, rows in cases.items():
        cells = [_both(_time(rows[name], metric) for metric in TIMES) for name in contenders]
        cells += [times_as_fast(rows[mine], rows[theirs]) for mine, theirs in compared]
        body.append([str(case), *cells])
    return f"{title}\n{_table(heads, body)}"


def times_as_fast(mine: Row, theirs: Row) -> str:
    return _both(_figure(ratio(mine, theirs, metric), "{:.2f}×") for metric in TIMES)


def _errors(contenders: Sequence[str], cases: Mapping[Case, Mapping[str, Row]]) -> str:
    body = [
        [str(case), *(_figure(rows[name].number("error"), "{:.1e}") for name in contenders)]
        for case, rows in cases.items()
    ]
    title = "Largest relative error of any result or gradient against float64\n"
    return f"{title}\n{_table(['layer', *contenders], body)}"


def _memory(contenders: Sequence[str], cases: Mapping[Case, Mapping[str, Row]]) -> str:
    counted = [
        name
        for name in contenders
        if any(rows[name].number("kept_bytes") is not None for rows in cases.values())
    ]
    if not counted:
        return ""
    body = []
    for case, rows in cases.items():
        unit = case.sequence_bytes
        cells = [
            _both(_over(rows[name].number(metric), unit) for metric in ("kept_bytes", "peak_bytes"))
            for name in counted
        ]
        body.append([str(case), *cells])
    title = "Memory kept for the backward pass / at the peak, in units of T·B·H elements\n"
    return f"{title}\n{_table(['layer', *counted], body)}"


def _troubles(results: Results) -> str:
    lines = [
        f"- {row.contender}, {row.case}: {_escaped(row.trouble)}"
        for row in results.rows
        if row.trouble is not None
    ]
    return "Without figures\n\n" + "\n".join(lines) + "\n" if lines else ""


def _earlier(results: Results) -> str:
    lines = [
        f"- {row.contender}, {row.case}: {_listed(row.environment)}"
        for row in results.rows
        if row.environment
    ]
    return "Measured in an earlier run\n\n" + "\n".join(lines) + "\n" if lines else ""


def _targets(results: Results) -> str:
    judgements = judge(results, TARGETS)
    if not judgements:
        return ""
    body = [
        [target.name, str(target), tally(found), _figure(worst(found), f"{{:.2f}}{target.unit}")]
        for target, found in by_target(judgements)
    ]
    title = f"Targets, over their cases: {tally(judgements)}\n"
    return f"{title}\n{_table(['of', 'target', 'cases', 'worst'], body)}"


def _time(row: Row, metric: str) -> str:
    median, spread = row.number(metric), row.number(f"{metric}_spread")
    if median is None:
        return "–"
    return digits(median) + ("" if spread is None else f" ± {spread / median:.0%}")


def digits(value: float) -> str:
    """Three of them, or all before the point."""
    places = next((p for p, least in enumerate((100, 10, 1)) if value >= least), None)
    return f"{value:.3g}" if places is None else f"{value:,.{places}f}"


def _over(value: float | None, unit: int) -> str:
    return _figure(None if value is None else value / unit, "{:.1f}")


def _figure(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _both(texts: Iterable[str]) -> str:
    return " / ".join(texts)


def _table(heads: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    rule = ["---", *(["---:"] * (len(heads) - 1))]
    rows = (heads, rule, *body)
    lines = [" | ".join(_escaped(cell) for cell in row) for row in rows]
    return "".join(f"| {line} |\n" for line in lines)


def _escaped(text: str | None) -> str:
    return (text or "").replace("|", "\\|").replace("<", "&lt;")
