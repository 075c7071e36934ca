"""The figures about the profiler, on tiny models."""

from __future__ import annotations

import gc
import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from ecornn.bench.models.step import make_step
from ecornn.bench.profiling import record as recording
from ecornn.bench.profiling.cases import CASES, profile_cases
from ecornn.bench.profiling.finding import finding
from ecornn.bench.profiling.measure import EFFORTS, Measurement, Timed, in_turns
from ecornn.bench.profiling.record import check_room, record
from ecornn.bench.profiling.search import search
from ecornn.bench.profiling.worker import serve
from ecornn.bench.results import read, read_case
from ecornn.bench.timing import Timing
from ecornn.bench.training.memory import GIB
from ecornn.bench.training.schedule import Limits
from ecornn.cli.app import app
from ecornn.errors import InvalidInput
from ecornn.profiler import profile, without_numbers

(GPT2,) = profile_cases(["gpt2"], tiny=True)
#: Of a case whose worker says some figures and then hangs.
HANGS = """
import json, sys, time
request = json.loads(sys.stdin.readline())
print(json.dumps({"so_far": {"peak_bytes": 1000}}), flush=True)
print(json.dumps({"so_far": {"rows_bytes": 1001}}), flush=True)
time.sleep(600)
"""
#: Of one that measures nothing.
PRETENDS = """
import json, sys
request = json.loads(sys.stdin.readline())
print(json.dumps({"ready": True}), flush=True)
sys.stdin.readline()
print(json.dumps({"metrics": {"step_ms": 2, "profile_ms": 3}}), flush=True)
"""


@pytest.mark.parametrize("truth", [1, 2, 99, 100, 101, 137, 1000])
@pytest.mark.parametrize("guess", [1, 100, 970])
def test_the_largest_is_found_from_any_guess(truth: int, guess: int) -> None:
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= truth

    assert search(fits, guess) == (truth, len(tried))
    assert {truth, truth + 1} <= set(tried), "both ends are seen"
    found, _ = search(fits, guess, grain=5)
    assert truth - 5 <= found <= truth


def test_a_search_where_nothing_fits_ends() -> None:
    assert search(lambda _: False, 100)[0] == 0


def test_figures_of_a_tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[dict[str, Any]] = []
    request = {"case": GPT2.to_json(), "device": "cpu", "effort": "quick", "began": 0.0}
    monkeypatch.setattr(sys, "stdin", io.StringIO("measure\n"))
    monkeypatch.setattr(gc, "collect", lambda: 0)  # takes longer here than all that is measured
    serve({**request, "threads": torch.get_num_threads()}, lambda one: said.append(deepcopy(one)))
    *told, ready, done = said
    found = done["metrics"]
    assert ready == {"ready": True}
    number = {name: value for name, value in found.items() if isinstance(value, int | float)}
    # torch's own count of its allocator on the CPU, and ours.
    assert number["rows_bytes"] == pytest.approx(number["peak_bytes"], rel=0.05)
    assert number["feature_map_bytes"] < number["tensors_bytes"] == number["rows_bytes"]
    assert number["cpu_bytes_off"] == number["meta_bytes_off"] == 0
    assert number["seen_batch"] < number["unseen_batch"]
    assert number["unseen_predicted_bytes"] == pytest.approx(number["unseen_peak_bytes"], rel=0.1)
    assert number["predicted_largest_batch"] == pytest.approx(number["largest_within"], rel=0.1)
    assert "largest_batch" not in number, "nothing is refused on the CPU"
    assert 0 < number["step_ms"] < number["observed_ms"]
    assert number["read_ms"] > number["step_ms"]
    assert number["profile_ms"] > number["step_ms"]
    assert "decoder_only.py:" in str(found["first_lines"])
    assert "peak_bytes" in told[0]["so_far"]
    assert "largest_within" not in told[2]["so_far"], "each part is told when it is done"
    assert "largest_within" in told[3]["so_far"]


