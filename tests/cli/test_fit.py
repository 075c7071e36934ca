"""`ecornn fit`: the largest batch is the largest, and what cannot be answered is told."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ecornn.cli.app import app
from ecornn.profiler import MemoryReport
from ecornn.sizes import size_text

STEPS = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

def make_step(batch=8, length=4):
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    x = torch.zeros(length, batch, 16)
    return (lambda: model(x).sum().backward()), model, torch.optim.SGD(model.parameters(), 0.1)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 64), nn.Linear(64, 16)
    def forward(self, x):
        return x + self.b(self.a(x).sigmoid().mul(2).tanh().exp().sin())

def make_blocks(batch=8, echo=None):
    model = nn.Sequential(Block(), Block())
    run = model
    if echo == "stand-in":  # compiling for each batch would take seconds
        run = lambda x: checkpoint_sequential(model, 2, x, use_reentrant=False)
    elif echo is not None:
        import ecornn
        run = ecornn.compile(model, memory=echo, codegen="eager")
    x = torch.zeros(batch, 16)
    return (lambda: run(x).sum().backward()), model

def no_batch():
    return make_step()

def raises(batch):
    step, model, _ = make_step()
    def bad():
        raise KeyError("the reason")
    return bad, model
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "fit_here", raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "fit_here.py").write_text(STEPS)


def run(command: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, [command, *arguments])


def peak_of(batch: int, length: int) -> int:
    sizes = ("--batch", str(batch), "--length", str(length))
    result = run("profile", "fit_here:make_step", "--device", "meta", *sizes, "--out", "p.json")
    assert result.exit_code == 0, result.output
    return MemoryReport.from_json(Path("p.json").read_text()).peak_bytes


def test_the_answer_fits_and_one_more_does_not() -> None:
    lengths = ("--length", "4", "--length", "9", "--batch", "50")
    options = ("--memory", "100KiB", "--device", "meta", "--out", "fit.json")
    result = run("fit", "fit_here:make_step", *options, *lengths)
    assert result.exit_code == 0, result.output
    fits = json.loads(Path("fit.json").read_text())["fits"]
    assert [one["length"] for one in fits] == [4, 9]
    for one in fits:
        largest, length = one["largest_batch"], one["length"]
        assert peak_of(largest, length) <= 100 * 1024 < peak_of(largest + 1, length)
        told = {row["batch"]: row["peak_bytes"] for row in one["peaks"]}
        assert told[50] == pytest.approx(peak_of(50, length), rel=0.03)
        assert f"the largest batch within 100.00 KiB: {largest}" in result.output


def test_it_answers_without_echo_and_with_it() -> None:
    options = ("--memory", "1MiB", "--device", "meta", "--echo", "stand-in", "--out", "fit.json")
    result = run("fit", "fit_here:make_blocks", *options)
    assert result.exit_code == 0, result.output
    plain, echo = json.loads(Path("fit.json").read_text())["fits"]
    assert (plain["echo"], echo["echo"]) == (None, "stand-in")
    assert echo["largest_batch"] > 1.2 * plain["largest_batch"]
    assert f"with Echo (stand-in): {echo['largest_batch']}" in result.output


def test_a_step_is_profiled_with_echo_and_compared() -> None:
    sizes = ("fit_here:make_blocks", "--device", "meta", "--batch", "512")
    assert run("profile", *sizes, "--out", "eager.json").exit_code == 0
    options = ("--echo", "min", "--against", "eager.json", "--out", "echo.json")
    result = run("profile", *sizes, *options)
    assert result.exit_code == 0, result.output
    eager, echo = [
        MemoryReport.from_json(Path(f"{name}.json").read_text()) for name in ("eager", "echo")
    ]
    assert echo.peak_bytes < eager.peak_bytes
    assert echo.by_kind()["feature maps"] < eager.by_kind()["feature maps"]
    change = echo.peak_bytes - eager.peak_bytes
    assert result.output.rstrip().splitlines()[-2].split()[0] == "sum"
    assert size_text(change) in result.output.rstrip().splitlines()[-2]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["fit_here:make_step", "--memory", "1KiB"], 1, "not even a batch of 1"),
        (["fit_here:make_step", "--memory", "much"], 2, "24GiB"),
        (["fit_here:make_step", "--memory", "1GiB", "--out", "a.txt"], 2, "a .json file"),
        (["fit_here:no_batch", "--memory", "1GiB"], 2, "add `batch` to its arguments"),
        (["fit_here:raises", "--memory", "1GiB", "--length", "3"], 2, "add `length`"),
        (["fit_here:make_step", "--memory", "1GiB", "--echo", "min"], 2, "ecornn.compile(model"),
        (["fit_here:raises", "--memory", "1GiB"], 1, "the step with batch 2 raised KeyError"),
        (["fit_here:missing", "--memory", "1GiB"], 2, "define missing there"),
        (["fit_here:make_step", "--memory", "1GiB", "--device", "tpu"], 2, "auto, cpu"),
    ],
)
def test_what_cannot_be_answered_is_told(arguments: list[str], code: int, words: str) -> None:
    if "--device" not in arguments:
        arguments = [*arguments, "--device", "meta"]
    result = run("fit", *arguments)
    assert result.exit_code == code, result.output
    assert words in " ".join(result.output.split())
