"""docs/results.md and the plots it shows, made from the files in benchmarks/results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ecornn.bench.cases import Case
from ecornn.bench.compare import Judgement, judge, pairs, ratio, tally
from ecornn.bench.contenders import is_ours
from ecornn.bench.draw import draw, missing
from ecornn.bench.glance import glance, put_into, targets_met
from ecornn.bench.grids import CPU, RNN, TIMELINE
from ecornn.bench.markdown import (
    both,
    digits,
    earlier,
    figure,
    folded,
    judged,
    listed,
    table,
    troubles,
)
from ecornn.bench.plot import Plot, plots_of
from ecornn.bench.profiling.record import BENCHMARK as PROFILER
from ecornn.bench.profiling.report import profiler_parts
from ecornn.bench.profiling.targets import PROFILER_TARGETS
from ecornn.bench.results import FORWARD_PLAN, TRAIN_PLAN, Results, Row, layer_rows, read
from ecornn.bench.targets import TARGETS
from ecornn.bench.timeline.report import timeline_parts
from ecornn.bench.training.cases import BENCHMARK
from ecornn.bench.training.report import training_parts
from ecornn.bench.training.targets import ECHO_TARGETS
from ecornn.errors import InvalidInput

RESULTS = Path("benchmarks/results")
PAGE = Path("docs/results.md")
#: Beside the page.
PLOTS = Path("plots")

README = Path("README.md")

HEAD = """\
# Results

This page is made by `ecornn bench report` from the files in `benchmarks/results/`: do not edit \
it. [benchmarks.md](benchmarks.md) says how they are measured and what the figures mean.
"""
AT_A_GLANCE = "## At a glance\n"
TARGETS_MET = "What the measurements were to show, over all cases, and what is missed and why:\n"
#: What a section is of, by its benchmark; the page has them in this order.
SUBJECTS = {
    RNN.name: "Recurrent layers",
    TIMELINE.name: "Where the time of recurrent layers goes",
    BENCHMARK: "Training steps with Echo",
    PROFILER: "The memory profiler",
    CPU.name: "Recurrent layers on the CPU",
}
NOTHING_YET = "Nothing has been measured yet.\n"
TIMES_HEAD = """\
### Times

Microseconds a time step, forward / forward and backward: median ± distance between the quartiles.
"""
MEMORY_HEAD = """\
### Memory

Kept for the backward pass / at the peak, in units of T·B·H elements.
"""
ERRORS_HEAD = "Largest relative error of any result or gradient against float64"
TIMES = ("forward_us", "train_us")
#: The backend that is torch's own kernels, as plans name it.
TORCH_S = "aten"
BY_TORCH = "### Run by torch's kernels: times of ecornn that say nothing of kernels of its own"

CasesByContenders = dict[tuple[str, ...], dict[Case, dict[str, Row]]]


@dataclass(frozen=True)
class Report:
    """`files`: how many the page was made from. `plots`: those it shows. `not_drawn`: why these
    are still as they were, None where they were drawn."""

    files: int
    plots: tuple[Path, ...]
    not_drawn: str | None


def write_report(folder: Path, page: Path, readme: Path | None = None) -> Report:
    """Make the page, its plots and the README's figures anew. The page is the same with and
    without what draws."""
    if not folder.is_dir():
        raise InvalidInput(
            "results", f"no folder {folder}", "the folder of results", "run in the project's root"
        )
    if not page.parent.is_dir():
        raise InvalidInput(
            "out", f"no folder {page.parent}", "an existing one", "run in the project's root"
        )
    files = read_all(folder)
    if readme is not None:  # before anything is written: it may not have the place
        told = put_into(_text_of(readme), glance(files), str(readme))
        readme.write_text(told, encoding="utf-8")
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


def _text_of(readme: Path) -> str:
    try:
        return readme.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(
            "readme", f"{readme}: {error}", "a file that can be read", "check the path"
        ) from error


def read_all(folder: Path) -> dict[str, Results]:
    """In the order of the page."""
    found = {path.name: read(path) for path in sorted(folder.glob("*.json"))}
    order = [*SUBJECTS]

    def place(name: str) -> int:
        benchmark = found[name].benchmark
        return order.index(benchmark) if benchmark in order else len(order)

    return {name: found[name] for name in sorted(found, key=place)}


def render(files: Mapping[str, Results]) -> str:
    if not files:
        return f"{HEAD}\n{NOTHING_YET}"
    judgements = {name: _judged(results) for name, results in files.items()}
    counted = [
        (_title(name, results), tally(judgements[name]))
        for name, results in files.items()
        if judgements[name]
    ]
    parts = [HEAD]
    if made := glance(files, whole=True):
        parts += [AT_A_GLANCE, made]
    if counted:
        parts += [TARGETS_MET, targets_met(counted)]
    for name, results in files.items():
        heading = f"## {_title(name, results)}\n\n{listed(results.environment)}.\n"
        parts += [heading, _section(name, results, judgements[name])]
    return "\n".join(parts)


def _title(name: str, results: Results) -> str:
    return f"{SUBJECTS.get(results.benchmark, 'Measurements')}: {name}"


def _judged(results: Results) -> tuple[Judgement, ...]:
    if results.benchmark == BENCHMARK:
        return judge(results, ECHO_TARGETS)
    if results.benchmark == PROFILER:
        return judge(results, PROFILER_TARGETS)
    return judge(results, TARGETS)


def _section(name: str, results: Results, judgements: Sequence[Judgement]) -> str:
    if results.benchmark == BENCHMARK:
        parts = training_parts(results)
    elif results.benchmark == PROFILER:
        parts = profiler_parts(results)
    elif results.benchmark == TIMELINE.name:
        parts = timeline_parts(results)
    else:
        parts = _layer_parts(name, results)
    parts += [troubles(results), judged(judgements), earlier(results)]
    return "\n".join(part for part in parts if part)


def _layer_parts(name: str, results: Results) -> list[str]:
    groups = _by_contenders(results.rows)
    return [
        *(f"![{plot.title}]({_path(name, plot).as_posix()})\n" for plot in plots_of(results)),
        TIMES_HEAD,
        *(_times(contenders, cases) for contenders, cases in groups.items()),
        _left_to_torch(results.rows),
        _together(MEMORY_HEAD, [_memory(*group) for group in groups.items()]),
        folded(ERRORS_HEAD, "\n".join(_errors(*group) for group in groups.items())),
    ]


def _together(head: str, tables: Sequence[str]) -> str:
    found = [one for one in tables if one]
    return "\n".join([head, *found]) if found else ""


def _path(name: str, plot: Plot) -> Path:
    """From the page's folder to the plot of the results in the file `name`."""
    return PLOTS / f"{Path(name).stem}-{plot.name}.svg"


