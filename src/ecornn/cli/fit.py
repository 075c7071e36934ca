"""`ecornn fit`: the largest batch within an amount of memory, without running out of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from ecornn.profiler import Fit

EXIT_FAILED = 1


Target = Annotated[
    str,
    typer.Argument(
        help="package.module:function that takes `batch` (and `length`, `echo`) and returns "
        "(step, model) or (step, model, optimizer)."
    ),
]
Batches = Annotated[
    list[int] | None, typer.Option(min=1, help="Predict this batch as well; several times.")
]
Lengths = Annotated[
    list[int] | None, typer.Option(min=1, help="Length of sequences; several times.")
]
Device = Annotated[
    str,
    typer.Option(
        help="meta needs no memory at all; on cuda and cpu small batches are run and drawn on; "
        "auto is the GPU if there is one, else meta."
    ),
]
Echo = Annotated[
    str | None,
    typer.Option(
        help="Also with Echo: given to the function as `echo`, the memory it may take, or auto."
    ),
]


def fit(
    target: Target,
    memory: Annotated[str, typer.Option(help="Such as 24GiB.")],
    batch: Batches = None,
    length: Lengths = None,
    device: Device = "auto",
    echo: Echo = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    """Predict the peak over the batch size, and the largest batch that fits."""
    from rich.console import Console

    from ecornn.cli.bench import bad_input_told
    from ecornn.cli.target import Raised, check_takes, load, read_device

    console = Console()
    with bad_input_told():
        check_out(out)
        where = read_device(device, without_gpu="meta")
        try:
            make = load(target)
            asked = {"batch": True, "length": bool(length), "echo": echo is not None}
            check_takes(make, *(name for name, wanted in asked.items() if wanted))
            ways = [None] if echo is None else [None, echo]
            found = [
                (way, one)
                for way in ways
                for one in predict(make, where, memory, length or [None], way, console)
            ]
        except Raised as raised:
            typer.echo(str(raised), err=True)
            raise typer.Exit(EXIT_FAILED) from None
    for way, one in found:
        console.print(render(one, batch or [], way))
    if out is not None:
        told = [{"echo": way, **as_data(one, batch or [])} for way, one in found]
        out.write_text(json.dumps({"target": target, "fits": told}, indent=1) + "\n")
        console.print(f"written: {out}", highlight=False, markup=False)
    if any(one.largest is None for _, one in found):
        raise typer.Exit(EXIT_FAILED)


def check_out(out: Path | None) -> None:
    from ecornn.errors import InvalidInput

    if out is not None and (out.suffix != ".json" or not out.parent.is_dir()):
        raise InvalidInput(
            "--out", str(out), "a .json file in a folder that exists", "name another"
        )


def predict(
    make: Any,
    device: str,
    memory: str,
    lengths: list[int] | list[None],
    echo: str | None,
    console: Console,
) -> list[Fit]:
    """One answer a length."""
    import torch
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from ecornn.cli.target import prepare, users_code
    from ecornn.profiler import fit

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with bars as progress:
        bar = progress.add_task("")

        def make_step(batch: int, length: int | None = None) -> tuple[Any, ...]:
            told = f"batch {batch}" + ("" if length is None else f", length {length}")
            progress.update(bar, description=f"{told} on {device}")
            given = {"batch": batch, "length": length, "echo": echo}
            if echo is not None:
                # Else torch compiles the second size for all sizes, and gives up after some.
                torch.compiler.reset()
            known = {name: value for name, value in given.items() if value is not None}
            made = prepare(make, device, **known)

            def step() -> None:
                with users_code(f"the step with {told}", device):
                    made.step()

            return step, made.model, made.optimizers

        return [fit(make_step, memory, length=length) for length in lengths]


def peaks(found: Fit, batches: list[int]) -> dict[int, tuple[int, str]]:
    """Bytes by batch and how they are known, for all that was observed or asked."""
    asked = {*batches, *([] if found.largest is None else [found.largest]), *found.observed}
    return {
        batch: (found.peak(batch), "observed" if batch in found.observed else "predicted")
        for batch in sorted(asked)
    }


def render(found: Fit, batches: list[int], echo: str | None = None) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from ecornn.cli.bench import table
    from ecornn.sizes import size_text

    assert found.memory is not None
    length = "" if found.length is None else f", length {found.length}"
    way = "" if echo is None else f", with Echo ({echo})"
    title = f"on {found.device}{length}{way}: {found.method}"
    made = table(title, "batch", "peak", "of memory", "")
    for batch, (peak, how) in peaks(found, batches).items():
        share = f"{peak / found.memory:.1%}"
        style = "bold" if batch == found.largest else ""
        made.add_row(*(Text(cell, style) for cell in (str(batch), size_text(peak), share, how)))
    within = f"within {size_text(found.memory)}"
    answer = f"the largest batch {within}{way}: {found.largest}"
    if found.largest_running is not None:
        answer += f"; for which the allocator finds room: {found.largest_running}"
    if found.largest is None:
        answer = f"not even a batch of 1 stays {within}"
    return Group(made, Text(answer), *(Text(f"note: {note}") for note in found.notes))


def as_data(found: Fit, batches: list[int]) -> dict[str, Any]:
    return {
        "device": found.device,
        "method": found.method,
        "length": found.length,
        "memory_bytes": found.memory,
        "largest_batch": found.largest,
        "largest_running_batch": found.largest_running,
        "peaks": [
            {"batch": batch, "peak_bytes": peak, "how": how}
            for batch, (peak, how) in peaks(found, batches).items()
        ],
        "notes": list(found.notes),
    }
