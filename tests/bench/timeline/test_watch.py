"""Rows of a timeline from calls that run, and operations of a GPU that is not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ecornn.bench.cases import Case
from ecornn.bench.contenders import PLAIN
from ecornn.bench.grids import RNN, TIMELINE
from ecornn.bench.report import render
from ecornn.bench.results import Row, from_json, to_text
from ecornn.bench.runners import run_case
from ecornn.bench.timeline import watch as watching
from ecornn.bench.timeline.operations import Operation
from ecornn.bench.timing import QUICK
from support.measured import results

CPU = torch.device("cpu")
CASE = Case("lstm", hidden=6, batch=2, steps=4)


def rows(monkeypatch: pytest.MonkeyPatch, seen: list[Operation]) -> list[Row]:
    def run(call: Callable[[], Any]) -> list[Operation]:
        trains = torch.is_grad_enabled()
        told = call()
        assert isinstance(told[-1], tuple) == trains  # results and gradients
        return seen

    monkeypatch.setattr(watching, "operations_of", run)
    return run_case(CASE, PLAIN, CPU, QUICK["cpu"], torch.Generator(), watching.watch)


def test_both_passes_of_everyone_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [Operation("some_gemm", 0, 40_000), Operation("forward", 50_000, 100_000)]
    found = rows(monkeypatch, seen)
    assert [row.contender for row in found] == ["ecornn", "torch.nn"]
    for row in found:
        assert "error" in row.metrics, "what is watched is checked too"
        for which in ("forward", "train"):
            assert row.number(f"{which}_steps_us") == pytest.approx(100 / 5 / 4)
            assert row.number(f"{which}_idle_us") == pytest.approx(10 / 5 / 4)
        assert "forward_us" not in row.metrics, "by the clock is another benchmark"


def test_a_gpu_of_which_nothing_is_seen_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for row in rows(monkeypatch, []):
        assert row.trouble == watching.UNSEEN
        assert set(row.metrics) <= {"not_measured", "error", "plan", "forward_plan"}


def test_the_page_has_a_table_and_what_took_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    seen = [Operation("some_gemm", 0, 40_000), Operation("forward", 50_000, 100_000)]
    made = results(*rows(monkeypatch, seen), benchmark=TIMELINE.name)
    made = from_json(json.loads(to_text(made)), "here")
    page = render({"timeline-x.json": made})
    assert "## Where the time of recurrent layers goes: timeline-x.json" in page
    line = next(line for line in page.splitlines() if line.startswith(f"| {CASE} | ecornn |"))
    assert line.split(" | ")[2:4] == ["5.00 / 5.00", "2.00 / 2.00"]
    assert "- torch.nn, lstm 6→6, B=2, T=4, fp32, forward and backward: 20.0 µs in" in page


def test_what_is_watched_is_measured_by_the_clock_too() -> None:
    assert set(TIMELINE.cases) < set(RNN.cases)