def _by_contenders(rows: Iterable[Row]) -> CasesByContenders:
    """Cases that the same contenders ran share a table."""
    found: CasesByContenders = {}
    for case, contenders in layer_rows(rows).items():
        found.setdefault(tuple(contenders), {})[case] = contenders
    return found


def _times(contenders: Sequence[str], cases: Mapping[Case, Mapping[str, Row]]) -> str:
    compared = pairs(contenders)
    heads = ["layer", *contenders, *(f"{theirs} ÷ {mine}" for mine, theirs in compared)]
    body = []
    for case, rows in cases.items():
        cells = [both(_time(rows[name], metric) for metric in TIMES) for name in contenders]
        cells += [times_as_fast(rows[mine], rows[theirs]) for mine, theirs in compared]
        body.append([str(case), *cells])
    return table(heads, body)


def _left_to_torch(rows: Iterable[Row]) -> str:
    """Calls of ours whose plan names torch's kernels. Beside torch.nn they say what a call through
    this package takes, and nothing of its own kernels."""
    ours = [row for row in rows if is_ours(row.contender) and TRAIN_PLAN in row.metrics]
    passes = [both(_passes_of_torch(row)) for row in ours]
    listed_rows = [
        f"- {row.contender}, {row.case}: {named}"
        for row, named in zip(ours, passes, strict=True)
        if named
    ]
    if listed_rows and len(set(passes)) == 1:
        listed_rows = [f"- all: {passes[0]}"]
    unknown = sum(FORWARD_PLAN not in row.metrics for row in ours)
    if unknown:
        listed_rows.append(
            f"- not recorded of {unknown} of {len(ours)} rows, which are older than this list: "
            "forward, and train in a graph; the planner may have left some to torch's kernels"
        )
    return f"{BY_TORCH}\n\n" + "\n".join(listed_rows) + "\n" if listed_rows else ""


def _passes_of_torch(row: Row) -> list[str]:
    plans = {"forward": row.metrics.get(FORWARD_PLAN), "train": row.metrics.get(TRAIN_PLAN)}
    return [name for name, plan in plans.items() if str(plan).startswith(f"{TORCH_S}, ")]


def times_as_fast(mine: Row, theirs: Row) -> str:
    return both(figure(ratio(mine, theirs, metric), "{:.2f}×") for metric in TIMES)


def _errors(contenders: Sequence[str], cases: Mapping[Case, Mapping[str, Row]]) -> str:
    body = [
        [str(case), *(figure(rows[name].number("error"), "{:.1e}") for name in contenders)]
        for case, rows in cases.items()
    ]
    return table(["layer", *contenders], body)


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
            both(_over(rows[name].number(metric), unit) for metric in ("kept_bytes", "peak_bytes"))
            for name in counted
        ]
        body.append([str(case), *cells])
    return table(["layer", *counted], body)


def _time(row: Row, metric: str) -> str:
    median, spread = row.number(metric), row.number(f"{metric}_spread")
    if median is None:
        return "–"
    return digits(median) + ("" if spread is None else f" ± {spread / median:.0%}")


def _over(value: float | None, unit: int) -> str:
    return figure(None if value is None else value / unit, "{:.1f}")
