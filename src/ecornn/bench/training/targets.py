"""What the measurements of training steps must show, as data.

Who has no figures misses the target; nobody misses one against a peer that has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Any, ClassVar

from ecornn.bench.cases import Where
from ecornn.bench.compare import Judgement
from ecornn.bench.results import AnyCase, Row
from ecornn.bench.training.accuracy import BOUNDS
from ecornn.bench.training.cases import BENCHMARK, NAMED, ModelCase
from ecornn.bench.training.contenders import ALL, EAGER, ECHO_WITHIN

Rows = Mapping[str, Row]
Cases = Mapping[AnyCase, Rows]

#: Two times within this share of each other are the same time.
SAME_TIME = 0.02


class Missing(Exception):
    """A figure that a target needs is not there."""

    def __init__(self, contender: str, reason: str) -> None:
        self.ours = ALL[contender].is_ours
        super().__init__(f"{contender}: {reason}")


def figure(rows: Rows, contender: str, metric: str) -> float:
    row = rows.get(contender)
    value = None if row is None else row.number(metric)
    if row is None or value is None:
        raise Missing(contender, "no row" if row is None else row.trouble or f"no {metric}")
    return value


def quotient(rows: Rows, metric: str, over: str, under: str) -> float:
    """Of two figures of one run."""
    found = figure(rows, over, metric), figure(rows, under, metric)
    if rows[over].environment != rows[under].environment:
        peer = under if ALL[over].is_ours else over
        raise Missing(peer, "not measured in one run with the other")
    return found[0] / found[1] if found[1] else float("inf")


@dataclass(frozen=True)
class Target:
    """In every case that `where` lets through, a figure is `at_least` or `at_most` so much."""

    name: str
    where: Where
    at_least: float | None = None
    at_most: float | None = None

    benchmark: ClassVar[str] = BENCHMARK
    unit: ClassVar[str] = "×"

    def found(self, rows: Rows) -> float:
        raise NotImplementedError

    @property
    def times_compared(self) -> frozenset[str]:
        """Contenders whose times it sets beside each other."""
        return frozenset()

    def judge(self, cases: Cases) -> list[Judgement]:
        return [self._judgement(case, partial(self.found, rows)) for case, rows in cases.items()]

    def _judgement(self, case: AnyCase | None, find: Callable[[], float]) -> Judgement:
        try:
            found = find()
        except Missing as missing:
            outcome: Any = "failed" if missing.ours else "not measured"
            return Judgement(self, case, outcome, reason=str(missing))
        met = self.at_least is None or found >= self.at_least
        met = met and (self.at_most is None or found <= self.at_most)
        return Judgement(self, case, "passed" if met else "failed", found)

    @property
    def bound(self) -> str:
        if self.at_least is not None:
            return f"≥ {self.at_least:g}"
        return "is there" if self.at_most is None else f"≤ {self.at_most:g}"


@dataclass(frozen=True)
class Ratio(Target):
    """`over`'s figure divided by `under`'s. One of the two is ours."""

    metric: str = ""
    over: str = ""
    under: str = ""

    def __str__(self) -> str:
        return f"{self.metric} of {self.over} ÷ {self.under} {self.bound}"

    def found(self, rows: Rows) -> float:
        return quotient(rows, self.metric, self.over, self.under)

    @property
    def times_compared(self) -> frozenset[str]:
        times = self.metric in ("step_ms", "samples_per_s")
        return frozenset((self.over, self.under) if times else ())


@dataclass(frozen=True)
class MeanRatio(Ratio):
    """The mean of that quotient over all cases."""

    def __str__(self) -> str:
        return f"mean {super().__str__()}"

    def judge(self, cases: Cases) -> list[Judgement]:
        return [self._judgement(None, partial(self._mean, cases))]

    def _mean(self, cases: Cases) -> float:
        there = {str(case.name) for case in cases if isinstance(case, ModelCase)}
        left_out = [name for name in NAMED if name not in there]
        if left_out:
            raise Missing(EAGER.name, f"not measured on {', '.join(left_out)}")
        return mean(self.found(rows) for rows in cases.values())


@dataclass(frozen=True)
class Figure(Target):
    """One contender's own figure, which must be there even if it has no bound."""

    metric: str = ""
    contender: str = ""

    unit: ClassVar[str] = ""

    def __str__(self) -> str:
        return f"{self.metric} of {self.contender} {self.bound}"

    def found(self, rows: Rows) -> float:
        return figure(rows, self.contender, self.metric)


@dataclass(frozen=True)
class Bitwise(Figure):
    """Equal to eager to the last bit, where eager is equal to itself when it is run again."""

    def found(self, rows: Rows) -> float:
        equal = super().found(rows)
        if not equal and rows[self.contender].number("eager_repeats") == 0:
            raise Missing("eager", "not equal to itself when it is run again")
        return equal


