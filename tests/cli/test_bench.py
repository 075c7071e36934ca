from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from ecornn.bench import record as recording
from ecornn.bench import runners
from ecornn.bench.cases import Case
from ecornn.bench.grids import GRIDS
from ecornn.bench.record import Recording
from ecornn.bench.results import Results, Row, read, write
from ecornn.cli.app import app
from support.measured import PLAIN, plain, results, row

ONE = "cell=lstm dtype=fp32 lengths=false"


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


def pretend(monkeypatch: pytest.MonkeyPatch, found: Results) -> None:
    """Let `record` return made-up rows instead of measuring."""
    monkeypatch.setattr(recording, "record", lambda *_: Recording(found, found.rows))


def test_a_smoke_run_shows_and_writes_its_rows(tmp_path: Path) -> None:
    out = tmp_path / "smoke.json"
    threads = torch.get_num_threads()
    result = bench(
        "smoke", "--quick", "--check", "--threads", "1", "--cases", ONE, "--out", str(out)
    )
    assert result.exit_code == 0, result.output
    assert "torch.nn" in result.output
    assert "no targets" in result.output
    found = read(out)
    assert found.benchmark == "smoke"
    assert found.environment["threads"] == 1
    assert found.environment["effort"] == "quick"
    assert [r.contender for r in found.rows] == ["ecornn", "torch.nn"]
    assert torch.get_num_threads() == threads
    # a thorough run's rows do not go into a quick one's file
    refused = bench("smoke", "--threads", "1", "--cases", ONE, "--out", str(out))
    assert refused.exit_code == 2
    assert "effort = quick" in refused.output
    assert read(out) == found


@pytest.mark.parametrize(
    ("ours", "code", "says"), [(1.0, 0, "2 passed, 0 failed"), (1.5, 1, "1 passed, 1 failed")]
)
def test_a_missed_target_is_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, ours: float, code: int, says: str
) -> None:
    pretend(monkeypatch, plain((ours, 1.0), (1.0, 1.0)))
    result = bench("cpu", "--check")
    assert result.exit_code == code
    assert says in result.output
    assert bench("cpu").exit_code == 0, "nobody asked for the targets"


def test_a_wrong_result_is_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = row(PLAIN, "ecornn", 1, 1, failed="output: relative error 3.0e-01, allowed 1e-04")
    pretend(monkeypatch, results(wrong, row(PLAIN, "torch.nn", 1, 1)))
    result = bench("cpu")
    assert result.exit_code == 1
    assert f"ecornn, {PLAIN}: output: relative error 3.0e-01" in result.output


