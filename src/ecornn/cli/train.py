"""`ecornn train`: run a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Train a model with one of the recipes.", no_args_is_help=True)

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130  # as shells have it for a program that Ctrl-C ended


@app.callback()
def recipes() -> None:
    """Train a model with one of the recipes."""


@app.command("language-model")
def language_model(
    text: Annotated[
        Path | None,
        typer.Option(help="Any text file.", show_default="sources of Python's standard library"),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Stop after so many steps.", show_default="800, unless --minutes is given"
        ),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Stop after so many minutes; the first limit counts.")
    ] = None,
    hidden: Annotated[int, typer.Option(help="Size of the hidden state.")] = 256,
    layers: Annotated[int, typer.Option(help="LSTM layers.")] = 1,
    batch: Annotated[int, typer.Option(help="Places in the text that are read at once.")] = 32,
    window: Annotated[
        int, typer.Option(help="Characters the gradient goes back; the state goes on.")
    ] = 64,
    learning_rate: Annotated[float, typer.Option(help="The highest; it falls to a tenth.")] = 8e-3,
    tied: Annotated[bool, typer.Option(help="One matrix for embedding and output.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …, or auto.")] = "auto",
    seed: Annotated[int, typer.Option(help="The same seed gives the same model on a CPU.")] = 0,
    sample: Annotated[int, typer.Option(help="Characters to make up at the end.")] = 400,
) -> None:
    """Train an LSTM that predicts the next character of a text."""
    from rich.console import Console

    from ecornn.errors import InvalidInput
    from ecornn.recipes.language_model import TrainingOptions, run

    try:
        options = TrainingOptions(
            text=text,
            steps=steps,
            minutes=minutes,
            hidden=hidden,
            layers=layers,
            batch=batch,
            window=window,
            learning_rate=learning_rate,
            tied=tied,
            device=device,
            seed=seed,
            sample=sample,
        )
        outcome = run(options, Console())
    except InvalidInput as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_BAD_INPUT) from None
    if outcome.training.stopped == "interrupt":
        raise typer.Exit(EXIT_INTERRUPTED)
