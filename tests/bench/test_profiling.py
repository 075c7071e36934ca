"""The figures about the profiler, on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from ecornn.bench.profiling import record
from ecornn.bench.results import read
from ecornn.bench.training.cases import ModelCase


def test_a_file_of_figures(tmp_path: Path) -> None:
    out = tmp_path / "profiler.json"
    found = record([ModelCase("nmt", batch=8, size="tiny")], out, "cpu")
    (row,) = read(out).rows
    assert set(row.metrics) == set(found.rows[0].metrics)
    number = {name: float(value) for name, value in row.metrics.items()}
    # torch's own count of its allocator on the CPU, and ours.
    assert number["rows_bytes"] == pytest.approx(number["peak_bytes"], rel=0.01)
    assert number["feature_map_bytes"] < number["tensors_bytes"] == number["rows_bytes"]
    assert 0 < number["step_ms"] < number["profiled_ms"]
    assert number["predicted_peak_bytes"] > 0
    assert number["predicted_largest_batch"] >= 1
