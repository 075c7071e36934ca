"""Many prepare at once, one measures at a time.

Compiling takes far longer than measuring and leaves the GPU idle, so that as many processes as
there are workers prepare side by side. Then all of them wait, and take turns: each times some steps
while the others wait (`turns.py`). A host may be twice as slow for some seconds: steps that wait
for it can be compared only where all had the same seconds.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ecornn.bench.environment import PACKAGE
from ecornn.bench.results import Row
from ecornn.bench.training.cases import ModelCase
from ecornn.bench.training.contenders import Contender
from ecornn.bench.training.processes import Child, NoAnswer
from ecornn.bench.training.turns import Turns, rounds
from ecornn.settings import child_environment

COMMAND = (sys.executable, "-m", "ecornn.bench.training.worker")


@dataclass(frozen=True)
class Limits:
    """`workers`: so many processes are there at once, and take turns. `prepare_s`, `measure_s`: how
    long each may take for either before it is killed; `patience` times as long for what compiles
    several times, or a loop unrolled. `at_once`: so many of the workers prepare side by side; all,
    if it is not given."""

    workers: int = 8
    prepare_s: float = 150.0
    measure_s: float = 60.0
    patience: float = 3.0
    at_once: int | None = None

    @property
    def side_by_side(self) -> int:
        return self.workers if self.at_once is None else min(self.at_once, self.workers)

    def prepare_limit_s(self, case: ModelCase, contender: Contender) -> float:
        patient = contender.unrolled or case.part == "batch"
        return self.prepare_s * (self.patience if patient else 1.0)


@dataclass
class Job:
    case: ModelCase
    contender: Contender
    known_peak: int | None = None  # see `Measurement`
    metrics: dict[str, float | str] = field(default_factory=dict)
    turns: Turns = field(default_factory=Turns)
    timed_s: float = 0.0  # in its turns

    def lose(self, error: NoAnswer) -> None:
        """Ours must not hang or die. What others do is told, and is no failure of this run."""
        self.metrics["failed" if self.contender.is_ours else "not_measured"] = str(error)

    @property
    def lost(self) -> bool:
        return "failed" in self.metrics or "not_measured" in self.metrics

    def row(self) -> Row:
        return Row(self.case, self.contender.name, self.metrics)


def groups(jobs: Sequence[Job], size: int) -> list[Sequence[Job]]:
    return [jobs[i : i + size] for i in range(0, len(jobs), size)]


def compilers_each(group: Sequence[Job]) -> int:
    """Processes that compile kernels, for each that needs some: all cores are used. torch's own
    number of threads says nothing of them where somebody has limited it."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    cores = (os.cpu_count() or 1) if affinity is None else len(affinity(0))
    return -(-cores // max(1, sum(job.contender.compiles for job in group)))


def run_jobs(
    jobs: Sequence[Job],
    limits: Limits,
    device: str,
    effort: str,
    tell: Callable[[str], None],
    command: Sequence[str] = COMMAND,
) -> Iterator[Job]:
    """Each job as soon as it has its metrics. Whatever happens, no process is left behind."""
    for group in groups(jobs, limits.workers):
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ecornn-bench-")))
            preparing: list[tuple[Job, Child]] = []
            ready: list[tuple[Job, Child]] = []
            for wave in groups(group, limits.side_by_side):
                tell(f"{wave[0].case}: {', '.join(job.contender.name for job in wave)} prepare")
                begun: list[tuple[Job, Child]] = []
                for job in wave:
                    started = (*command, str(os.getpid()))  # by whose end it ends too
                    place = folder / str(len(preparing) + len(begun))
                    child = stack.enter_context(Child(started, _environment(place, job.case)))
                    child.send(
                        {
                            "case": job.case.to_json(),
                            "contender": job.contender.name,
                            "device": device,
                            "effort": effort,
                            "known_peak": job.known_peak,
                            "began": child.began,
                            "threads": max(1, torch.get_num_threads() // len(wave)),
                            "compilers": compilers_each(wave),
                        }
                    )
                    begun.append((job, child))
                preparing += begun
                ready += [(job, child) for job, child in begun if _prepared(job, child, limits)]
            yield from (job for job, child in preparing if (job, child) not in ready)
            for job, child in in_turns(ready):
                tell(f"{job.case}: {job.contender.name}")
                _timed(job, child, limits)
            for job, child in ready:
                tell(f"{job.case}: {job.contender.name}")
                _measured(job, child, limits)
                yield job


def in_turns(ready: Sequence[tuple[Job, Child]]) -> Iterator[tuple[Job, Child]]:
    """Case by case, those of one case in turns."""
    for case in dict.fromkeys(job.case for job, _ in ready):
        mine = {job.contender.name: (job, child) for job, child in ready if job.case == case}
        for name in rounds({name: job.turns for name, (job, _) in mine.items()}):
            yield mine[name]


def _environment(folder: Path, case: ModelCase) -> dict[str, str]:
    """Cold caches of its own for each, so that nobody's set-up profits from another's."""
    folder.mkdir()
    changes = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "ECORNN_CACHE": str(folder / "ecornn"),
    }
    if case.part == "check":  # what cuBLAS needs in order to give the same result twice
        changes["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return child_environment(PACKAGE, changes)


def _prepared(job: Job, child: Child, limits: Limits) -> bool:
    """Whether it is ready to be measured; if not, its metrics are there, or why there are none."""
    deadline = child.began + limits.prepare_limit_s(job.case, job.contender)
    try:
        message = child.receive(deadline)
        while "so_far" in message:
            job.metrics |= message["so_far"]
            message = child.receive(deadline)
    except NoAnswer as error:
        job.lose(error)
        child.close()
        return False
    job.metrics |= message.get("metrics", {})
    job.turns = Turns(message.get("turns", 0), message.get("further", 0))
    return "ready" in message


def _timed(job: Job, child: Child, limits: Limits) -> None:
    began = time.monotonic()
    child.send("turn")
    try:
        message = child.receive(began + limits.measure_s)
        job.metrics |= message.get("metrics", {})  # why it could not
        job.turns.uncertainty = message.get("uncertainty", job.turns.uncertainty)
        job.turns.median = message.get("median", job.turns.median)
    except NoAnswer as error:
        job.lose(error)
    job.timed_s += time.monotonic() - began
    if job.lost:
        job.turns.over = True
        child.close()


def _measured(job: Job, child: Child, limits: Limits) -> None:
    if job.lost:
        return
    began = time.monotonic()
    child.send("measure")
    try:
        job.metrics |= child.receive(began + limits.measure_s)["metrics"]
        job.metrics["measure_s"] = job.timed_s + time.monotonic() - began
    except NoAnswer as error:
        job.lose(error)
    finally:
        child.close()