def test_a_contender_that_cannot_be_captured_is_told_and_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, results(row(PLAIN, "x+graph", 1, 1, not_measured="cannot be captured")))
    result = bench("cpu")
    assert result.exit_code == 0
    assert "cannot be captured" in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["smoke", "--cases", "nonsense"], "cases"),
        (["smoke", "--cases", "hidden=3"], "none of the 7 cases"),
        (["smoke", "--out", "missing/folder/x.json"], "out"),
        (["smoke", "--threads", "0"], "threads"),
        (["report", "--results", "missing"], "results"),
        (["nonsense"], "nonsense"),
    ],
)
def test_bad_input_is_told_in_one_line(arguments: list[str], says: str) -> None:
    result = bench(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.output
    if "error: " in result.stderr:
        assert result.stderr.count("\n") == 1


def test_a_bad_file_is_told_and_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "bad.json"
    out.write_text("[]")
    result = bench("smoke", "--quick", "--out", str(out))
    assert result.exit_code == 2
    assert "bad.json" in result.stderr
    assert out.read_text() == "[]"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA GPU")
@pytest.mark.parametrize("name", ["rnn", "timeline"])
def test_the_gpu_s_benchmarks_say_that_there_is_none(name: str) -> None:
    result = bench(name)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: device: got a machine on which torch finds no CUDA GPU")


def test_a_timeline_is_shown_by_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    metrics = {f"forward_{part}_us": 1.25 for part in ("steps", "products", "idle", "span")}
    pretend(monkeypatch, results(Row(PLAIN, "ecornn+graph", metrics), benchmark="timeline"))
    result = bench("timeline")
    assert result.exit_code == 0, result.output
    shown = " ".join(result.output.split())
    assert "ecornn+graph" in shown
    assert shown.count("1.25 / –") == 4


def test_an_interruption_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(runners, "run_case", interrupted)
    result = bench("smoke", "--quick")
    assert result.exit_code == 130
    assert "interrupted" in result.stderr


def test_the_report_is_made_from_files(tmp_path: Path) -> None:
    write(plain((1, 1), (1, 1)), tmp_path / "cpu.json")
    page = tmp_path / "results.md"
    result = bench("report", "--results", str(tmp_path), "--out", str(page))
    assert result.exit_code == 0
    assert "made from 1 file" in result.output
    assert "cpu.json" in page.read_text()


class TestPlots:
    case = Case("lstm", 512, 16, 256, "bf16")

    def report(self, folder: Path) -> Result:
        write(results(row(self.case, "ecornn", 1, 2), benchmark="rnn"), folder / "rnn-x.json")
        return bench("report", "--results", str(folder), "--out", str(folder / "results.md"))

    def test_they_are_named(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'ecornn[plot]'")
        result = self.report(tmp_path)
        assert result.exit_code == 0
        for name in ("rnn-x-over-hidden.svg", "rnn-x-over-batch.svg"):
            assert f"{tmp_path / 'plots' / name}: drawn" in result.output
            assert (tmp_path / "plots" / name).is_file()

    def test_it_is_told_where_they_cannot_be_drawn(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        result = self.report(tmp_path)
        assert result.exit_code == 1
        assert "pip install 'ecornn[plot]'" in result.stderr
        assert "rnn-x-over-hidden.svg: not drawn" in result.output
        assert (tmp_path / "results.md").is_file()


def test_a_target_of_memory_is_judged_in_its_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("lstm", 1024, 64, 256, "bf16")
    kept = 3 * case.sequence_bytes
    pretend(
        monkeypatch,
        results(row(case, "ecornn keep=states", 1, 1, kept_bytes=kept), benchmark="rnn"),
    )
    result = bench("rnn", "--check")
    assert result.exit_code == 1
    assert "3.000" in result.output
    assert "T·B·H" in result.output


def test_every_grid_is_a_command() -> None:
    result = bench("--help")
    assert all(name in result.output for name in (*GRIDS, "report"))


class TestEcho:
    tiny = ("echo", "--device", "cpu", "--tiny", "--quick", "--workers", "1")

    def test_a_tiny_run_on_the_cpu_shows_and_writes_its_rows(self, tmp_path: Path) -> None:
        out = tmp_path / "echo.json"
        some = ("--case", "lstm-lm", "--contender", "eager", "--out", str(out), "--check")
        result = bench(*self.tiny, *some)
        assert result.exit_code == 0, result.output
        assert "1 rows of 1 cases, about" in result.output
        assert "lstm-lm, B=4, tiny: a training step" in result.output
        assert "not measured" in result.output, "tiny models meet no targets"
        found = read(out)
        assert found.benchmark == "echo"
        assert [r.contender for r in found.rows] == ["eager"]
        assert (found.rows[0].number("peak_bytes") or 0) > 0

    def test_ours_that_fails_is_an_exit_code(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from ecornn.bench.training import record as training
        from ecornn.bench.training.cases import make_case

        case = make_case("nmt-50", "step", tiny=True)
        rows = (
            Row(case, "echo", {"failed": "RuntimeError: no"}),
            Row(case, "budget=0.1", {"error": 1.0, "wrong": "loss: relative error 1"}),
        )
        found = results(*rows, benchmark="echo")
        monkeypatch.setattr(training, "record", lambda *_: Recording(found, rows))
        result = bench(*self.tiny)
        assert result.exit_code == 1
        assert f"echo, {case}: RuntimeError: no" in result.output
        assert f"budget=0.1, {case}: loss: relative error 1" in result.output

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (("--case", "vgg"), "nmt-50"),
            (("--part", "speed"), "check"),
            (("--contender", "eco"), "eager"),
            (("--out", "missing/folder/x.json"), "out"),
        ],
    )
    def test_bad_input_is_told_in_one_line(self, arguments: tuple[str, ...], says: str) -> None:
        result = bench(*self.tiny, *arguments)
        assert result.exit_code == 2
        assert says in result.stderr
        assert result.stderr.count("\n") == 1

    def test_full_models_need_a_gpu(self) -> None:
        result = bench("echo", "--device", "cpu")
        assert result.exit_code == 2
        assert "--tiny" in result.stderr
        if not torch.cuda.is_available():
            assert "no CUDA GPU" in bench("echo").stderr
