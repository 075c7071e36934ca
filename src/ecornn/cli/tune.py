"""`ecornn tune`: measure kernels for one size on this GPU, and remember the fastest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ecornn.cli.train import EXIT_BAD_INPUT

if TYPE_CHECKING:
    from rich.console import Console

CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
NUMBERS = ("bf16", "fp16", "tf32", "tf32x3", "ieee")


def tune(
    hidden: Annotated[int, typer.Option(help="Hidden units, a multiple of 8.")] = 0,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 0,
    cell: Annotated[str, typer.Option(help=f"One of {', '.join(CELLS)}.")] = "lstm",
    numbers: Annotated[
        str,
        typer.Option(
            help="bf16, fp16, or float32 as tf32, tf32x3 (three products) or ieee; bf16 where it "
            "is left out, and with --again all of them.",
            show_default=False,
        ),
    ] = "",
    bidirectional: Annotated[bool, typer.Option(help="Both directions at once.")] = False,
    tiles: Annotated[int, typer.Option(help="How many of the model's best to measure.")] = 12,
    again: Annotated[
        bool,
        typer.Option(
            "--again",
            help="All sizes that were measured before, instead of one, or those in --numbers.",
        ),
    ] = False,
) -> None:
    """Measure persistent kernels for one size on this GPU; layers use the fastest from then on."""
    from rich.console import Console
    from rich.progress import Progress

    from ecornn.kernels.persistent import device, tune
    from ecornn.kernels.persistent.choose import Request
    from ecornn.kernels.persistent.tables import remember

    problem = device.unavailable()
    if again and (hidden or batch):
        problem = "--again measures the sizes that are known: leave --hidden and --batch out"
    elif not again and (hidden < 8 or hidden % 8 or batch < 1 or tiles < 1):
        problem = "--hidden must be a multiple of 8, --batch and --tiles at least 1"
    elif cell not in CELLS or numbers not in ("", *NUMBERS):
        problem = f"--cell is one of {', '.join(CELLS)}, --numbers one of {', '.join(NUMBERS)}"
    if problem is not None:
        typer.echo(f"cannot tune: {problem}", err=True)
        raise typer.Exit(EXIT_BAD_INPUT)
    console = Console()
    if again:
        _tune_again(console, numbers)
        return
    numbers, directions = numbers or "bf16", 2 if bidirectional else 1
    entries = []
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("measuring", total=2)
        for kernel in ("forward", "backward"):
            ask = Request(kernel, cell, numbers, hidden, batch, directions)
            found = tune.tune([ask], 0, tiles)
            entries += found
            what = f"{found[0]['microseconds']:.2f} µs a step" if found else "nothing fits"
            progress.console.print(f"{kernel} {cell} {numbers} {hidden} × {batch}: {what}")
            progress.advance(bar)
    console.print(f"remembered in {remember(entries)}")


def _tune_again(console: Console, numbers: str) -> None:
    from rich.progress import Progress

    from ecornn.kernels.persistent import tune
    from ecornn.kernels.persistent.choose import known_requests
    from ecornn.kernels.persistent.tables import remember

    entries = []
    try:
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("compiling, then measuring", total=len(known_requests(numbers)))
            for done, again in enumerate(tune.tuned_again(0, numbers), 1):
                entries.append(again.entry)
                ask, now = again.entry["request"], again.entry["microseconds"]
                size = " ".join(str(ask[name]) for name in ("kernel", "cell", "numbers"))
                size += f" {ask['hidden']} × {ask['batch']}" + " × 2" * (ask["directions"] - 1)
                progress.console.print(f"{size}: {again.before:.3f} µs a step, now {now:.3f}")
                progress.update(bar, completed=done, total=done + again.left)
    finally:  # what was measured outlives an interruption
        if entries:
            console.print(f"remembered in {remember(entries)}")
