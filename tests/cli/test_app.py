from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

import ecornn
from ecornn._version import __version__
from ecornn.cli.app import app, main


def test_main_is_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ecornn", "--version"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"ecornn {__version__}\n"


def test_a_module_runs_the_command_too() -> None:
    run = (sys.executable, "-m", "ecornn", "--version")
    said = subprocess.run(run, capture_output=True, text=True, check=True)
    assert said.stdout == f"ecornn {__version__}\n"


def test_version_is_the_package_s() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"ecornn {__version__}\n"
    assert ecornn.__version__ == __version__


def test_help_names_every_command() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in ("bench", "doctor", "fit", "profile", "train"):
        assert command in result.output


def test_an_unknown_command_is_a_usage_error() -> None:
    result = CliRunner().invoke(app, ["nonsense"])
    assert result.exit_code == 2
