"""Measure what the profiler claims into a file, one row a model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from ecornn.bench.record import Recording
from ecornn.bench.training.cases import ModelCase
from ecornn.bench.training.memory import GIB
from ecornn.bench.training.record import Options, check_device
from ecornn.bench.training.record import record as record_jobs
from ecornn.bench.training.schedule import Limits
from ecornn.errors import InvalidInput

BENCHMARK = "profiler"
COMMAND = (sys.executable, "-m", "ecornn.bench.profiling.worker")
#: Beside its limit of memory each process has a context, and looks for batches just beyond it.
BESIDE = 1.15


def record(
    cases: Sequence[ModelCase],
    console: Console,
    out: Path | None = None,
    *,
    device: str = "cuda",
    effort: str = "thorough",
    limits: Limits,
) -> Recording:
    check_device(device, tiny=all(case.size == "tiny" for case in cases))
    if device == "cuda" and torch.cuda.is_available():
        check_room(cases, limits.workers, torch.cuda.mem_get_info()[0])
    options = Options(
        device=device,
        effort=effort,
        limits=limits,
        command=COMMAND,
        benchmark=BENCHMARK,
        together=True,
    )
    return record_jobs(cases, options, console, out)


def check_room(cases: Sequence[ModelCase], workers: int, free: int) -> None:
    """Processes that take each other's memory would find too small batches."""
    needs = [int((case.memory_gib or 0.0) * BESIDE * GIB) for case in cases]
    together = max(sum(needs[i : i + workers]) for i in range(0, len(needs), workers))
    if together > free:
        raise InvalidInput(
            "workers",
            f"{workers}, which take {together / GIB:.0f} GiB at once",
            f"so many that {free / GIB:.0f} GiB are enough",
            "give --workers 1, or fewer cases",
        )
