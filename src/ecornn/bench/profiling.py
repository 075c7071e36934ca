"""What the memory profiler claims, measured: its sum, its predictions, what it costs.

Each figure stands beside the same one of a step that nobody observes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ecornn.bench.environment import describe
from ecornn.bench.models.step import Step, make_step
from ecornn.bench.results import Results, Row, write
from ecornn.bench.runners import choose_device
from ecornn.bench.training.cases import ModelCase
from ecornn.bench.training.memory import peak_bytes
from ecornn.profiler import fit, profile
from ecornn.profiler.model import TENSORS

BENCHMARK = "profiler"
CONTENDER = "ecornn.profiler"
MODELS = ("nmt", "speech", "transformer", "resnet50", "gpt2")
REPEATS = 5


def measure(case: ModelCase, device: torch.device) -> dict[str, float | str]:
    """`batch` of the case is what is profiled; predictions come from a quarter and a half of it,
    and their budget is the measured peak at its double."""
    assert case.batch is not None
    make = _maker(case, device)
    metrics = _of_one_step(_ready(make, case.batch))
    half = max(2, case.batch // 2)
    found = fit(make, sizes=(max(1, half // 2), half))
    metrics["predicted_peak_bytes"] = found.peak(case.batch)
    budget = peak_bytes(_ready(make, 2 * case.batch))
    largest = found.curve.largest_within(budget, most=8 * case.batch)
    metrics |= {"budget_bytes": budget, "true_largest_batch": 2 * case.batch}
    metrics["predicted_largest_batch"] = largest or 0
    return metrics


def _of_one_step(step: Step) -> dict[str, float | str]:
    plain = _milliseconds(step, step)
    profiled = _milliseconds(lambda: profile(step, step.model, step.optimizer), step)
    step.clear()
    report = profile(step, step.model, step.optimizer)
    tensors = sum(row.bytes for row in report.rows if row.kind in TENSORS)
    return {
        "step_ms": plain,
        "profiled_ms": profiled,
        "operators": len(report.timeline),
        "peak_bytes": peak_bytes(step),
        "rows_bytes": report.peak_bytes,
        "tensors_bytes": tensors,
        "feature_map_bytes": report.by_kind().get("feature maps", 0),
    }


def _milliseconds(call: Callable[[], Any], step: Step) -> float:
    samples = []
    for _ in range(REPEATS):
        _wait(step.device)
        begun = time.perf_counter()
        call()
        _wait(step.device)
        samples.append(1e3 * (time.perf_counter() - begun))
    return median(samples)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _maker(case: ModelCase, device: torch.device) -> Callable[[int], Step]:
    def make(batch: int) -> Step:
        return make_step(case.model, size=case.size, batch=batch, length=case.length, device=device)

    return make


def _ready(make: Callable[[int], Step], batch: int) -> Step:
    gc.collect()
    step = make(batch)
    step()
    step()
    return step


def record(cases: Iterable[ModelCase], out: Path, device: str = "cuda") -> Results:
    """Measure into a file, one row a case, written after each."""
    chosen = choose_device(device)
    results = Results(BENCHMARK, describe(chosen), ())
    for case in cases:
        row = Row(case, CONTENDER, measure(case, chosen))
        results = Results(BENCHMARK, results.environment, (*results.rows, row))
        write(results, out)
    return results
