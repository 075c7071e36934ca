from __future__ import annotations

import io
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

import ecornn
from ecornn.bench import calls, environment, runners
from ecornn.bench.cases import Case
from ecornn.bench.contenders import Contender, contenders_for
from ecornn.bench.grids import RNN, SMOKE, Grid
from ecornn.bench.record import record
from ecornn.bench.results import read, write
from ecornn.bench.timing import QUICK, Effort
from ecornn.errors import InvalidInput
from ecornn.planner import ExecutionPlan
from ecornn.spec import RnnSpec
from support.measured import plain

CPU = torch.device("cpu")
DOCUMENTATION = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
CASE = Case("lstm", 6, 2, 4)
PLANS = {"plan", "forward_plan"}
TIMES = {"forward_us", "forward_us_spread", "train_us", "train_us_spread"}
TINY = Effort(1e-5, rounds=2, fewest_rounds=2, budget_s=0.01, warm_up_s=0.0, checks=2)


class NoisyLSTM(torch.nn.LSTM):
    """Wrong from the third call on: right when it is checked first, wrong later."""

    calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output, state = super().forward(*args, **kwargs)
        self.calls += 1
        return output * (1 if self.calls < 3 else 2), state


class BrokenLSTM(torch.nn.LSTM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no kernel for this\nand a second line")


def contender(name: str, kind: type) -> Contender:
    return Contender(name, SimpleNamespace(LSTM=kind))


def run(*contenders: Contender) -> dict[str, dict[str, Any]]:
    rows = runners.run_case(CASE, contenders, CPU, TINY, torch.Generator())
    return {row.contender: dict(row.metrics) for row in rows}


def silent() -> Console:
    return Console(file=io.StringIO())


def test_the_smoke_grid_runs_from_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "smoke.json"
    recording = record(SMOKE, SMOKE.cases, {"cpu": TINY}, silent(), out)
    assert read(out).rows == tuple(rounded(recording.results, out))
    expected = [(c, k.name) for c in SMOKE.cases for k in contenders_for(c, CPU)]
    assert [row.key for row in recording.measured] == expected
    for row in recording.measured:
        ours = row.contender.startswith("ecornn")
        assert set(row.metrics) == TIMES | {"error"} | (PLANS if ours else set())
        assert all(f"metrics.{name}`" in DOCUMENTATION.read_text() for name in row.metrics)
        error = row.number("error")
        assert error is not None
        assert error < {"bf16": 2e-2, "fp32": 1e-5, "fp64": 1e-12}[row.case.dtype]
        # which of the two is larger is a matter of load at these sizes
        assert row.number("train_us") > 0  # type: ignore[operator]
        assert row.number("forward_us") > 0  # type: ignore[operator]


def rounded(results: Any, path: Path) -> Any:
    write(results, path)
    return read(path).rows


def test_contenders_that_are_wrong_are_not_timed() -> None:
    right = Contender("torch.nn", torch.nn)
    found = run(right, contender("noisy", NoisyLSTM), contender("broken", BrokenLSTM))
    assert set(found["torch.nn"]) >= TIMES
    assert set(found["noisy"]) == {"error", "failed"}
    assert found["noisy"]["error"] == pytest.approx(1.0, rel=0.1)
    assert found["broken"] == {"failed": "RuntimeError: no kernel for this"}


def test_nobody_left_is_no_error() -> None:
    assert set(run(contender("broken", BrokenLSTM))) == {"broken"}


def test_a_contender_that_cannot_be_captured_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(call: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(runners, "Replay", refuse)
    found = run(Contender("ecornn+graph", ecornn.nn, graph=True))
    assert "stream is capturing" in found["ecornn+graph"]["not_measured"]
    assert set(found["ecornn+graph"]) >= PLANS


TORCH_S = ("aten", "none", "network")


class PlanningLSTM(torch.nn.LSTM):
    """Leaves calls without gradients to torch."""

    def explain(self, x: Any, hx: Any = None) -> ExecutionPlan:
        spec = RnnSpec("lstm", 6, 6, needs_grad=torch.is_grad_enabled())
        names = ("persistent", "gates", "direct") if spec.needs_grad else TORCH_S
        return ExecutionPlan(spec, *names, "a test")


def test_both_calls_say_who_runs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training step of ours beside a forward pass that is torch's, and in a graph the reverse."""
    found = run(contender("ecornn", PlanningLSTM))["ecornn"]
    assert found["plan"] == "persistent, direct, keeps gates"
    assert found["forward_plan"] == "aten, network, keeps none"

    def planned(spec: RnnSpec) -> ExecutionPlan:
        assert spec.captured
        names = TORCH_S if spec.needs_grad else ("persistent", "none", "direct")
        return ExecutionPlan(spec, *names, "a test")

    def at_once(function: Any) -> tuple[Any, Any]:
        return SimpleNamespace(replay=lambda: None), function()

    monkeypatch.setattr(calls, "plan", planned)
    monkeypatch.setattr(calls, "capture", at_once)
    graph = Contender("ecornn+graph", SimpleNamespace(LSTM=PlanningLSTM), graph=True)
    found = run(graph)["ecornn+graph"]
    assert found["plan"] == "aten, network, keeps none"
    assert found["forward_plan"] == "persistent, direct, keeps none"


def test_on_cuda_everyone_is_also_replayed() -> None:
    names = [c.name for c in contenders_for(CASE, torch.device("cuda"))]
    assert names == ["ecornn", "torch.nn", "ecornn+graph", "torch.nn+graph"]
    mixed = Case("lstm", 6, 2, 4, lengths=True)
    names = [c.name for c in contenders_for(mixed, torch.device("cuda"))]
    assert "ecornn lengths+graph" in names
    assert "torch.nn padded+graph" in names


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA GPU")
def test_the_cuda_grid_needs_a_gpu() -> None:
    with pytest.raises(InvalidInput, match="ecornn doctor"):
        record(RNN, RNN.cases, QUICK, silent())


class TestRecording:
    grid = Grid("smoke", "cpu", (CASE,))

    def test_a_second_run_replaces_its_rows_and_keeps_the_others(self, tmp_path: Path) -> None:
        out = tmp_path / "smoke.json"
        other = Case("gru", 5, 2, 3)
        record(Grid("smoke", "cpu", (CASE, other)), (CASE, other), {"cpu": TINY}, silent(), out)
        recording = record(self.grid, self.grid.cases, {"cpu": TINY}, silent(), out)
        assert {row.case for row in recording.measured} == {CASE}
        assert [row.case for row in read(out).rows] == [CASE, CASE, other, other]

    def test_a_file_that_does_not_fit_is_refused_before_anything_runs(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(runners, "run_case", None)
        write(plain((1, 1), (1, 1)), tmp_path / "cpu.json")
        (tmp_path / "bad.json").write_text("nonsense")
        for out in ("cpu.json", "bad.json", "missing/x.json", "."):
            with pytest.raises(InvalidInput):
                record(self.grid, self.grid.cases, QUICK, silent(), tmp_path / out)

    def test_what_was_measured_outlives_an_interruption(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        measure = runners.run_case
        done: list[Case] = []

        def interrupted(case: Case, *args: Any) -> Any:
            if done:
                raise KeyboardInterrupt
            done.append(case)
            return measure(case, *args)

        monkeypatch.setattr(runners, "run_case", interrupted)
        out = tmp_path / "smoke.json"
        with pytest.raises(KeyboardInterrupt):
            record(SMOKE, SMOKE.cases, {"cpu": TINY}, silent(), out)
        assert {row.case for row in read(out).rows} == set(SMOKE.cases[:1])


class TestEnvironment:
    def test_it_names_machine_and_versions(self) -> None:
        found = environment.describe(CPU)
        assert found["torch"] == torch.__version__
        assert found["ecornn"] == ecornn.__version__
        assert found["threads"] == torch.get_num_threads()
        assert found["cpu"]
        assert "gpu" not in found

    def test_the_commit_is_that_of_this_checkout_alone(self, tmp_path: Path) -> None:
        assert environment.commit(tmp_path) is None
        git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@y"]
        package = tmp_path / "src" / "ecornn"
        elsewhere = tmp_path / ".venv" / "ecornn"
        for folder in (package, elsewhere):
            folder.mkdir(parents=True)
            (folder / "a.py").write_text("")
        for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
            subprocess.run([*git, *arguments], check=True, capture_output=True)
        found = environment.commit(package)
        assert found is not None
        assert len(found) == 40
        assert environment.commit(elsewhere) is None
        (package / "a.py").write_text("changed")
        assert environment.commit(package) == found + "+changes"

    def test_a_machine_without_its_name_in_a_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(environment, "CPU_FILE", tmp_path / "missing")
        assert environment.cpu_name()


def test_tf32_is_allowed_only_while_measuring_on_cuda() -> None:
    before = torch.get_float32_matmul_precision()
    with runners.tf32_where_it_is_faster(torch.device("cuda")):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before
    with runners.tf32_where_it_is_faster(CPU):
        assert torch.get_float32_matmul_precision() == before
