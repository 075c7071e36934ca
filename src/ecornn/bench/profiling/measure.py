"""One model: what the profiler says of it, and what is so.

`prepare` is about memory alone, so that several processes do it side by side; `measure` is about
time. Every figure stands beside the same one of a step that nobody observes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from ecornn.bench.models.step import Step, make_step
from ecornn.bench.profiling.alive import Alive, held_by
from ecornn.bench.profiling.finding import Figures, finding
from ecornn.bench.profiling.search import search
from ecornn.bench.timing import (
    Clock,
    Timing,
    clock_for,
    garbage_collected_before,
    summarize,
)
from ecornn.bench.training.cases import ModelCase
from ecornn.bench.training.measure import first_line, out_of_memory
from ecornn.bench.training.memory import GIB, collect, limited_to, peak_bytes
from ecornn.profiler import Fit, MemoryReport, fit, meta_kernels, profile
from ecornn.profiler.model import TENSORS

WARM_UP_STEPS = 2
#: The batch that no prediction has seen: this share of the largest that is predicted to fit.
UNSEEN = 0.7


@dataclass(frozen=True)
class Effort:
    """`rounds` steps are timed of each kind; batches are told apart by `grain` of the largest."""

    rounds: int
    grain: float


EFFORTS = {"thorough": Effort(15, 0.0), "quick": Effort(7, 0.005)}


@dataclass
class Measurement:
    """`tell` is called with the figures so far after each part: what comes later may take too
    long."""

    case: ModelCase
    device: torch.device
    effort: Effort
    tell: Callable[[Figures], None] = lambda _: None
    metrics: Figures = field(default_factory=dict)

    @property
    def budget(self) -> int:
        return int((self.case.memory_gib or 0.0) * GIB)

    def prepare(self) -> None:
        with self._part("rows"):
            self._rows()
        with self._part("exact"):
            self._exact()
        with self._part("fit"):
            found = self._predict()
        with self._part("search"):
            self._search(found)

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        collect(self.device)
        self.metrics[f"{name}_s"] = time.perf_counter() - began
        self.tell(self.metrics)

    def _step(self, batch: int | None = None) -> Step:
        collect(self.device)
        case = self.case
        step = make_step(
            case.model,
            size=case.size,
            batch=case.batch if batch is None else batch,
            length=case.length,
            device=self.device,
        )
        for _ in range(WARM_UP_STEPS):
            step()
        return step

    def _rows(self) -> None:
        """The sum of a report's rows beside the peak of the same step alone."""
        step = self._step()
        measured = peak_bytes(step)
        cuda = self.device.type == "cuda"
        reserved = torch.cuda.max_memory_reserved() if cuda else 0
        step.clear()
        collect(self.device)
        report = profile(step, step.model, step.optimizer)
        kinds = report.by_kind()
        self.metrics |= {
            "peak_bytes": measured,
            "rows_bytes": report.peak_bytes,
            "tensors_bytes": sum(kinds.get(kind, 0) for kind in TENSORS),
            "feature_map_bytes": kinds.get("feature maps", 0),
            "operators": len(report.timeline),
            **finding(report, self.case.model),
        }
        if cuda:
            unused = kinds.get("reserved, unused", 0)
            self.metrics |= {
                "reserved_bytes": reserved,
                "rows_reserved_bytes": report.peak_bytes + unused,
                "driver_bytes": kinds.get("driver", 0),
            }

    def _exact(self) -> None:
        """On the CPU and on meta tensors the sum is the tracked bytes, to the byte: of a tiny one,
        since another observer counts anew after every operator."""
        for device in ("cpu", "meta"):
            step = make_step(self.case.model, size="tiny", device=device)
            # Meta tensors know no autocast.
            step.autocast = step.autocast and device == "cpu"
            try:
                with meta_kernels():
                    step()
                    with Alive(held_by(step)) as tracked:
                        step()
            except NotImplementedError as error:
                self.metrics[f"{device}_not_measured"] = first_line(error)
                continue
            report = profile(step, step.model, step.optimizer)
            off = abs(sum(row.bytes for row in report.rows) - tracked.peak_bytes)
            self.metrics[f"{device}_bytes_off"] = off

    def _predict(self) -> Fit:
        """From small batches alone, as a user would ask; then one such batch for real."""
        case = self.case

        def make(batch: int) -> Step:
            return make_step(
                case.model, size=case.size, batch=batch, length=case.length, device=self.device
            )

        found = fit(make, self.budget)
        seen = max(found.observed)
        unseen = max(seen + 1, int(UNSEEN * (found.largest or 1)))
        self.metrics |= {
            "predicted_largest_batch": found.largest or 0,
            "seen_batch": seen,
            "unseen_batch": unseen,
            "unseen_predicted_bytes": found.peak(unseen),
            "unseen_peak_bytes": peak_bytes(self._step(unseen)),
            "lines": int(found.curve.same_operators),
        }
        if found.largest_running is not None:
            self.metrics["predicted_running_batch"] = found.largest_running
        return found

    def _search(self, found: Fit) -> None:
        """The largest batch for real, twice: that the allocator lets through, and that whose peak
        is within the limit. Between the two lies what the allocator cannot use."""
        guess = max(1, found.largest or 1)
        grain = max(1, int(self.effort.grain * guess))
        within, tries = search(lambda b: self._peak(b) <= self.budget, guess, grain)
        self.metrics |= {"largest_within": within, "tries": tries}
        if self.device.type == "cuda":
            guess = found.largest_running or within
            with limited_to(self.case.memory_gib or 0.0, self.device):
                fits, more = search(self._runs, max(1, guess), grain)
            self.metrics |= {"largest_batch": fits, "tries": tries + more}

    def _peak(self, batch: int) -> int:
        return peak_bytes(self._step(batch))

    def _runs(self, batch: int) -> bool:
        try:
            self._peak(batch)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            return False
        return True

    def measure(self) -> None:
        """A step of a model that the profiler was never used on, one under it and one after it. A
        report is made when it is read: what that takes is timed beside.

        All in turns: a host may be twice as slow for some seconds as for the next, and of a model
        that waits for its host one kind would be measured then, and another now. So two models are
        made, alike, and one of them is never profiled."""
        alone, step = self._step(), self._step()
        found = in_turns(
            {
                "step_ms": Timed(alone),
                "profile_ms": Timed(lambda: profile(step, step.model, step.optimizer)),
                "read_ms": Timed(lambda: read(profile(step, step.model, step.optimizer))),
                "after_ms": Timed(step),
                "observed_ms": Timed(step, around=lambda: profile(model=step.model)),
            },
            clock_for(self.device),
            self.effort.rounds,
        )
        for name, one in found.items():
            self.metrics |= {name: one.median_s * 1e3, f"{name}_spread": one.spread_s * 1e3}


def read(report: MemoryReport) -> None:
    """All of it: each field, the storages as well as the rows."""
    for one in fields(report):
        getattr(report, one.name)


@dataclass(frozen=True)
class Timed:
    """`around`: what the call is inside of, without being timed."""

    call: Callable[[], Any]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext

    def seconds(self, clock: Clock) -> float:
        with self.around():
            return clock.measure(self.call, 1)


def in_turns(kinds: Mapping[str, Timed], clock: Clock, rounds: int) -> dict[str, Timing]:
    """Each once a round, in their order, each round starting with the next one; a round before that
    is not counted."""
    names = list(kinds)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds + 1):
        first = (i - 1) % len(names)
        with garbage_collected_before():
            for name in (*names[first:], *names[:first]):
                taken = kinds[name].seconds(clock)
                if i:
                    seconds[name].append(taken)
    return {name: summarize(found) for name, found in seconds.items()}
