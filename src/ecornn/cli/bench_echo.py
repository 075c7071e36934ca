"""`ecornn bench echo`: whole training steps, by every way torch has and by ours."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ecornn.bench.results import Row

EXIT_FAILED = 1


Out = Annotated[
    Path | None,
    typer.Option(help="JSON file to write; rows that are in it already are replaced."),
]
CaseNames = Annotated[
    list[str] | None,
    typer.Option(help="Only this one, such as nmt-50; may be given several times."),
]
Parts = Annotated[
    list[str] | None,
    typer.Option(help="step, batch, check or plan; several times.", show_default="step"),
]
Contenders = Annotated[
    list[str] | None, typer.Option(help='Only this one, such as "eager"; several times.')
]
MissingOnly = Annotated[
    bool, typer.Option("--missing", help="Only cases of which the file lacks a row.")
]
Minutes = Annotated[
    float | None, typer.Option(min=0, help="Begin no case that would not be done by then.")
]
Workers = Annotated[int, typer.Option(min=1, help="Processes that are there at once.")]
AtOnce = Annotated[
    int | None,
    typer.Option(min=1, help="Of these, so many prepare side by side.", show_default="all"),
]
Together = Annotated[
    bool, typer.Option("--together", help="Processes of several cases prepare side by side.")
]
Timeout = Annotated[
    float, typer.Option(min=1, help="Seconds after which a process that prepares is killed.")
]
Unrolled = Annotated[
    bool, typer.Option("--unrolled", help="Also torch.compile of all of nmt-50: minutes.")
]
Device = Annotated[str, typer.Option(help="cuda or cpu.")]
Tiny = Annotated[bool, typer.Option("--tiny", help="Tiny models: to see that it works.")]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer samples: for minutes of a GPU.")]
Check = Annotated[bool, typer.Option("--check", help="Compare with the targets; 1 if one fails.")]


def echo(
    out: Out = None,
    case: CaseNames = None,
    part: Parts = None,
    contender: Contenders = None,
    missing: MissingOnly = False,
    minutes: Minutes = None,
    workers: Workers = 8,
    at_once: AtOnce = None,
    together: Together = False,
    timeout: Timeout = 150.0,
    unrolled: Unrolled = False,
    device: Device = "cuda",
    tiny: Tiny = False,
    quick: Quick = False,
    check: Check = False,
) -> None:
    """Training steps: time, memory and largest batch, eager, by torch's means and by Echo."""
    from rich.console import Console

    from ecornn.bench.compare import judge
    from ecornn.bench.training.cases import make_cases
    from ecornn.bench.training.record import Options, check_device, record
    from ecornn.bench.training.schedule import Limits
    from ecornn.bench.training.targets import ECHO_TARGETS
    from ecornn.cli.bench import bad_input_told, render_judgements

    console = Console()
    with bad_input_told():
        check_device(device, tiny=tiny)
        options = Options(
            device=device,
            effort="quick" if quick else "thorough",
            limits=Limits(workers, timeout, at_once=at_once),
            minutes=minutes,
            missing=missing,
            contenders=tuple(contender or ()),
            unrolled=unrolled,
            together=together,
        )
        cases = make_cases(case or (), part or ("step",), tiny=tiny)
        recording = record(cases, options, console, out)
    console.print(render_rows(recording.measured))
    for row in recording.measured:
        told = row.trouble or row.metrics.get("wrong")
        if told is not None:
            typer.echo(f"{row.contender}, {row.case}: {told}")
    failed = any("failed" in row.metrics for row in recording.measured)
    if check:
        judgements = judge(recording.results, ECHO_TARGETS)
        console.print(render_judgements(judgements))
        failed = failed or any(judgement.outcome == "failed" for judgement in judgements)
    if failed:
        raise typer.Exit(EXIT_FAILED)


def render_rows(rows: Iterable[Row]) -> RenderableType:
    """A table a part, with the columns of the page of results."""
    from rich.console import Group
    from rich.text import Text

    from ecornn.bench.training.report import tables
    from ecornn.cli.bench import table

    made = []
    for title, heads, lines in tables(rows):
        shown = table(title, *heads)
        for line in lines:
            shown.add_row(*(Text(cell) for cell in line))
        made.append(shown)
    return Group(*made)
