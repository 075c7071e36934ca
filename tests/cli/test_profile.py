"""`ecornn profile`: what it runs, writes and compares, and how it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from ecornn.cli.app import app
from ecornn.profiler import MemoryReport

STEPS = """
import torch
from torch import nn

def make_step(batch=8, device=None):
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.zeros(batch, 16)

    def step():
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    return step, model, optimizer

class Step:
    def __init__(self):
        step, self.model, self.optimizer = make_step()
        self.inner = step
    def __call__(self):
        yield
        self.inner()

def raises():
    _, model, _ = make_step()
    def step():
        model(torch.zeros(3, 16))
        raise KeyError("the reason")
    return step, model

def raises_once():
    step, model, optimizer = make_step()
    calls = []
    def first_fails():
        calls.append(1)
        step()
        if len(calls) == 1:
            raise KeyError("only at first")
    return first_fails, model

def too_large():
    _, model, _ = make_step()
    def step():
        kept = model(torch.zeros(3, 16))
        torch.empty(2**60)
    return step, model

def reads():
    _, model, _ = make_step()
    return (lambda: model(torch.zeros(3, 16)).sum().item()), model

def broken():
    return 1 / 0

def nothing():
    return 5

def no_model():
    return print, 5

number = 4
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("steps_here", "importing_here", "faulty_here"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "steps_here.py").write_text(STEPS)
    (tmp_path / "importing_here.py").write_text("import not_installed_anywhere")
    (tmp_path / "faulty_here.py").write_text("x = ")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["profile", *arguments])


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", ["make_step", "Step"])
def test_one_step_is_observed_and_written(device: str, name: str) -> None:
    outs = ("report.json", "report.html", "report.csv", "report.trace.json")
    options = [part for out in outs for part in ("--out", out)]
    result = run(f"steps_here:{name}", "--device", device, *options)
    assert result.exit_code == 0, result.output
    report = MemoryReport.from_json(Path("report.json").read_text())
    assert report.device == device
    assert f"({report.peak_bytes:,} bytes) on {device}" in result.output
    # The observed step is not the first: the optimizer has its state.
    weights = report.by_kind()["weights"]
    assert report.by_kind()["optimizer state"] == pytest.approx(2 * weights, abs=64)
    assert weights == 4 * (16 * 32 + 32 + 32 * 4 + 4)
    assert Path("report.html").read_text().startswith("<!doctype html>")
    assert json.loads(Path("report.trace.json").read_text())["traceEvents"]
    for out in outs:
        assert f"written: {out}" in result.output


def test_what_making_it_again_would_free_is_told_where_asked() -> None:
    result = run("steps_here:make_step", "--device", "cpu", "--what-if", "--out", "report.json")
    assert result.exit_code == 0, result.output
    assert "cheap frees" in result.output
    report = MemoryReport.from_json(Path("report.json").read_text())
    assert report.what_if[0].kept_bytes == max(report.timeline.bytes["feature maps"])
    assert "in the optimizer's step" in result.output, "where it would not help"
    assert "cheap frees" in run("report.json").output, "a report keeps it"


def test_the_batch_reaches_the_function_and_reports_are_compared() -> None:
    for batch in ("8", "512"):
        assert (
            run("steps_here:make_step", "--batch", batch, "--out", f"{batch}.json").exit_code == 0
        )
    result = run("512.json", "--against", "8.json", "--out", "change.html", "--depth", "1")
    assert result.exit_code == 0, result.output
    reports = [MemoryReport.from_json(Path(f"{n}.json").read_text()) for n in (8, 512)]
    inputs = [report.by_kind()["inputs"] for report in reports]
    assert inputs == [8 * 16 * 4, 512 * 16 * 4]
    assert "difference" in result.output
    assert "Memory of a training step: 8 and 512" in Path("change.html").read_text()


@pytest.mark.parametrize("warm_up", [(), ("--warm-up", "0")])
def test_a_step_that_raises_is_told_with_the_report_up_to_there(warm_up: tuple[str, ...]) -> None:
    result = run("steps_here:raises", *("--device", "cpu", *warm_up, "--out", "report.json"))
    assert result.exit_code == 1
    assert "KeyError: 'the reason'" in result.output
    assert "steps_here.py" in result.output
    assert "the step raised KeyError; correct it" in result.output
    assert "cli/" not in result.output  # none of our own frames
    report = MemoryReport.from_json(Path("report.json").read_text())
    assert "the reason" in (report.error or "")
    assert report.peak_bytes > 0


def test_a_step_that_runs_out_of_memory_shows_where_it_went() -> None:
    result = run("steps_here:too_large", "--device", "cpu")
    assert result.exit_code == 1
    assert "try --device meta" in result.output
    assert "feature maps" in result.output


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["steps_here:raises_once", "--device", "cpu"], 1, "KeyError: 'only at first'"),
        (["steps_here:reads", "--device", "meta"], 1, "try --device cpu"),
        (["steps_here:broken"], 1, "broken() raised ZeroDivisionError"),
        (["faulty_here:f"], 1, "importing faulty_here raised SyntaxError"),
        (["steps_here:nothing"], 2, "one that returns int, expected (step, model)"),
        (["steps_here:no_model"], 2, "one that returns (builtin_function_or_method, int)"),
        (["steps_here:number"], 2, "which is of type int, expected a function"),
        (["steps_here:make_setp"], 2, "did you mean make_step?"),
        (["not_here:f"], 2, "there is no module not_here"),
        (["importing_here:f"], 2, "install not_installed_anywhere"),
        (["steps_here"], 2, "put a colon"),
        (["steps_here:make_step", "--device", "tpu"], 2, "auto, cpu, cuda"),
        (["steps_here:make_step", "--device", "cuda:77"], 2, "--device meta"),
        (["steps_here:make_step", "--out", "a.xml"], 2, ".trace.json"),
        (["steps_here:make_step", "--out", "none/a.csv"], 2, "make none first"),
        (["missing.json"], 2, "ecornn profile"),
        (["steps_here:make_step", "--against", "steps_here.py"], 2, "a report in JSON"),
    ],
)
def test_what_cannot_be_done_is_told(arguments: list[str], code: int, words: str) -> None:
    if "--device" not in arguments:
        arguments = [*arguments, "--device", "cpu"]
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert words in " ".join(result.output.split())


def test_the_default_device_is_left_as_it_was() -> None:
    run("steps_here:raises", "--device", "meta")
    assert torch.get_default_device().type == "cpu"
