"""`ecornn bench profiler`: what the memory profiler says beside what is so."""

from __future__ import annotations

from typing import Annotated

import typer

from ecornn.cli.bench_echo import EXIT_FAILED, Check, Device, Out, Quick, Tiny

CaseNames = Annotated[
    list[str] | None,
    typer.Option(help="Only this one, such as gpt2; may be given several times."),
]
Workers = Annotated[
    int, typer.Option(min=1, help="Processes that measure memory at once; time is alone.")
]
Timeout = Annotated[
    float,
    typer.Option(min=1, help="Seconds after which a process is killed; what it found is kept."),
]


def profiler(
    out: Out = None,
    case: CaseNames = None,
    workers: Workers = 5,
    timeout: Timeout = 150.0,
    device: Device = "cuda",
    tiny: Tiny = False,
    quick: Quick = False,
    check: Check = False,
) -> None:
    """The memory profiler: its sum, its predictions and what it costs, beside the true ones."""
    from rich.console import Console
    from rich.text import Text

    from ecornn.bench.compare import judge
    from ecornn.bench.profiling.cases import profile_cases
    from ecornn.bench.profiling.record import record
    from ecornn.bench.profiling.report import tables
    from ecornn.bench.profiling.targets import PROFILER_TARGETS
    from ecornn.bench.training.schedule import Limits
    from ecornn.cli.bench import bad_input_told, render_judgements, table

    console = Console()
    with bad_input_told():
        recording = record(
            profile_cases(case or (), tiny=tiny),
            console,
            out,
            device=device,
            effort="quick" if quick else "thorough",
            limits=Limits(workers, timeout),
        )
    for title, heads, lines in tables(recording.measured):
        shown = table(title, *heads)
        for line in lines:
            shown.add_row(*(Text(cell) for cell in line))
        console.print(shown)
    for row in recording.measured:
        if row.trouble is not None:
            typer.echo(f"{row.case}: {row.trouble}")
    failed = any("failed" in row.metrics for row in recording.measured)
    if check:
        judgements = judge(recording.results, PROFILER_TARGETS)
        console.print(render_judgements(judgements))
        failed = failed or any(judgement.outcome == "failed" for judgement in judgements)
    if failed:
        raise typer.Exit(EXIT_FAILED)
