"""`ecornn bench`: measure, compare, and make the page of results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ecornn.cli.bench_echo import echo
from ecornn.cli.bench_profiler import profiler

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from ecornn.bench.compare import AnyTarget, Judgement
    from ecornn.bench.results import Row

app = typer.Typer(help="Measure layers and training steps.", no_args_is_help=True)
app.command()(echo)
app.command()(profiler)

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130  # as shells have it for a program that Ctrl-C ended

Out = Annotated[
    Path | None,
    typer.Option(help="JSON file to write; rows that are in it already are replaced."),
]
Cases = Annotated[
    str, typer.Option(metavar="FILTER", help='Only some, such as "cell=lstm hidden=256,512".')
]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer samples: for minutes of a GPU.")]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Threads of torch.", show_default="as torch has it")
]
Check = Annotated[bool, typer.Option("--check", help="Compare with the targets; 1 if one fails.")]


@app.callback()
def benchmarks() -> None:
    """Measure layers and training steps beside torch's. See docs/benchmarks.md."""


@app.command()
def cpu(
    out: Out = None,
    cases: Cases = "",
    quick: Quick = False,
    threads: Threads = None,
    check: Check = False,
) -> None:
    """On the CPU: plain layers, and sequences of mixed lengths."""
    run("cpu", out, cases, quick=quick, threads=threads, check=check)


@app.command()
def rnn(
    out: Out = None,
    cases: Cases = "",
    quick: Quick = False,
    threads: Threads = None,
    check: Check = False,
) -> None:
    """On a CUDA GPU: sizes, batches and dtypes, called and replayed from a graph."""
    run("rnn", out, cases, quick=quick, threads=threads, check=check)


@app.command()
def timeline(
    out: Out = None,
    cases: Cases = "",
    threads: Threads = None,
) -> None:
    """On a CUDA GPU: what it runs in a call, by torch's profiler; of sizes hard to make quicker."""
    run("timeline", out, cases, quick=True, threads=threads, check=False)


@app.command()
def smoke(
    out: Out = None,
    cases: Cases = "",
    quick: Quick = False,
    threads: Threads = None,
    check: Check = False,
) -> None:
    """A few tiny cases on the CPU, to see that measuring works."""
    run("smoke", out, cases, quick=quick, threads=threads, check=check)


