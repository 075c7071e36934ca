"""What the measurements of the profiler must show, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ecornn.bench.cases import Where
from ecornn.bench.profiling.record import BENCHMARK
from ecornn.bench.training.cases import PROFILED
from ecornn.bench.training.contenders import EAGER, PROFILER
from ecornn.bench.training.targets import Missing, Rows, Target, figure

OURS = PROFILER.name


@dataclass(frozen=True)
class ProfilerTarget(Target):
    benchmark: ClassVar[str] = BENCHMARK


@dataclass(frozen=True)
class Off(ProfilerTarget):
    """How far one figure is off another, in percent of that."""

    said: str = ""
    so: str = ""

    unit: ClassVar[str] = " %"

    def __str__(self) -> str:
        return f"{self.said} off by {self.bound} % of {self.so}"

    def found(self, rows: Rows) -> float:
        so = figure(rows, OURS, self.so)
        said = figure(rows, OURS, self.said)
        return 100 * abs(said - so) / so if so else float("inf")


@dataclass(frozen=True)
class Times(ProfilerTarget):
    metric: str = ""
    of: str = ""

    def __str__(self) -> str:
        return f"{self.metric} ÷ {self.of} {self.bound}"

    def found(self, rows: Rows) -> float:
        return figure(rows, OURS, self.metric) / figure(rows, OURS, self.of)


@dataclass(frozen=True)
class SlowerAfter(ProfilerTarget):
    """How much slower a step is after the profiler was used, in percent, beyond the distance
    between the quartiles of both."""

    unit: ClassVar[str] = " %"

    def __str__(self) -> str:
        return f"after_ms above step_ms beyond both spreads by {self.bound} %"

    def found(self, rows: Rows) -> float:
        names = ("step_ms", "after_ms", "step_ms_spread", "after_ms_spread")
        before, after, *spreads = (figure(rows, OURS, name) for name in names)
        return 100 * max(0.0, after - before - sum(spreads)) / before


@dataclass(frozen=True)
class Value(ProfilerTarget):
    metric: str = ""

    unit: ClassVar[str] = ""

    def __str__(self) -> str:
        return f"{self.metric} {self.bound}"

    def found(self, rows: Rows) -> float:
        row = rows.get(OURS)
        reason = None if row is None else row.metrics.get(f"{self.metric[:-10]}_not_measured")
        if reason is not None:
            # torch has no such operator there, for anybody
            raise Missing(EAGER.name, str(reason))
        return figure(rows, OURS, self.metric)


FULL: Where = {"part": (PROFILED,), "size": ("full",)}
NMT: Where = {**FULL, "model": ("nmt",)}

PROFILER_TARGETS: tuple[ProfilerTarget, ...] = (
    Off("the rows are the peak", FULL, at_most=1.0, said="rows_bytes", so="peak_bytes"),
    Value("on the CPU to the byte", FULL, at_most=0, metric="cpu_bytes_off"),
    Value("on meta tensors to the byte", FULL, at_most=0, metric="meta_bytes_off"),
    Off(
        "an unseen batch's peak",
        FULL,
        at_most=3.0,
        said="unseen_predicted_bytes",
        so="unseen_peak_bytes",
    ),
    Off(
        "the largest batch that runs",
        FULL,
        at_most=2.0,
        said="predicted_running_batch",
        so="largest_batch",
    ),
    Off(
        "the largest batch whose peak is within",
        FULL,
        at_most=2.0,
        said="predicted_largest_batch",
        so="largest_within",
    ),
    Times("a step under the profiler", FULL, at_most=2.0, metric="profile_ms", of="step_ms"),
    SlowerAfter("a step after it", FULL, at_most=0.5),
    Value("NMT: attention first", NMT, at_most=1, metric="attention_place"),
    Value("NMT: recurrent layers second", NMT, at_most=2, metric="recurrent_place"),
    Value("NMT: the lines are named", NMT, at_least=1, metric="lines_named"),
)