@dataclass(frozen=True)
class Foretold(Target):
    """How far the predicted peak is off the measured one."""

    contender: str = ""

    unit: ClassVar[str] = " of the peak"

    def __str__(self) -> str:
        return f"predicted_peak_bytes of {self.contender} off by {self.bound} of peak_bytes"

    def found(self, rows: Rows) -> float:
        predicted = figure(rows, self.contender, "predicted_peak_bytes")
        return abs(predicted / figure(rows, self.contender, "peak_bytes") - 1)


@dataclass(frozen=True)
class NotBeaten(Target):
    """The memory of ours over that of one of torch's options, the smallest of those of ours that
    take no more time than it. A row of ours that was measured in another run says nothing of it,
    and is left out."""

    ours: tuple[str, ...] = ()
    option: str = ""

    def __str__(self) -> str:
        return f"peak_bytes of ours, as quick as {self.option}, ÷ {self.option} {self.bound}"

    def found(self, rows: Rows) -> float:
        for metric in ("step_ms", "peak_bytes"):
            figure(rows, self.option, metric)
        there = [name for name in self.ours if name in rows]
        run = rows[self.option].environment
        beside = [name for name in there if rows[name].environment == run]
        if there and not beside:
            raise Missing(self.option, "not measured in one run with any of ours")
        found = []
        for name in beside:
            try:
                time = quotient(rows, "step_ms", name, self.option)
                memory = quotient(rows, "peak_bytes", name, self.option)
            except Missing:  # ours has no figures: the others may
                continue
            if time <= 1 + SAME_TIME:
                found.append(memory)
        if not found:
            raise Missing(self.ours[0], f"none of ours is as quick as {self.option}")
        return min(found)

    @property
    def times_compared(self) -> frozenset[str]:
        return frozenset((*self.ours, self.option))


STEP: Where = {"part": ("step",), "size": ("full",)}
NMT: Where = {**STEP, "model": ("nmt",)}
NMT_50: Where = {**NMT, "length": (50,)}
NMT_BATCH: Where = {"part": ("batch",), "size": ("full",), "model": ("nmt",)}
CHECK: Where = {"part": ("check",), "size": ("full",)}
PLAN: Where = {"part": ("plan",), "size": ("full",)}

OURS = ("echo", "echo memory=min")
#: Whoever of ours is as quick as an option of torch's may stand beside it.
BESIDE_OPTIONS = (*OURS, *(contender.name for contender in ECHO_WITHIN))
OPTIONS = ("torch.compile", "budget=0.5", "budget=0.1", "aggressive")


def _ratio(name: str, where: Where, said: str, **bound: float) -> Ratio:
    """`said`: "METRIC: OVER / UNDER"."""
    metric, _, two = said.partition(": ")
    over, _, under = two.partition(" / ")
    return Ratio(name, where, **bound, metric=metric, over=over, under=under)


ECHO_TARGETS: tuple[Target, ...] = (
    _ratio("NMT: memory", NMT, "peak_bytes: eager / echo", at_least=3.13),
    _ratio("NMT: time", NMT, "step_ms: echo / eager", at_most=1.0),
    _ratio("NMT: memory", NMT, "peak_bytes: eager+graph / echo+graph", at_least=3.13),
    _ratio("NMT: time", NMT, "step_ms: echo+graph / eager+graph", at_most=1.1),
    Figure("NMT: set-up", NMT_50, at_most=20.0, metric="setup_s", contender="echo"),
    MeanRatio("memory", STEP, 1.89, metric="peak_bytes", over="eager", under="echo"),
    _ratio("time", STEP, "step_ms: echo / torch.compile", at_most=1.05),
    *(
        NotBeaten("no option of torch's is better", STEP, None, 1.0, BESIDE_OPTIONS, option)
        for option in OPTIONS
    ),
    Figure("the step can be captured", STEP, metric="step_ms", contender="echo+graph"),
    *(Foretold("the peak is foretold", STEP, at_most=0.05, contender=name) for name in OURS),
    _ratio("NMT in 16 GiB: batch", NMT_BATCH, "largest_batch: echo / eager", at_least=3.0),
    _ratio("NMT in 16 GiB: speed", NMT_BATCH, "samples_per_s: echo / eager", at_least=1.35),
    *(
        Figure(
            "equal up to rounding", CHECK, at_most=BOUNDS["ieee"], metric="error", contender=name
        )
        for name in OURS
    ),
    *(
        Bitwise("equal to the last bit", CHECK, at_least=1, metric="bitwise", contender=name)
        for name in ("echo codegen=eager", "echo memory=min codegen=eager")
    ),
    Figure("planning", PLAN, at_least=15_000, metric="plan_nodes", contender="echo"),
    Figure("planning", PLAN, at_most=10.0, metric="plan_s", contender="echo"),
    Figure("plans near the best", PLAN, at_most=1.05, metric="plan_over_exact", contender="echo"),
)
