"""Real measurements of tiny models on the CPU; in this process, but for one."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

import ecornn
from ecornn.bench.models.step import make_step
from ecornn.bench.results import Row
from ecornn.bench.training import measure, worker
from ecornn.bench.training.build import NotMeasurable
from ecornn.bench.training.cases import ModelCase, make_case
from ecornn.bench.training.contenders import (
    ALL,
    CHECKPOINT,
    EAGER,
    ECHO,
    ECHO_EAGER,
    Contender,
    replayed,
)
from ecornn.bench.training.measure import (
    EFFORTS,
    Measurement,
    first_line,
    out_of_memory,
    predicted_peak,
)
from ecornn.bench.training.memory import peak_bytes
from ecornn.bench.training.record import Options, record
from ecornn.bench.training.report import tables
from ecornn.bench.training.schedule import Limits

CPU = torch.device("cpu")
STEP = make_case("lstm-lm", "step", tiny=True)


def measured(case: ModelCase, contender: Contender) -> Measurement:
    torch._dynamo.reset()
    found = Measurement(case, contender, CPU, EFFORTS["quick"])
    found.prepare()
    found.measure()
    return found


def test_a_step_has_time_memory_and_set_up() -> None:
    metrics = measured(STEP, EAGER).metrics
    assert set(metrics) == {
        *("setup_s", "step_ms", "step_ms_spread", "step_samples", "samples_per_s", "peak_bytes"),
    }
    assert metrics["step_samples"] == EFFORTS["quick"].steps, "nobody to take turns with"
    assert metrics["samples_per_s"] == pytest.approx(4e3 / float(metrics["step_ms"]))


def test_checkpoints_are_compared_with_eager() -> None:
    metrics = measured(STEP, CHECKPOINT).metrics
    assert metrics["error"] == 0
    assert metrics["bitwise"] == 1


def test_echo_is_compared_too_and_foretells_its_peak() -> None:
    found = measured(make_case("gpt2", "step", tiny=True), ECHO_EAGER)
    assert found.step is not None
    predicted = found.metrics["predicted_peak_bytes"]
    assert predicted == predicted_peak(found.step)
    assert float(predicted) == pytest.approx(peak_bytes(found.step), rel=0.05)


@pytest.mark.parametrize(
    ("contender", "autocast", "compared"),
    [
        (EAGER, True, False),  # it is what the others are compared with
        (replayed(EAGER), True, True),
        (replayed(CHECKPOINT), True, True),
        (replayed(ECHO), True, False),
        (replayed(ECHO), False, True),
        (ECHO, True, False),
        (ECHO, False, True),
    ],
    ids=str,
)
def test_what_rounds_elsewhere_is_not_compared(
    contender: Contender, autocast: bool, compared: bool
) -> None:
    step = make_step("resnet50", size="tiny", device="cpu")
    step.autocast = autocast
    case = make_case("resnet50", "step", tiny=True)
    found = Measurement(case, contender, CPU, EFFORTS["quick"], step=step)
    assert found._comparable() is compared


def test_a_peak_that_is_not_foretold_says_why() -> None:
    step = make_step("gpt2", size="tiny", device="cpu")
    assert predicted_peak(step) == "not a model of Echo's"
    step.run = ecornn.compile(step.model, codegen="eager")
    assert predicted_peak(step) == "no graph was compiled"


@pytest.mark.parametrize("name", ["gpt2", "nmt-50", "resnet50"])
def test_echo_s_gradients_are_eager_s_to_the_bit(name: str) -> None:
    metrics = measured(make_case(name, "check", tiny=True), ECHO_EAGER).metrics
    assert (metrics["error"], metrics["state_error"], metrics["bitwise"]) == (0, 0, 1)
    assert "failed" not in metrics


def test_a_batch_that_no_longer_fits_gives_way_to_a_smaller_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = Measurement(make_case("lstm-lm", "batch", tiny=True), EAGER, CPU, EFFORTS["quick"])
    found.prepare()
    first, timed = found.metrics["largest_batch"], found._timed

    def once_too_large() -> None:
        timed()
        if found.metrics["largest_batch"] == first:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(found, "_timed", once_too_large)
    found.turn()
    found.measure()
    assert found.metrics["refused_batch"] == first
    assert 0.8 * float(first) < float(found.metrics["largest_batch"]) < float(first)
    assert found.metrics["step_samples"] == EFFORTS["quick"].steps, "none of the larger batch"
    assert found.step is not None
    assert found.step.samples == found.metrics["largest_batch"]


def test_a_budget_that_cannot_be_met_is_no_failure() -> None:
    starved = replace(ECHO_EAGER, memory=0.01)
    with pytest.raises(NotMeasurable, match=r"refused: .* memory: got fraction 0.01.*KiB"):
        measured(make_case("gpt2", "step", tiny=True), starved)


def test_a_wrong_gradient_of_ours_has_failed_and_of_others_is_told() -> None:
    class Sabotaged(Measurement):
        def _first_steps(self) -> None:
            super()._first_steps()
            assert self.step is not None
            for parameter in self.step.model.parameters():
                parameter.register_hook(lambda gradient: 1.1 * gradient)

    for contender, says in ((ECHO_EAGER, "failed"), (CHECKPOINT, "wrong")):
        case = make_case("lstm-lm", "check", tiny=True)
        found = Sabotaged(case, contender, CPU, EFFORTS["quick"])
        torch._dynamo.reset()
        found.prepare()
        assert "relative error 1.0e-01" in str(found.metrics[says])
        assert found.metrics["eager_repeats"] == 1


def test_the_largest_batch_fits_and_is_timed() -> None:
    case = make_case("lstm-lm", "batch", tiny=True)
    found = Measurement(case, EAGER, CPU, EFFORTS["thorough"])
    found.prepare()
    found.measure()
    limit = (case.memory_gib or 0) * 2**30
    assert found.step is not None
    assert found.step.samples == found.metrics["largest_batch"]
    assert float(found.metrics["peak_bytes"]) <= limit
    assert float(found.metrics["refused_batch"]) > float(found.metrics["largest_batch"])
    assert float(found.metrics["samples_per_s"]) > 0


def test_a_search_begins_where_the_step_was_measured() -> None:
    """Of the first batch the file has the peak, so that it need not be tried."""
    case = make_case("lstm-lm", "batch", tiny=True)
    peak = int(measured(STEP, EAGER).metrics["peak_bytes"])
    found = Measurement(case, EAGER, CPU, replace(EFFORTS["quick"], enough=0.8), peak)
    found.prepare()
    alone = Measurement(case, EAGER, CPU, replace(EFFORTS["quick"], enough=0.8))
    alone.prepare()
    assert float(found.metrics["tries"]) == float(alone.metrics["tries"]) - 1
    assert found.metrics["largest_batch"] == pytest.approx(alone.metrics["largest_batch"], rel=0.2)


def test_memory_that_others_took_is_no_batch_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(measure, "build", full)
    monkeypatch.setattr(measure, "WAIT_S", 0.0)
    case = make_case("lstm-lm", "batch", tiny=True)
    with pytest.raises(NotMeasurable, match="no batch was found that fits"):
        measured(case, EAGER)
    monkeypatch.setattr(measure, "taken_by_others", lambda limit, _: limit == 2**21)
    with pytest.raises(NotMeasurable, match="fewer --workers"):
        measured(case, EAGER)


def test_memory_that_others_took_for_a_while_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build, batches = measure.build, []

    def full_at_first(contender: Any, case: Any, device: str, batch: int) -> Any:
        batches.append(batch)
        if len(batches) <= 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return build(contender, case, device, batch)

    monkeypatch.setattr(measure, "build", full_at_first)
    monkeypatch.setattr(measure, "taken_by_others", lambda *_: len(batches) <= 2)
    monkeypatch.setattr(measure, "WAIT_S", 0.0)
    found = measured(make_case("lstm-lm", "batch", tiny=True), EAGER)
    assert batches[0] == batches[1] == batches[2]
    assert float(found.metrics["largest_batch"]) >= batches[0]
    assert float(found.metrics["tries"]) < len(batches)


def test_a_limit_that_nothing_fits_is_told() -> None:
    case = ModelCase("lstm-lm", "batch", memory_gib=1e-9, size="tiny")
    with pytest.raises(NotMeasurable, match="fits 1e-09 GiB"):
        measured(case, EAGER)


def test_running_out_of_memory_is_known_inside_other_errors() -> None:
    wrapped = RuntimeError("a compiler's")
    wrapped.__cause__ = torch.OutOfMemoryError("full")
    assert out_of_memory(wrapped)
    assert not out_of_memory(RuntimeError("something else"))
    assert first_line(ValueError("one\ntwo")) == "ValueError: one"


class TestServing:
    def serve(self, monkeypatch: pytest.MonkeyPatch, contender: str) -> list[dict[str, Any]]:
        request = {"case": STEP.to_json(), "contender": contender, "device": "cpu"}
        request |= {"effort": "quick", "compilers": 1, "began": 0.0, "known_peak": None}
        said: list[dict[str, Any]] = []
        lines = "".join(json.dumps(line) + "\n" for line in ("turn", "turn", "measure"))
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        worker.serve(request, said.append)
        return said

    def test_it_is_ready_then_measures(self, monkeypatch: pytest.MonkeyPatch) -> None:
        effort = EFFORTS["quick"]
        ready, *turns, done = self.serve(monkeypatch, "eager")
        assert ready == {"ready": True, "turns": effort.turns, "further": effort.further}
        assert [said["timed"] for said in turns] == [effort.steps, 2 * effort.steps]
        assert all(0 <= said["uncertainty"] < 10 and said["median"] > 0 for said in turns)
        assert done["metrics"]["step_samples"] == 2 * effort.steps
        assert done["metrics"]["step_ms"] > 0

    @pytest.mark.parametrize(
        ("contender", "why"), [("echo", "failed"), ("torch.compile", "not_measured")]
    )
    def test_what_it_raises_is_a_message(
        self, monkeypatch: pytest.MonkeyPatch, contender: str, why: str
    ) -> None:
        def broken(self: Measurement) -> None:
            raise IndexError("off by one")

        monkeypatch.setattr(Measurement, "prepare", broken)
        said: list[dict[str, Any]] = []
        request = {"case": STEP.to_json(), "contender": contender, "device": "cpu"}
        told = {"effort": "quick", "compilers": 1, "began": 0.0, "known_peak": None}
        with pytest.raises(IndexError):
            worker.serve(request | told, said.append)
        assert said == [{"metrics": {why: "IndexError: off by one"}}]

    def test_what_cannot_be_measured_is_no_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refused(self: Measurement) -> None:
            raise NotMeasurable("not here")

        monkeypatch.setattr(Measurement, "prepare", refused)
        assert self.serve(monkeypatch, "echo") == [{"metrics": {"not_measured": "not here"}}]


def test_real_workers_measure_in_their_own_processes() -> None:
    from rich.console import Console

    options = Options("cpu", "quick", Limits(workers=2), contenders=("eager", "checkpoint"))
    rows = record([STEP], options, Console(file=io.StringIO())).measured
    assert [row.contender for row in rows] == ["eager", "checkpoint"]
    assert [row.trouble for row in rows] == [None, None]
    assert all((row.number("step_ms") or 0) > 0 for row in rows)
    assert rows[1].number("bitwise") == 1
    # the same tiny model in this process has the same peak: there is nothing else to count
    assert rows[0].number("peak_bytes") == measured(STEP, ALL["eager"]).metrics["peak_bytes"]


def test_a_search_that_time_ended_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("lstm-lm", "batch", tiny=True)
    effort = replace(measure.EFFORTS["quick"], search_s=0.0)
    monkeypatch.setitem(measure.EFFORTS, "quick", effort)
    found = measured(case, EAGER)
    assert found.metrics["search_stopped"] == 1
    assert found.metrics["tries"] == 1
    rows = (Row(case, "eager", found.metrics), Row(case, "echo", {"largest_batch": 70_000}))
    ((_, heads, lines),) = tables(rows)
    place = heads.index("batch")
    assert [line[place] for line in lines] == [f"≥ {found.metrics['largest_batch']:,}", "70,000"]
