"""`ecornn profile`: where the memory of one training step goes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from ecornn.profiler import MemoryReport

EXIT_FAILED = 1

Target = Annotated[
    str,
    typer.Argument(
        help="package.module:function that returns (step, model) or (step, model, optimizer); "
        "or the JSON file of an earlier report."
    ),
]
Out = Annotated[
    list[Path] | None,
    typer.Option(
        help="File to write: .html, .json, .csv, .trace.json, .png, .svg or .pdf; several times."
    ),
]
Device = Annotated[
    str,
    typer.Option(
        help="cpu, cuda, cuda:1 …, or meta, which needs no memory at all; auto is the GPU if there "
        "is one."
    ),
]
Batch = Annotated[int | None, typer.Option(min=1, help="Given to the function as `batch`.")]
Length = Annotated[int | None, typer.Option(min=1, help="Given to the function as `length`.")]
Operators = Annotated[
    bool,
    typer.Option(
        "--operators",
        help="On a GPU: observe every operator, which takes longer and tells all shapes.",
    ),
]
Echo = Annotated[
    str | None,
    typer.Option(help="Given to the function as `echo`: the memory that Echo may take, or auto."),
]


def profile(
    target: Target,
    out: Out = None,
    against: Annotated[
        Path | None,
        typer.Option(help="JSON file of another report: show what changed since then."),
    ] = None,
    device: Device = "auto",
    batch: Batch = None,
    length: Length = None,
    echo: Echo = None,
    warm_up: Annotated[
        int,
        typer.Option(
            min=0, help="Steps before the one that is observed: optimizers make their state there."
        ),
    ] = 1,
    what_if: Annotated[
        bool,
        typer.Option(
            "--what-if",
            help="Also what making feature maps again would free and cost, by module.",
        ),
    ] = False,
    operators: Operators = False,
    depth: Annotated[
        int | None, typer.Option(min=1, help="Levels of modules in the table.")
    ] = None,
) -> None:
    """Show which module holds how much memory at the peak of a training step, and why."""
    from rich.console import Console

    from ecornn.cli.bench import bad_input_told
    from ecornn.profiler.render.write import check

    console = Console()
    with bad_input_told():
        for path in out or ():
            check(path)
        before = None if against is None else read_report(against)
        if target.endswith(".json"):
            report = read_report(Path(target))
        else:
            options = {"batch": batch, "length": length, "echo": echo}
            given = {name: value for name, value in options.items() if value is not None}
            report = observe(
                *(target, device, given, warm_up, console), what_if=what_if, operators=operators
            )
        if before is None or against is None:
            show(report, out or [], depth, console)
        else:
            names = (against.stem, Path(target).stem)
            show_difference(before, report, names, out or [], console)
    if report.error is not None:
        raise typer.Exit(EXIT_FAILED)


def show(report: MemoryReport, outs: list[Path], depth: int | None, console: Console) -> None:
    from ecornn.profiler.render.text import render

    console.print(render(report, console, depth))
    for path in outs:
        report.write(path)
        console.print(f"written: {path}", highlight=False, markup=False)


def show_difference(
    before: MemoryReport,
    after: MemoryReport,
    names: tuple[str, str],
    outs: list[Path],
    console: Console,
) -> None:
    """A page is of both; other files are of the new report."""
    from ecornn.profiler.render import compare, write_difference
    from ecornn.profiler.render.difference import render

    difference = compare(before, after, names)
    console.print(render(difference, console.width))
    for path in outs:
        if path.suffix.lower() == ".html":
            write_difference(difference, path)
        else:
            after.write(path)
        console.print(f"written: {path}", highlight=False, markup=False)


def read_report(path: Path) -> MemoryReport:
    from ecornn.errors import InvalidInput
    from ecornn.profiler import MemoryReport

    remedy = "make one with: ecornn profile … --out report.json"
    try:
        return MemoryReport.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        told = f"{path} ({error.strerror})"
        raise InvalidInput("report", told, "a file that can be read", remedy) from error
    except InvalidInput as error:
        raise InvalidInput("report", str(path), error.expected, remedy) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput("report", f"{path}: {error!r}", "a report in JSON", remedy) from error


def observe(
    target: str,
    device: str,
    given: Mapping[str, int | str],
    warm_up: int,
    console: Console,
    *,
    what_if: bool = False,
    operators: bool = False,
) -> MemoryReport:
    """One step of what the target makes. Where it raises, that is told, and the report is of what
    was done up to there."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from ecornn.cli.target import Raised, check_takes, load, prepare, read_device, users_code
    from ecornn.profiler import profile

    where = read_device(device, without_gpu="cpu")
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    try:
        make = load(target)
        check_takes(make, *given)
        with bars as progress:
            bar = progress.add_task(f"making the model on {where}")
            prepared = prepare(make, where, **given)
            with users_code("the step", where):
                broken: Exception | None = None
                for number in range(warm_up):
                    progress.update(bar, description=f"warm-up step {number + 1} of {warm_up}")
                    try:
                        prepared.warm_up()
                    except Exception as error:  # told by the step that is observed, with a report
                        broken = error
                        break
                progress.update(bar, description="observing one step")
                report = profile(
                    prepared.step,
                    prepared.model,
                    prepared.optimizers,
                    what_if=what_if,
                    operators=operators,
                )
                if broken is not None:
                    raise broken
                return report
    except Raised as raised:
        typer.echo(str(raised), err=True)
        so_far: MemoryReport | None = getattr(raised.error, "memory_report", None)
        if so_far is None:
            raise typer.Exit(EXIT_FAILED) from None
        return so_far
