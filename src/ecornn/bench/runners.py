"""From cases to rows: check every contender, then time those that are right.

The exchange floor computes nothing: it is timed beside them, unchecked.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ecornn.bench.accuracy import Verdict, bound, check, references, worse
from ecornn.bench.ahead import build_ahead
from ecornn.bench.calls import Call, Replay, make_call
from ecornn.bench.cases import Case
from ecornn.bench.contenders import FLOOR_FORM, Contender, contenders_for
from ecornn.bench.floor import ReplayedFloor
from ecornn.bench.problem import Problem, Values, draw_problem, draw_values
from ecornn.bench.results import FORWARD_PLAN, TRAIN_PLAN, Row
from ecornn.bench.timing import CallNow, Effort, clock_for, time_in_turns
from ecornn.errors import InvalidInput

#: Metrics that are known of a contender also where it has no figures.
STAYING = ("error", TRAIN_PLAN, FORWARD_PLAN)

#: Called with the rows of each case as soon as they are there.
Receiver = Callable[[list[Row]], None]


@dataclass
class Entry:
    """A contender in one case: its call while it is in the race, and what is known of it."""

    contender: Contender
    call: Call | Replay | ReplayedFloor | None = None
    metrics: dict[str, float | str] = field(default_factory=dict)

    @property
    def layer_call(self) -> Call | Replay | None:
        """None also for the floor, which has no results to check and no backward pass."""
        return None if isinstance(self.call, ReplayedFloor) else self.call

    def drop(self, why: str, reason: str) -> None:
        """Out of the race: "failed" where it should have worked, "not_measured" where not."""
        self.call = None
        self.metrics = {name: v for name, v in self.metrics.items() if name in STAYING}
        self.metrics[why] = reason


#: Puts figures into entries whose calls have been checked.
Measure = Callable[[Sequence[Entry], Problem, Effort], None]


def choose_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidInput(
            "device",
            "a machine on which torch finds no CUDA GPU",
            "one with a GPU",
            "`ecornn doctor` says what torch sees; `ecornn bench cpu` needs none",
        )
    return torch.device(name)


def run_cases(
    cases: Sequence[Case],
    device: torch.device,
    effort: Effort,
    console: Console,
    take: Receiver,
    measure: Measure,
) -> None:
    """Measure all contenders of each case, under a progress bar."""
    build_ahead(cases, device, console)
    generator = torch.Generator(device)
    generator.seed()
    columns = (
        MofNCompleteColumn(),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console) as progress, warnings.catch_warnings():
        # torch.nn lays out no bf16 weights for cuDNN and says so; that is how it is measured
        warnings.filterwarnings("ignore", "RNN module weights", module=r"torch\.nn\.modules\.rnn")
        task = progress.add_task("", total=len(cases))
        for case in cases:
            progress.update(task, description=str(case))
            contenders = contenders_for(case, device)
            take(run_case(case, contenders, device, effort, generator, measure))
            progress.advance(task)


def run_case(
    case: Case,
    contenders: Sequence[Contender],
    device: torch.device,
    effort: Effort,
    generator: torch.Generator,
    measure: Measure | None = None,
) -> list[Row]:
    """One row a contender; by the `clock`, if no other way to measure is given."""
    problem = draw_problem(case, device, generator)
    values = draw_values(problem, generator)
    entries = [prepare(contender, problem, values) for contender in contenders]
    verify(entries, problem, generator)
    (measure or clock)(entries, problem, effort)
    for _ in range(effort.checks - 1):
        verify(entries, problem, generator)
    rows = [Row(case, entry.contender.name, entry.metrics) for entry in entries]
    if device.type == "cuda":
        del entries
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def prepare(contender: Contender, problem: Problem, values: Values) -> Entry:
    """A contender that cannot be captured in a graph stays in the results, with the reason; so does
    the floor where no kernel of ours serves the case, or where it cannot run."""
    entry = Entry(contender)
    if contender.form == FLOOR_FORM:
        with dropped_if_it_raises(entry, "not_measured"):
            entry.call = ReplayedFloor(problem.case, problem.device)
            entry.metrics[TRAIN_PLAN] = entry.call.plan()
        return entry
    with dropped_if_it_raises(entry, "failed"):
        call = make_call(contender, problem, values)
        entry.metrics |= call.plans()
        entry.call = call
    if contender.graph and isinstance(entry.call, Call):
        with dropped_if_it_raises(entry, "not_measured"):
            entry.call = replay = Replay(entry.call)
            entry.metrics |= replay.plans()  # in a graph another backend may be the quicker
    return entry


def verify(entries: Sequence[Entry], problem: Problem, generator: torch.Generator) -> None:
    """Compare with the reference on fresh values; who is wrong is out and says why."""
    values = draw_values(problem, generator)
    racing = [(entry, entry.layer_call) for entry in entries]
    expected = references(problem, values, {e.contender.form for e, call in racing if call})
    allowed = bound(problem.case.dtype, problem.device)
    for entry, call in racing:
        if call is None:
            continue
        with dropped_if_it_raises(entry, "failed"):
            verdict = check(call, values, expected[entry.contender.form], allowed)
            earlier = entry.metrics.get("error")
            if isinstance(earlier, float):
                verdict = worse(verdict, Verdict(earlier, None))
            if verdict.error is not None:
                entry.metrics["error"] = verdict.error
            if verdict.failed is not None:
                entry.drop("failed", verdict.failed)


def clock(entries: Sequence[Entry], problem: Problem, effort: Effort) -> None:
    """Time both passes of those still in the race and, on CUDA, count their memory. The floor has
    a forward pass alone."""
    racing = {e.contender.name: (e, e.call) for e in entries if e.call is not None}
    on = clock_for(problem.device)
    forward: dict[str, CallNow] = {name: call.forward for name, (_, call) in racing.items()}
    train: dict[str, CallNow] = {
        name: layer.train for name, (entry, _) in racing.items() if (layer := entry.layer_call)
    }
    with torch.no_grad():
        found = {"forward_us": time_in_turns(forward, on, effort)}
    found["train_us"] = time_in_turns(train, on, effort)
    a_step = 1e6 / problem.case.steps
    for name, (entry, call) in racing.items():
        for metric, timings in found.items():
            if name in timings:
                entry.metrics[metric] = timings[name].median_s * a_step
                entry.metrics[f"{metric}_spread"] = timings[name].spread_s * a_step
        if problem.device.type == "cuda" and isinstance(call, Call):
            entry.metrics |= count_memory(call)


def count_memory(call: Call) -> dict[str, float | str]:
    """`kept_bytes`: allocated between the passes, the results included. `peak_bytes`: the most
    allocated at any time of both passes, results and gradients included. Both beyond what was
    there before the call: the weights, the call's arguments (the incoming gradients among them)
    and what an earlier call left behind for the next."""
    call.train()
    gc.collect()  # a cycle that dies during the call would count as memory the call gave back
    before = torch.cuda.memory_allocated()
    results = call.forward()
    kept = torch.cuda.memory_allocated() - before
    del results
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call.train()
    return {"kept_bytes": kept, "peak_bytes": torch.cuda.max_memory_allocated() - before}


@contextmanager
def dropped_if_it_raises(entry: Entry, why: str) -> Iterator[None]:
    """One contender's error is a row of the results and does not end the measurement."""
    try:
        yield
    except (RuntimeError, ValueError) as error:  # what torch and this library raise
        first_line = str(error).strip().partition("\n")[0]
        entry.drop(why, f"{type(error).__name__}: {first_line}")


@contextmanager
def tf32_where_it_is_faster(device: torch.device) -> Iterator[None]:
    """fp32 on CUDA is measured with TF32 products, which cuDNN's recurrent layers use anyway."""
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
