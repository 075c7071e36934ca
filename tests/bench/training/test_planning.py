"""How long plans take and how good they are, measured on the tiny decoder and on small graphs."""

from __future__ import annotations

import sys

import pytest
import torch

from ecornn.bench.report import render
from ecornn.bench.results import Results, Row
from ecornn.bench.training import planning
from ecornn.bench.training.cases import planned_case
from ecornn.bench.training.contenders import ECHO
from ecornn.bench.training.measure import EFFORTS, Measurement
from ecornn.bench.training.targets import PLAN


def measured() -> Measurement:
    found = Measurement(planned_case(tiny=True), ECHO, torch.device("cpu"), EFFORTS["quick"])
    found.prepare()
    found.measure()
    return found


def test_a_graph_is_traced_and_planned_and_small_plans_are_near_the_best() -> None:
    pytest.importorskip("scipy", reason="the exact plan needs scipy")
    metrics = measured().metrics
    assert set(metrics) == {"plan_s", "plan_nodes", "plan_over_exact", "exact_graphs"}
    assert 500 < float(metrics["plan_nodes"]) < 2_000
    assert 0 < float(metrics["plan_s"]) < 60
    assert float(metrics["plan_over_exact"]) <= 1.05


def test_without_a_solver_the_planning_is_timed_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    metrics = measured().metrics
    assert float(metrics["plan_s"]) > 0
    assert "ecornn[exact]" in str(metrics["exact_not_measured"])


def test_a_plan_that_is_far_from_the_best_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("scipy", reason="the exact plan needs scipy")
    good = float(planning.beside_the_best()["plan_over_exact"])
    from ecornn.echo.plan import search

    def keep_all(self: search.Search, *, products: bool) -> list[search.Found]:
        return [self.look_at("keep all", self.passes.needed)]

    monkeypatch.setattr(search.Search, "explore", keep_all)
    assert float(planning.beside_the_best()["plan_over_exact"]) > good + 0.05


def test_it_has_a_place_among_the_results() -> None:
    metrics: dict[str, float | str] = {
        "plan_s": 7.4,
        "plan_nodes": 15_113,
        "plan_over_exact": 1.0,
        "exact_graphs": 6,
    }
    assert planned_case().matches(PLAN)
    row = Row(planned_case(), "echo", metrics)
    page = render({"echo-imaginary.json": Results("echo", {"gpu": "none"}, (row,))})
    assert "15,113" in page
    assert "plan_s of echo ≤ 10" in page
