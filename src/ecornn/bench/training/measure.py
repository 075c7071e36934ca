"""A contender of a case from the first step to its figures."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ecornn.bench.calls import capture
from ecornn.bench.models.step import Step, make_step
from ecornn.bench.models.tasks import task_named
from ecornn.bench.timing import clock_for, garbage_collected_before, summarize
from ecornn.bench.training.accuracy import (
    bound,
    compare_with_eager,
    has_draws,
    ieee,
    make_comparable,
)
from ecornn.bench.training.build import NotMeasurable, build
from ecornn.bench.training.cases import ModelCase
from ecornn.bench.training.contenders import EAGER, Contender
from ecornn.bench.training.largest import BACK, Known, largest
from ecornn.bench.training.memory import (
    GIB,
    bytes_now,
    collect,
    fixed_bytes,
    limited_to,
    optimizer_scratch,
    peak_bytes,
    storage_bytes,
    taken_by_others,
)
from ecornn.bench.training.planning import Joint, beside_the_best, planned, unrolled_decoder
from ecornn.echo.plan.milp import SolverMissing
from ecornn.errors import InvalidInput

#: No batch of this process's was too large.
TAKEN = "other processes took the memory that it was to have: run with fewer --workers"
#: Others need what they took for some steps: so long is it waited for, in seconds, between tries of
#: a batch, and so often.
WAIT_S, WAITS = 3.0, 20
WARM_UP_STEPS = 3
SEED = 11


@dataclass(frozen=True)
class Effort:
    """Contenders take `turns`, in each of which `steps` are timed, and at most `further` ones while
    their medians are uncertain. Of the largest batch there are so many `tries`, of which each may
    be a compilation, and one that takes such a part of the memory is `enough`; after `search_s`
    whatever fits is."""

    turns: int
    further: int
    steps: int
    tries: int
    enough: float = 1.0
    search_s: float = math.inf


EFFORTS = {
    "thorough": Effort(turns=10, further=30, steps=3, tries=7),
    "quick": Effort(turns=7, further=7, steps=2, tries=6, enough=0.95, search_s=120),
}


@dataclass
class Measurement:
    """`run` takes a step in the contender's manner, once it is prepared. `known_peak`: that of the
    batch at which a search for the largest begins, where it was measured before."""

    case: ModelCase
    contender: Contender
    device: torch.device
    effort: Effort
    known_peak: int | None = None
    metrics: dict[str, float | str] = field(default_factory=dict)
    grain: int = 1  # of which batches that are tried are multiples, if they can be
    step: Step | None = None
    run: Callable[[], Any] | None = None
    joint: Joint | None = None  # of the part "plan"
    seconds: list[float] = field(default_factory=list)  # of the steps timed so far

    @property
    def takes_turns(self) -> bool:
        return self.run is not None and self.case.part != "check"

    def prepare(self) -> None:
        if self.case.part == "plan":
            self.joint = unrolled_decoder(self.case, self.device)
            return
        if self.case.part == "batch":
            with limited_to(self.case.memory_gib or 0.0, self.device):
                self._find_batch()
            return
        self.step = build(self.contender, self.case, self.device.type)
        if self.case.part == "check":
            make_comparable(self.step)
            with ieee(self.device):
                self._first_steps()
                self._compare()
        else:
            self._first_steps()
            if self._comparable():
                self._compare()
        collect(self.device)

    def _comparable(self) -> bool:
        """Draws and rounding are eager's, or nothing is drawn and little rounded. Under autocast
        compiled code rounds elsewhere, and what that makes of a gradient is no error: those of an
        untrained ResNet-50 differ by more than their norm between eager in bfloat16 and eager in
        float32."""
        assert self.step is not None
        contender = self.contender
        drawn_alike = contender.draws_as_eager or not has_draws(self.step.model)
        if contender.kind in ("eager", "checkpoint"):
            return contender is not EAGER and drawn_alike
        return drawn_alike and not self.step.autocast

    def turn(self) -> None:
        """Time some steps. Others do so in between: what slows the machine for some seconds then
        slows everybody. The first step finds the caches as they left them and is not timed."""
        with limited_to(self.case.memory_gib or 1024.0, self.device):
            if self.case.part != "batch":
                self._timed()
                return
            self._timed_where_it_fits()
            self._give_back()

    def _timed(self) -> None:
        assert self.run is not None
        clock = clock_for(self.device)
        with garbage_collected_before():
            clock.measure(self.run, 1)
            self.seconds += [clock.measure(self.run, 1) for _ in range(self.effort.steps)]

    def _timed_where_it_fits(self) -> None:
        """What fitted once need not do so again: memory that was given back and asked for anew may
        lie in other pieces."""
        for _ in range(WAITS):
            try:
                self._timed()
                return
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                taken = taken_by_others(self._limit, self.device)
            if taken:
                self._give_back()
                time.sleep(WAIT_S)
            else:
                self._shrink()
        raise NotMeasurable(TAKEN)

    def _shrink(self) -> None:
        """A smaller batch in place of one that no longer fits, and its times anew."""
        batch = int(self.metrics["largest_batch"])
        self.seconds.clear()
        peak: int | None = None
        while peak is None:
            self.metrics["refused_batch"] = batch
            batch = int(BACK * batch) // self.grain * self.grain
            if batch < 1:
                raise NotMeasurable("no batch that was found to fit did so again")
            peak = self._attempt(batch)
        self.metrics["largest_batch"] = batch

    def measure(self) -> None:
        """All the rest, once the turns are over."""
        if self.case.part == "check":
            return
        if self.joint is not None:
            self.metrics |= planned(self.joint)
            try:
                self.metrics |= beside_the_best()
            except SolverMissing as error:
                self.metrics["exact_not_measured"] = first_line(error)
            return
        step = self.step
        assert step is not None
        if not self.seconds:  # nobody to take turns with
            self.turn()
        found = summarize(self.seconds)
        self.metrics |= {"step_ms": found.median_s * 1e3, "step_ms_spread": found.spread_s * 1e3}
        self.metrics["step_samples"] = len(self.seconds)
        self.metrics["samples_per_s"] = step.samples / found.median_s
        if not self.contender.graph:  # a graph's was counted when it was captured
            self.metrics["peak_bytes"] = peak_bytes(step)
        if self.contender.kind == "echo":
            predicted = predicted_peak(step)
            known = isinstance(predicted, int)
            self.metrics["predicted_peak_bytes" if known else "peak_not_predicted"] = predicted

    def _first_steps(self) -> None:
        step = self.step
        assert step is not None
        wait(self.device)
        start = time.perf_counter()
        try:
            step()
        except InvalidInput as error:
            if not isinstance(self.contender.memory, float):
                raise
            # as it should be, where less was asked for than is possible
            raise NotMeasurable(f"refused: {first_line(error)}") from error
        self.run = self._captured(step) if self.contender.graph else step
        wait(self.device)
        self.metrics["setup_s"] = time.perf_counter() - start
        for _ in range(WARM_UP_STEPS):
            self.run()

    def _captured(self, step: Step) -> Callable[[], Any]:
        """Memory is counted from the capture on: the graph's replays use what it allocated."""

        def count_from_here() -> None:
            step.clear()
            collect(self.device)
            torch.cuda.reset_peak_memory_stats()

        try:
            graph, loss = capture(step, count_from_here)
        except RuntimeError as error:
            raise NotMeasurable(f"not captured: {first_line(error)}") from error
        graph.replay()
        wait(self.device)
        self.metrics["peak_bytes"] = torch.cuda.max_memory_allocated()

        def replay() -> Any:
            graph.replay()
            return loss

        return replay

    def _compare(self) -> None:
        step = self.step
        assert step is not None
        checked = self.case.part == "check"
        traced = checked and self.contender.kind in ("compile", "echo")
        passes = self.run if self.contender.graph else None
        eager = self._eager()
        found = compare_with_eager(step, eager, SEED, passes, as_traced=traced)
        self.metrics |= found.metrics()
        if checked and not found.bitwise:
            again = compare_with_eager(eager, self._eager(), SEED, as_traced=traced, twins=True)
            self.metrics["eager_repeats"] = int(again.bitwise)
        if found.error > bound(step):
            said = f"{found.where}: relative error {found.error:.1e}, allowed {bound(step):g}"
            self.metrics["failed" if self.contender.is_ours else "wrong"] = said
        eager.clear()

    def _eager(self) -> Step:
        step = build(EAGER, self.case, self.device.type)
        if self.case.part == "check":
            make_comparable(step)
        return step

    def _find_batch(self) -> None:
        case = self.case
        start = task_named(case.model).size(case.size).batch
        weights = make_step(case.model, size=case.size, batch=1, length=case.length, device="meta")
        peaks = {} if self.known_peak is None else {start: self.known_peak}
        began = time.perf_counter()
        self.grain = max(1, min(8, start // 8))
        effort = self.effort
        known = Known(fixed_bytes(weights), peaks)
        found = largest(
            *(self._attempt, start, self._limit, effort.tries, self.grain, effort.enough, known),
            go_on=lambda: time.perf_counter() - began < effort.search_s,
        )
        if found is None:
            raise NotMeasurable(f"no batch was found that fits {case.memory_gib:g} GiB")
        self.metrics |= {"largest_batch": found.batch, "tries": found.tries}
        self.metrics |= {} if found.refused is None else {"refused_batch": found.refused}
        self.metrics |= {"search_stopped": 1} if found.stopped else {}
        self.metrics["search_s"] = time.perf_counter() - began
        if self.step is None or self.step.samples != found.batch:  # another was tried last
            self._attempt(found.batch)
        self._give_back()

    @property
    def _limit(self) -> int:
        return int((self.case.memory_gib or 0.0) * GIB)

    def _attempt(self, batch: int) -> int | None:
        for _ in range(WAITS):
            peak, taken = self._tried(batch, self._limit)
            if not taken:
                return None if self.device.type == "cpu" and (peak or 0) > self._limit else peak
            self._give_back()
            time.sleep(WAIT_S)
        raise NotMeasurable(TAKEN)

    def _tried(self, batch: int, limit: int) -> tuple[int | None, bool]:
        """The peak of a step, None if it does not fit; whether others' memory is why."""
        self.step = self.run = None
        torch._dynamo.reset()
        collect(self.device)
        try:
            self.step = self.run = build(self.contender, self.case, self.device.type, batch)
            for _ in range(2):
                self.step()
            return peak_bytes(self.step), False
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            taken = taken_by_others(limit, self.device)
        self.step = self.run = None
        return None, taken

    def _give_back(self) -> None:
        """While this one waits, others look for the memory that they may have."""
        if self.step is not None:
            self.step.clear()
        collect(self.device)


def predicted_peak(step: Step) -> int | str:
    """What Echo foretells of a step's peak: what is there when it begins, and what the passes make
    beside it, or the gradients and what the optimizer makes beside those. Where it does not know
    all that runs, it says why."""
    explain = getattr(step.run, "explain", None)
    if explain is None:
        return "not a model of Echo's"
    gradients = storage_bytes(w for w in step.model.parameters())
    step.clear()
    held = bytes_now(step)
    explained = explain()
    if explained.whole and len(explained.graphs) > 1:
        return "between its graphs the model runs operators that none of them knows of"
    found: int | None = explained.predicted_peak_bytes(held)
    if found is None:
        reasons = (graph.not_foretold for graph in explained.graphs)
        return explained.not_predicted or next(filter(None, reasons), "no graph was compiled")
    return max(found, held + gradients + optimizer_scratch(step))


def out_of_memory(error: BaseException | None) -> bool:
    """Also where a compiler has wrapped the error in one of its own."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