@app.command()
def report(
    results: Annotated[
        Path | None,
        typer.Option(help="Folder of JSON files.", show_default="benchmarks/results"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Page to write.", show_default="docs/results.md")
    ] = None,
    readme: Annotated[
        Path | None,
        typer.Option(
            help="File whose figures are made anew too.",
            show_default="README.md, where --out is not given",
        ),
    ] = None,
) -> None:
    """Make docs/results.md, its plots and the README's figures anew from the files of results."""
    from ecornn.bench.report import PAGE, README, RESULTS, write_report

    page = out or PAGE
    readme = README if readme is None and out is None else readme
    with bad_input_told():
        made = write_report(results or RESULTS, page, readme)
    for written in (page, *([] if readme is None else [readme])):
        typer.echo(f"{written}: made from {made.files} file{'' if made.files == 1 else 's'}")
    for plot in made.plots:
        typer.echo(f"{plot}: {'drawn' if made.not_drawn is None else 'not drawn'}")
    if made.not_drawn is not None:
        typer.echo(
            f"error: the page links to plots that are not up to date: {made.not_drawn}", err=True
        )
        raise typer.Exit(EXIT_FAILED)


def run(
    name: str, out: Path | None, cases: str, *, quick: bool, threads: int | None, check: bool
) -> None:
    """Measure a grid, write and show the rows, judge them."""
    from rich.console import Console

    from ecornn.bench.cases import parse_filter, select
    from ecornn.bench.compare import judge
    from ecornn.bench.grids import GRIDS, TIMELINE
    from ecornn.bench.record import record
    from ecornn.bench.runners import clock
    from ecornn.bench.targets import TARGETS
    from ecornn.bench.timeline.watch import watch
    from ecornn.bench.timing import QUICK, THOROUGH

    console, grid = Console(), GRIDS[name]
    watched = grid is TIMELINE
    with bad_input_told(), threads_set(threads):
        chosen = select(grid.cases, parse_filter(cases))
        efforts, measure = QUICK if quick else THOROUGH, watch if watched else clock
        recording = record(grid, chosen, efforts, console, out, measure)
    console.print((render_timeline if watched else render_times)(recording.measured))
    troubles = [row for row in recording.measured if row.trouble is not None]
    for row in troubles:
        typer.echo(f"{row.contender}, {row.case}: {row.trouble}")
    failed = any("failed" in row.metrics for row in troubles)
    if check:
        judgements = judge(recording.results, TARGETS)
        console.print(render_judgements(judgements))
        failed = failed or any(judgement.outcome == "failed" for judgement in judgements)
    if failed:
        raise typer.Exit(EXIT_FAILED)


def render_times(rows: Iterable[Row]) -> Table:
    from rich.text import Text

    from ecornn.bench.compare import pairs
    from ecornn.bench.markdown import digits
    from ecornn.bench.report import TIMES, times_as_fast
    from ecornn.bench.results import rows_by_case

    title = "µs a time step, forward and train; times as fast as its peers, forward / train"
    made = table(title, "layer", "contender", "forward", "train", "as fast as")
    for case, contenders in rows_by_case(rows).items():
        compared = pairs(contenders)
        for i, (name, row) in enumerate(contenders.items()):
            found = [row.number(metric) for metric in TIMES]
            peers = [theirs for mine, theirs in compared if mine == name]
            made.add_row(
                Text("" if i else str(case)),
                Text(name),
                *("–" if value is None else digits(value) for value in found),
                Text("\n".join(f"{p} {times_as_fast(row, contenders[p])}" for p in peers)),
                end_section=i == len(contenders) - 1,
            )
    return made


def render_timeline(rows: Iterable[Row]) -> Table:
    from rich.text import Text

    from ecornn.bench.timeline.report import HEADS, lines_of

    made = table("µs a time step by what the GPU ran, forward / train", *HEADS)
    for line in lines_of(rows):
        made.add_row(*map(Text, line))
    return made


def render_judgements(judgements: Sequence[Judgement]) -> RenderableType:
    """A line a target, then one for every case in which it is not met."""
    from rich.console import Group
    from rich.text import Text

    from ecornn.bench.compare import by_target, tally, worst

    colours = {"passed": "green", "failed": "red", "not measured": "yellow"}
    if not judgements:
        return Text("this benchmark has no targets")
    summary = table("targets", "of", "target", "cases", "worst")
    for target, found in by_target(judgements):
        figure = in_unit(worst(found), target)
        summary.add_row(Text(target.name), Text(str(target)), tally(found), figure or "–")
    missed = table("not met", "target", "case", "found", "outcome")
    for judgement in judgements:
        if judgement.outcome != "passed":
            missed.add_row(
                Text(str(judgement.target)),
                Text("–" if judgement.case is None else str(judgement.case)),
                Text(in_unit(judgement.found, judgement.target) or judgement.reason),
                Text(judgement.outcome, colours[judgement.outcome]),
            )
    total = Text(f"targets: {tally(judgements)}")
    return Group(summary, *([missed] if missed.rows else []), total)


def in_unit(figure: float | None, target: AnyTarget) -> str | None:
    return None if figure is None else f"{figure:.3f}{target.unit}"


def table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


@contextmanager
def bad_input_told() -> Iterator[None]:
    """One line for what the user can correct; what was written before Ctrl-C stays written."""
    from ecornn.errors import InvalidInput

    try:
        yield
    except InvalidInput as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_BAD_INPUT) from None
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None


@contextmanager
def threads_set(threads: int | None) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
