"""The `ecornn` command.

Nothing here or in the commands' files imports torch at its top, so `--help` does not wait for
more than the package itself does.
"""

from __future__ import annotations

from typing import Annotated

import typer

from ecornn._version import __version__
from ecornn.cli.bench import app as bench_app
from ecornn.cli.doctor import doctor
from ecornn.cli.fit import fit
from ecornn.cli.profile import profile
from ecornn.cli.train import app as train_app
from ecornn.cli.tune import tune

app = typer.Typer(
    name="ecornn",
    help="Recurrent networks for PyTorch.",
    no_args_is_help=True,
    # A defect should look as it does in any Python program, and paste well into a report.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(doctor)
app.command()(profile)
app.command()(fit)
app.command()(tune)
app.add_typer(bench_app, name="bench")
app.add_typer(train_app, name="train")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ecornn {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and stop."
        ),
    ] = False,
) -> None:
    """Recurrent networks for PyTorch."""


def main() -> None:
    app()