def test_a_slow_minute_slows_all_that_is_timed() -> None:
    """And each comes first in turn, after the next-to-last of the round before."""
    done: list[str] = []
    around: list[str] = []

    class SlowAtFirst:
        def measure(self, call: Callable[[], object], repeats: int) -> float:
            call()
            return 2.0 if len(done) <= 8 else 1.0

    @contextmanager
    def observed() -> Iterator[None]:
        around.append("in")
        yield
        around.append("out")

    kinds = {
        "alone": Timed(lambda: done.append("alone")),
        "under": Timed(lambda: done.append("under"), around=observed),
    }
    found = in_turns(kinds, SlowAtFirst(), rounds=5)
    assert done == ["under", "alone", *["alone", "under", "under", "alone"] * 2, "alone", "under"]
    assert around == ["in", "out"] * 6
    assert found["alone"] == found["under"] == Timing(2.0, 1.0)


def test_the_places_of_attention_and_recurrent_layers_are_found() -> None:
    step = make_step("nmt", size="tiny", device="cpu", batch=32, length=24)
    step()
    found = finding(profile(step, step.model, step.optimizer), "nmt")
    assert (found["attention_place"], found["recurrent_place"]) == (1, 2)
    assert found["lines_named"] == 3
    assert "feature maps of decoder.attention" in str(found["first_rows"])
    assert "attention_nmt.py:" in str(found["first_lines"])
    other = make_step("gpt2", size="tiny", device="cpu")
    assert "attention_place" not in finding(profile(other, other.model), "gpt2")


def test_a_model_that_meta_tensors_cannot_run_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = profile_cases(["speech"], tiny=True)
    job = Measurement(case, torch.device("cpu"), EFFORTS["quick"])
    job._exact()
    assert job.metrics == {"cpu_bytes_off": 0, "meta_bytes_off": 0}
    monkeypatch.setattr(without_numbers, "RULES", {})
    job = Measurement(case, torch.device("cpu"), EFFORTS["quick"])
    job._exact()
    assert job.metrics["cpu_bytes_off"] == 0
    assert "ctc_loss" in str(job.metrics["meta_not_measured"])


def test_what_was_found_before_a_case_took_too_long_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "COMMAND", (sys.executable, "-c", HANGS))
    out = tmp_path / "profiler.json"
    shown = Console(file=io.StringIO())
    record([GPT2], shown, out, device="cpu", effort="quick", limits=Limits(1, 2.0))
    (row,) = read(out).rows
    assert (row.number("peak_bytes"), row.number("rows_bytes")) == (1000, 1001)
    assert "killed, as it had not answered" in str(row.trouble)


def test_processes_must_not_take_each_other_s_memory() -> None:
    cases = profile_cases()
    check_room(cases, 5, 139 * GIB)
    check_room(cases, 1, 64 * GIB)
    with pytest.raises(InvalidInput, match="--workers 1"):
        check_room(cases, 5, 64 * GIB)


def test_cases_are_read_again_and_refused_by_name() -> None:
    for case in (*profile_cases(), *profile_cases(tiny=True)):
        assert read_case(case.to_json()) == case
    assert [case.name for case in profile_cases()] == list(CASES)
    with pytest.raises(InvalidInput, match="lstm-lm"):
        profile_cases(["lstm-lm"])


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "COMMAND", (sys.executable, "-c", PRETENDS))
    out = tmp_path / "profiler.json"
    given = f"bench profiler --device cpu --tiny --quick --check --workers 2 --out {out}"
    result = CliRunner().invoke(app, given.split())
    assert result.exit_code == 0, result.output
    assert "Milliseconds a step" in result.output
    assert read(out).benchmark == "profiler"
    assert [row.number("profile_ms") for row in read(out).rows] == [3] * len(CASES)
    refused = CliRunner().invoke(app, ["bench", "profiler", "--device", "cpu", "--case", "gpt2"])
    assert refused.exit_code == 2
    assert "--tiny" in refused.output
