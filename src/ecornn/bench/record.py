"""Measure a grid's cases, into a file where one is named."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ecornn.bench.cases import Case
from ecornn.bench.environment import describe
from ecornn.bench.grids import Grid
from ecornn.bench.results import Results, Row, check_mergeable, merge, read, write
from ecornn.bench.runners import (
    Measure,
    choose_device,
    clock,
    run_cases,
    tf32_where_it_is_faster,
)
from ecornn.bench.timing import QUICK, Effort
from ecornn.errors import InvalidInput


@dataclass(frozen=True)
class Recording:
    """`measured`: the rows of this run; `results`: with those the file held before."""

    results: Results
    measured: tuple[Row, ...]


def record(
    grid: Grid,
    cases: Sequence[Case],
    efforts: Mapping[str, Effort],
    console: Console,
    out: Path | None = None,
    measure: Measure = clock,
) -> Recording:
    """The file is written after every case: what was measured outlives an interruption."""
    device = choose_device(grid.device)
    with tf32_where_it_is_faster(device):
        effort = "quick" if efforts is QUICK else "thorough"
        environment = describe(device) | {"effort": effort}
        earlier = None
        if out is not None:
            check_writable(out)
            if out.exists():
                earlier = read(out)
                check_mergeable(earlier, grid.name, environment)
        measured: list[Row] = []

        def results() -> Results:
            fresh = Results(grid.name, environment, tuple(measured))
            return fresh if earlier is None else merge(earlier, fresh)

        def take(rows: list[Row]) -> None:
            measured.extend(rows)
            if out is not None:
                write(results(), out)

        run_cases(cases, device, efforts[device.type], console, take, measure)
    return Recording(results(), tuple(measured))


def check_writable(out: Path) -> None:
    """Before the first measurement, not after it."""
    if out.is_dir() or not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        raise InvalidInput("out", str(out), "a file in a folder that can be written", "name one")
