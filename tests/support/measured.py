"""Rows with made-up figures, for what reads measurements: none of them was measured."""

from __future__ import annotations

from collections.abc import Mapping

from ecornn.bench.cases import Case
from ecornn.bench.results import Results, Row

ENVIRONMENT = {
    "cpu": "Imaginary",
    "threads": 2,
    "torch": "9.9",
    "ecornn": "0.0",
    "commit": "c0ffee",
    "date": "2000-01-01T00:00:00+00:00",
}
PLAIN = Case("lstm", hidden=128, batch=1, steps=10)
MIXED = Case("gru", hidden=64, batch=4, steps=20, lengths=True)


def row(case: Case, contender: str, forward: float, train: float, **more: float | str) -> Row:
    metrics = {"forward_us": forward, "forward_us_spread": 0.1, "train_us": train}
    return Row(case, contender, {**metrics, "train_us_spread": 0.2, "error": 1e-7, **more})


def results(*rows: Row, benchmark: str = "cpu", **environment: str | int | None) -> Results:
    return Results(benchmark, {**ENVIRONMENT, **environment}, rows)


def plain(ours: tuple[float, float], theirs: tuple[float, float]) -> Results:
    """One plain case, (forward, train) of each."""
    return results(row(PLAIN, "ecornn", *ours), row(PLAIN, "torch.nn", *theirs))


def mixed(times: Mapping[str, tuple[float, float]]) -> Results:
    return results(*(row(MIXED, name, *found) for name, found in times.items()))
