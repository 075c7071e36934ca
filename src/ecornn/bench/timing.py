"""Medians of interleaved samples, on the CPU's clock or between CUDA events.

Contenders take turns within every round, each round starting with another one: what slows the
machine down for a while then slows all of them. A sample is as many calls in a row as it takes to
make it long beside the clock's resolution, and on a GPU five at least: in a loop the host prepares
a call while the GPU works on the one before, also where a call is long.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from ecornn.garbage import no_garbage_collected

CallNow = Callable[[], object]


@dataclass(frozen=True)
class Effort:
    """How long to measure. A sample lasts at least `sample_s` and has at least `fewest_calls`;
    each contender has `rounds` samples, or as many as fit into `budget_s`, but never fewer than
    `fewest_rounds`. `checks` counts the comparisons with the float64 reference: the first before,
    the second after."""

    sample_s: float
    rounds: int
    fewest_rounds: int
    budget_s: float
    warm_up_s: float
    checks: int
    fewest_calls: int = 1


#: By device. On CUDA the whole grid must fit into a few minutes of a lent machine.
THOROUGH = {
    "cpu": Effort(0.002, rounds=301, fewest_rounds=7, budget_s=2.0, warm_up_s=0.2, checks=2),
    "cuda": Effort(0.001, 51, 7, budget_s=0.2, warm_up_s=0.02, checks=2, fewest_calls=5),
}
QUICK = {
    "cpu": Effort(0.001, rounds=5, fewest_rounds=3, budget_s=0.1, warm_up_s=0.0, checks=1),
    "cuda": Effort(0.001, 7, 3, budget_s=0.05, warm_up_s=0.0, checks=1, fewest_calls=5),
}


@dataclass(frozen=True)
class Timing:
    """Seconds a call: the median of the samples, and the distance between their quartiles."""

    median_s: float
    spread_s: float


class Clock(Protocol):
    def measure(self, call: CallNow, repeats: int) -> float:
        """Seconds that `repeats` calls in a row take, from an idle device to an idle device."""


class CpuClock:
    def measure(self, call: CallNow, repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return time.perf_counter() - start


class CudaClock:
    """The device is idle when the first event is recorded, so that a call that keeps it waiting
    for launches is timed with the waiting, as its user has it."""

    def measure(self, call: CallNow, repeats: int) -> float:
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def clock_for(device: torch.device) -> Clock:
    return CudaClock() if device.type == "cuda" else CpuClock()


def time_in_turns(calls: Mapping[str, CallNow], clock: Clock, effort: Effort) -> dict[str, Timing]:
    """The time a call of each takes, by name."""
    if not calls:
        return {}
    alone = {name: warm_up(call, clock, effort) for name, call in calls.items()}
    fewest = effort.fewest_calls
    repeats = {name: max(fewest, math.ceil(effort.sample_s / alone[name])) for name in calls}
    a_round = sum(alone[name] * repeats[name] for name in calls)
    affordable = int(effort.budget_s * len(calls) / a_round)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    with garbage_collected_before():
        for i in range(min(effort.rounds, max(effort.fewest_rounds, affordable))):
            first = i % len(names)
            for name in (*names[first:], *names[:first]):
                seconds = clock.measure(calls[name], repeats[name])
                samples[name].append(seconds / repeats[name])
    return {name: summarize(found) for name, found in samples.items()}


def warm_up(call: CallNow, clock: Clock, effort: Effort) -> float:
    """Run until the first-time costs are paid; the shortest time of one call seen since."""
    clock.measure(call, 1)
    seconds = [clock.measure(call, 1)]
    while sum(seconds) < effort.warm_up_s:
        seconds.append(clock.measure(call, 1))
    return max(min(seconds), 1e-9)


def summarize(samples: list[float]) -> Timing:
    if len(samples) < 2:
        return Timing(samples[0], 0.0)
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Timing(median, high - low)


def uncertainty(samples: list[float]) -> float:
    """The standard error of their median, relative to it, as it would be if they were independent
    and normally distributed: 1.25 standard deviations over √n, one of which is the distance between
    the quartiles over 1.35. One sample says nothing of it."""
    if len(samples) < 2:
        return math.inf
    found = summarize(samples)
    return 1.25 * (found.spread_s / 1.35) / math.sqrt(len(samples)) / found.median_s


@contextmanager
def garbage_collected_before() -> Iterator[None]:
    """Collect now and not in the middle of a sample."""
    gc.collect()
    with no_garbage_collected():
        yield
