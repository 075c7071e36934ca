"""The peak as a function of the batch size, from reports at a few sizes.

Each storage's bytes are a line in the batch size, and so is their sum at each operator; the peak is
the highest of these lines. Where it changes its place, the operator at the peak changes, and the
lines know that, which a line through the peaks does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ecornn.profiler.model import COUNTED, MemoryReport

#: Does not grow with the batch as tensors do: taken as at the largest size.
_CONSTANT = "rounding"


@dataclass(frozen=True)
class Run:
    batch: int
    peak_bytes: int
    #: At each time, without what is taken as constant; and that.
    totals: NDArray[np.float64]
    constant: int
    operators: tuple[str, ...]


def run_of(batch: int, report: MemoryReport) -> Run:
    columns = report.timeline.bytes
    growing = [np.asarray(columns[kind], float) for kind in COUNTED if kind in columns]
    rounding = np.asarray(columns.get(_CONSTANT, np.zeros(len(report.timeline))), float)
    totals = np.sum(growing, axis=0) - rounding
    constant = int(rounding[report.peak_time])
    return Run(batch, report.peak_bytes, totals, constant, report.timeline.operator)


@dataclass(frozen=True)
class Curve:
    """Lines through the two largest runs."""

    runs: tuple[Run, ...]

    @property
    def same_operators(self) -> bool:
        """Whether the lines are those of the operators, or one through the peaks alone."""
        return len({run.operators for run in self.runs[-2:]}) == 1

    def __call__(self, batch: int) -> int:
        """The predicted peak, in bytes; what was observed, where it was."""
        for run in self.runs:
            if run.batch == batch:
                return run.peak_bytes
        below, above = self.runs[-2:]
        share = (batch - below.batch) / (above.batch - below.batch)
        if not self.same_operators:
            return round(below.peak_bytes + share * (above.peak_bytes - below.peak_bytes))
        at_batch = below.totals + share * (above.totals - below.totals)
        return round(float(at_batch.max())) + above.constant

    def largest_within(self, memory: int, most: int) -> int | None:
        """The largest batch of at most `most` whose predicted peak fits; None if not even one."""
        if self(1) > memory:
            return None
        fits, fails = 1, most + 1
        while fails - fits > 1:
            middle = (fits + fails) // 2
            if self(middle) <= memory:
                fits = middle
            else:
                fails = middle
        return fits


def curve_of(runs: Sequence[Run]) -> Curve:
    return Curve(tuple(sorted(runs, key=lambda run: run.batch)))
