"""Measure every contender of some cases into a file."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ecornn.bench.environment import describe
from ecornn.bench.record import Recording, check_writable
from ecornn.bench.results import AnyCase, Results, Row, check_mergeable, merge, read, write
from ecornn.bench.runners import choose_device, tf32_where_it_is_faster
from ecornn.bench.training.cases import BENCHMARK, ModelCase, make_case
from ecornn.bench.training.contenders import Contender, contenders_for
from ecornn.bench.training.schedule import COMMAND, Job, Limits, groups, run_jobs
from ecornn.errors import InvalidInput

#: Assumed for a row that the file does not have yet, only to say beforehand how long it may take:
#: seconds until a process is ready, by kind of contender, and seconds to measure it.
ASSUMED_PREPARE_S = {
    "eager": 12.0,
    "checkpoint": 12.0,
    "layers": 20.0,
    "compile": 40.0,
    "echo": 40.0,
    "profiler": 60.0,
}
ASSUMED_MEASURE_S = 3.0

Known = Mapping[tuple[Any, str], Row]
Plan = list[tuple[ModelCase, list[Job]]]


@dataclass(frozen=True)
class Options:
    """`minutes`: no case but the first is begun that would not be done by then, as far as can be
    told. `missing`: only cases of which the file lacks a row. `contenders`: only these. `together`:
    jobs of several cases prepare side by side; those that do are what is begun or not."""

    device: str = "cuda"
    effort: str = "thorough"
    limits: Limits = field(default_factory=Limits)
    minutes: float | None = None
    missing: bool = False
    contenders: tuple[str, ...] = ()
    unrolled: bool = False
    command: tuple[str, ...] = COMMAND
    benchmark: str = BENCHMARK
    together: bool = False


def record(
    cases: Sequence[ModelCase], options: Options, console: Console, out: Path | None = None
) -> Recording:
    """The file is written after every row: what was measured outlives an interruption. But of a
    case that the file has already, only once all of its rows are there: rows of two runs are not
    compared with each other, and an interrupted run would leave such."""
    device = choose_device(options.device)
    with tf32_where_it_is_faster(device):
        environment = describe(device) | {"effort": options.effort}
    environment["workers"] = options.limits.side_by_side
    earlier = None
    if out is not None:
        check_writable(out)
        if out.exists():
            earlier = read(out)
            check_mergeable(earlier, options.benchmark, environment)
    measured: list[Row] = []
    known = {} if earlier is None else {row.key: row for row in earlier.rows}
    plan = make_plan(cases, options, known)
    awaited: Counter[AnyCase] = Counter(job.case for _, jobs in plan for job in jobs)
    replaced = {case for case, _ in known}

    def results() -> Results:
        told = tuple(row for row in measured if row.case not in replaced or not awaited[row.case])
        fresh = Results(options.benchmark, environment, told)
        return fresh if earlier is None else merge(earlier, fresh)

    def take(row: Row) -> None:
        measured.append(row)
        awaited[row.case] -= 1
        if out is not None:
            write(results(), out)

    with stopped_by_sigterm():
        for job in run_plan(plan, options, console, known):
            take(job.row())
    return Recording(results(), tuple(measured))


@contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """`kill` ends the run as Ctrl-C does: its processes end with it, its folders are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may have handlers
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def check_device(device: str, *, tiny: bool) -> None:
    """Before the first process is started."""
    if device not in ("cuda", "cpu"):
        raise InvalidInput("device", repr(device), "cuda or cpu", "name one")
    if device == "cpu" and not tiny:
        raise InvalidInput(
            "device",
            "cpu for models of full size, which would take hours",
            "cuda, or cpu with --tiny",
            "add --tiny",
        )


def make_plan(cases: Sequence[ModelCase], options: Options, known: Known) -> Plan:
    plan: Plan = []
    for case in cases:
        found = contenders_for(case, options.device, options.contenders, unrolled=options.unrolled)
        if found and not (options.missing and all((case, c.name) in known for c in found)):
            jobs = [Job(case, one, known_peak(case, one, known)) for one in found]
            plan.append((case, jobs))
    if options.together:
        jobs = [job for _, of_case in plan for job in of_case]
        return [(group[0].case, list(group)) for group in groups(jobs, options.limits.workers)]
    return plan


def known_peak(case: ModelCase, contender: Contender, known: Known) -> int | None:
    """Of the step with the batch at which the search for the largest begins, from the file."""
    if case.part != "batch":
        return None
    row = known.get((make_case(case.name, "step", tiny=case.size == "tiny"), contender.name))
    peak = None if row is None else row.number("peak_bytes")
    return None if peak is None else int(peak)


def run_plan(plan: Plan, options: Options, console: Console, known: Known) -> Iterator[Job]:
    """Every job with its metrics, under a progress bar, as long as there is time."""
    expected = [estimate(jobs, known, options.limits) for _, jobs in plan]
    rows = sum(len(jobs) for _, jobs in plan)
    cases = len({job.case for _, jobs in plan for job in jobs})
    console.print(f"{rows} rows of {cases} cases, about {sum(expected) / 60:.1f} minutes")
    began = time.monotonic()
    columns = (
        MofNCompleteColumn(),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=rows)

        def tell(text: str) -> None:
            progress.update(task, description=text)

        for i, (_, jobs) in enumerate(plan):
            done_after = time.monotonic() - began + expected[i]
            if options.minutes is not None and i and done_after > 60 * options.minutes:
                cases_left = dict.fromkeys(job.case for _, jobs in plan[i:] for job in jobs)
                left = "; ".join(map(str, cases_left))
                console.print(f"not begun, for lack of time: {left}", markup=False)
                return
            for job in run_jobs(
                jobs, options.limits, options.device, options.effort, tell, options.command
            ):
                yield job
                progress.advance(task)


def estimate(jobs: Sequence[Job], known: Known, limits: Limits) -> float:
    """Seconds for a case's jobs: those that prepare side by side are ready when the slowest is, and
    are measured one by one. What the file's rows took is what they are expected to take again."""
    total = 0.0
    there = groups(jobs, limits.workers)
    for group in (wave for some in there for wave in groups(some, limits.side_by_side)):
        rows = [known.get((job.case, job.contender.name)) for job in group]
        prepare, measure = (
            [None if row is None else row.number(metric) for row in rows]
            for metric in ("prepare_s", "measure_s")
        )
        assumed = [
            limits.prepare_limit_s(job.case, job.contender)
            if job.contender.unrolled
            else ASSUMED_PREPARE_S[job.contender.kind]
            for job in group
        ]
        total += max(a if p is None else p for p, a in zip(prepare, assumed, strict=True))
        total += sum(ASSUMED_MEASURE_S if m is None else m for m in measure)
    return total
