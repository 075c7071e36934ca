"""How rows come about, with workers that only pretend to measure: these are quick, and can hang,
die and lie at will."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ecornn.bench.environment import PACKAGE
from ecornn.bench.results import Results, Row, read, write
from ecornn.bench.training import record as recording
from ecornn.bench.training.cases import ModelCase, make_case
from ecornn.bench.training.contenders import (
    AGGRESSIVE,
    CHECKPOINT,
    COMPILE,
    EAGER,
    ECHO,
    ECHO_EAGER,
    UNROLLED,
)
from ecornn.bench.training.record import Options, check_device, estimate, make_plan, record
from ecornn.bench.training.schedule import Job, Limits, compilers_each, run_jobs
from ecornn.errors import InvalidInput
from ecornn.settings import child_environment

NMT, GPT2 = make_case("nmt-50", "step", tiny=True), make_case("gpt2", "step", tiny=True)

#: Notes when it prepares and measures; what a contender does is said by `BEHAVIOUR`.
WORKER = """
import json, os, signal, sys, time
request = json.loads(sys.stdin.readline())
log = open(sys.argv[1], "a")
def note(what):
    log.write(json.dumps([request["contender"], what, time.monotonic()]) + "\\n"); log.flush()
def say(message):
    print(json.dumps(message), flush=True)
does = json.loads(sys.argv[2]).get(request["contender"], "")
note("starts")
if does == "hang":
    time.sleep(600)
if does == "crash":
    os.kill(os.getpid(), signal.SIGABRT)
if does == "refuse":
    say({"metrics": {"not_measured": "cannot"}}); raise SystemExit
time.sleep(0.2)
note("ready"); say({"ready": True, "turns": 2, "further": 3})
while json.loads(sys.stdin.readline()) == "turn":
    note("turn")
    if does == "hang in its turn":
        time.sleep(600)
    if does == "fail in its turn":
        say({"metrics": {"not_measured": "cannot any more"}}); raise SystemExit
    say({"timed": 1, "uncertainty": 0.2 if does == "spread" else 0.001, "median": 0.0025})
note("measures")
if does == "hang later":
    time.sleep(600)
time.sleep(0.1)
note("done"); say({"metrics": {"step_ms": 2.5, "peak_bytes": 1000}})
"""


class Pretended:
    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "log"
        self.out = folder / "echo.json"

    def options(self, behaviour: dict[str, str] | None = None, **changes: Any) -> Options:
        command = (sys.executable, "-c", WORKER, str(self.log), json.dumps(behaviour or {}))
        limits = Limits(workers=3, prepare_s=5.0, measure_s=1.5)
        given = {"limits": limits, "contenders": ("eager", "checkpoint", "torch.compile")}
        return Options(device="cpu", effort="quick", command=command, **{**given, **changes})

    def run(self, *cases: ModelCase, console: Console | None = None, **options: Any) -> Results:
        shown = console or Console(file=io.StringIO())
        return record(cases, self.options(**options), shown, self.out).results

    def notes(self) -> list[list[Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@pytest.fixture
def pretended(tmp_path: Path) -> Pretended:
    return Pretended(tmp_path)


def by_contender(results: Results) -> dict[str, Row]:
    return {row.contender: row for row in results.rows}


def test_rows_are_written_in_the_shared_form(pretended: Pretended) -> None:
    found = pretended.run(NMT)
    assert read(pretended.out).benchmark == "echo"
    assert [row.contender for row in found.rows] == ["eager", "checkpoint", "torch.compile"]
    assert all(row.number("step_ms") == 2.5 for row in found.rows)
    assert found.environment["effort"] == "quick"
    assert found.environment["workers"] == 3


def test_all_prepare_together_and_measure_alone(pretended: Pretended) -> None:
    pretended.run(NMT)
    notes = pretended.notes()
    started = [at for _, what, at in notes if what == "starts"]
    ready = [at for _, what, at in notes if what == "ready"]
    assert max(started) < min(ready)
    measuring = sorted((at, what) for _, what, at in notes if what in ("measures", "done"))
    assert measuring[0][0] > max(ready), "nobody prepares while somebody measures"
    assert [what for _, what in measuring] == ["measures", "done"] * 3


def test_some_prepare_at_once_and_all_take_turns(pretended: Pretended) -> None:
    limits = Limits(workers=3, prepare_s=5.0, measure_s=1.5, at_once=1)
    found = pretended.run(NMT, limits=limits)
    assert found.environment["workers"] == 1
    notes = pretended.notes()
    preparing = [what for _, what, at in sorted(notes, key=itemgetter(2)) if what != "turn"]
    assert preparing[:6] == ["starts", "ready"] * 3
    turns = [who for who, what, _ in notes if what == "turn"]
    assert turns == ["eager", "checkpoint", "torch.compile", "checkpoint", "torch.compile", "eager"]
    assert Limits(workers=2, at_once=5).side_by_side == 2


def test_steps_are_timed_in_turns_and_each_round_begins_with_another(pretended: Pretended) -> None:
    """Of one case; the next case has its own."""
    pretended.run(NMT, GPT2, limits=Limits(workers=6, prepare_s=5.0, measure_s=1.5))
    turns = [who for who, what, _ in pretended.notes() if what == "turn"]
    a_case = ["eager", "checkpoint", "torch.compile", "checkpoint", "torch.compile", "eager"]
    assert turns == a_case * 2


def test_who_is_uncertain_has_further_turns_with_whom_it_is_compared(pretended: Pretended) -> None:
    """`checkpoint` is compared by no target, and certain after two."""
    options = {"behaviour": {"eager": "spread"}, "contenders": ("eager", "checkpoint", "echo")}
    found = by_contender(pretended.run(NMT, **options))
    turns = [who for who, what, _ in pretended.notes() if what == "turn"]
    counts = {who: turns.count(who) for who in set(turns)}
    assert counts == {"eager": 5, "checkpoint": 2, "echo": 5}
    assert turns[6:] == ["eager", "echo", "echo", "eager", "eager", "echo"]
    assert all(row.number("measure_s") for row in found.values())


@pytest.mark.parametrize(
    ("does", "why"), [("hang in its turn", "killed"), ("fail in its turn", "cannot any more")]
)
def test_who_fails_in_a_turn_has_no_other(pretended: Pretended, does: str, why: str) -> None:
    found = by_contender(pretended.run(NMT, behaviour={"checkpoint": does}))
    assert why in str(found["checkpoint"].metrics["not_measured"])
    assert found["eager"].number("step_ms") == found["torch.compile"].number("step_ms") == 2.5
    turns = [who for who, what, _ in pretended.notes() if what == "turn"]
    assert turns == ["eager", "checkpoint", "torch.compile", "torch.compile", "eager"]


def test_all_cores_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever torch's own number of threads is: kernels are compiled by processes."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    jobs = [Job(NMT, contender) for contender in (EAGER, COMPILE, ECHO, ECHO_EAGER, AGGRESSIVE)]
    assert compilers_each(jobs) == 6  # for three
    assert compilers_each(jobs[:1]) == 16
    assert compilers_each(jobs[1:2] * 40) == 1


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("hang", "killed, as it had not answered after"),
        ("hang later", "killed, as it had not answered after"),
        ("crash", "ended by SIGABRT"),
        ("refuse", "cannot"),
    ],
)
def test_whoever_cannot_be_measured_is_a_row_with_the_reason(
    pretended: Pretended, does: str, says: str
) -> None:
    limits = Limits(workers=3, prepare_s=3.0, measure_s=1.0)
    found = by_contender(pretended.run(NMT, behaviour={"checkpoint": does}, limits=limits))
    assert says in str(found["checkpoint"].metrics["not_measured"])
    assert found["checkpoint"].number("step_ms") is None
    assert found["eager"].number("step_ms") == 2.5
    assert found["torch.compile"].number("step_ms") == 2.5
    assert [row.key for row in read(pretended.out).rows] == [row.key for row in found.values()]


def test_ours_has_failed_if_it_hangs_or_dies(pretended: Pretended) -> None:
    found = pretended.run(
        NMT, behaviour={"echo codegen=eager": "crash"}, contenders=(ECHO_EAGER.name,)
    )
    assert "SIGABRT" in str(found.rows[0].metrics["failed"])


def test_an_interruption_leaves_rows_and_no_processes(
    pretended: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Results] = []
    plain = recording.write

    def interrupted(results: Results, path: Path) -> None:
        plain(results, path)
        written.append(results)
        if len(written) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(recording, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pretended.run(NMT, GPT2)
    assert len(read(pretended.out).rows) == 2
    groups = [
        child for child in Path("/proc").glob("[0-9]*/cmdline") if is_worker(child, pretended)
    ]
    assert groups == []


def test_an_interruption_leaves_the_rows_of_one_run_where_a_case_has_some(
    pretended: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of another case, and what the file has none of, are written as they come."""
    before = pretended.run(NMT)
    long_ago = "2018-05-22T00:00:00+00:00"  # both runs may begin within one second
    write(replace(before, environment={**before.environment, "date": long_ago}), pretended.out)
    plain = recording.write
    rows: list[int] = []

    def interrupted(results: Results, path: Path) -> None:
        plain(results, path)
        rows.append(len(results.rows))
        if len(rows) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(recording, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pretended.run(GPT2, NMT)
    assert rows == [4, 5, 6, 6, 6]
    found = [row for row in read(pretended.out).rows if row.case == NMT]
    assert {dict(row.environment or {}).get("date") for row in found} == {long_ago}
    monkeypatch.undo()
    again = pretended.run(NMT)
    assert not any(row.environment for row in again.rows if row.case == NMT), "all are new"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_a_run_that_is_killed_takes_its_processes_with_it(
    tmp_path: Path, number: signal.Signals
) -> None:
    """A real run of real workers that take long: what is left of it is looked for by a mark in the
    environment that its processes inherit."""
    program = (
        "import sys; from ecornn.cli.app import main; "
        "sys.argv = 'ecornn bench echo --device cpu --tiny --workers 2 --case nmt-50'.split(); "
        "main()"
    )
    mark = str(tmp_path / "mark")
    environment = child_environment(PACKAGE, {"MARK": mark, "OMP_NUM_THREADS": "1"})
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    run = subprocess.Popen([sys.executable, "-c", program], env=environment, **quiet)  # type: ignore[call-overload]

    def marked() -> set[int]:
        found = set()
        for file in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # gone in the meantime, or somebody else's
                if f"MARK={mark}".encode() in file.read_bytes().split(b"\0"):
                    found.add(int(file.parent.name))
        return found

    try:
        assert until(lambda: len(marked()) >= 3), "the run and some workers"
        run.send_signal(number)
        run.wait(20)
        assert until(lambda: not marked()), "processes are left"
    finally:
        for pid in marked():
            os.kill(pid, signal.SIGKILL)


def until(holds: Callable[[], bool]) -> bool:
    for _ in range(400):
        if holds():
            return True
        time.sleep(0.05)
    return False


def is_worker(cmdline: Path, pretended: Pretended) -> bool:
    try:
        return os.fsencode(pretended.log) in cmdline.read_bytes().split(b"\0")
    except OSError:  # gone in the meantime
        return False


def test_runs_merge_into_one_file(pretended: Pretended) -> None:
    pretended.run(NMT)
    found = pretended.run(GPT2, contenders=("eager",))
    assert [(str(row.case), row.contender) for row in found.rows] == [
        *((str(NMT), name) for name in ("eager", "checkpoint", "torch.compile")),
        (str(GPT2), "eager"),
    ]
    assert [row.key for row in read(pretended.out).rows] == [row.key for row in found.rows]


def test_what_is_there_need_not_be_measured_again(pretended: Pretended) -> None:
    pretended.run(NMT)
    pretended.run(NMT, missing=True)
    assert len(read(pretended.out).rows) == 3
    starts = [note for note in pretended.notes() if note[1] == "starts"]
    assert len(starts) == 3, "the second run had nothing to do"
    # a case is measured as a whole: rows of two runs are not compared with each other
    more = ("eager", "checkpoint", "torch.compile", "aggressive")
    assert len(pretended.run(NMT, GPT2, missing=True, contenders=more).rows) == 8
    starts = [note for note in pretended.notes() if note[1] == "starts"]
    assert len(starts) == 3 + 8


def test_no_case_is_begun_that_would_take_too_long(pretended: Pretended) -> None:
    shown = io.StringIO()
    console = Console(file=shown, width=200)
    found = pretended.run(NMT, GPT2, minutes=0.01, console=console)
    assert {row.case for row in found.rows} == {NMT}, "the first is always done"
    assert f"not begun, for lack of time: {GPT2}" in shown.getvalue()


def test_nor_are_processes_of_several_cases(pretended: Pretended) -> None:
    """Three at a time: two cases of two."""
    shown = io.StringIO()
    options = {"together": True, "contenders": ("eager", "checkpoint")}
    console = Console(file=shown, width=200)
    found = pretended.run(NMT, GPT2, minutes=0.01, console=console, **options)
    assert [(row.case, row.contender) for row in found.rows] == [
        *((NMT, "eager"), (NMT, "checkpoint"), (GPT2, "eager"))
    ]
    assert f"not begun, for lack of time: {GPT2}\n" in shown.getvalue()


class TestEstimates:
    jobs = (Job(NMT, EAGER), Job(NMT, CHECKPOINT))

    def test_a_row_is_expected_to_take_what_it_took(self) -> None:
        known = {
            (NMT, name): Row(NMT, name, {"prepare_s": prepare, "measure_s": 2.0})
            for name, prepare in (("eager", 10.0), ("checkpoint", 30.0))
        }
        assert estimate(self.jobs, known, Limits(workers=2)) == 30 + 2 + 2
        assert estimate(self.jobs, known, Limits(workers=1)) == 10 + 2 + 30 + 2

    def test_others_are_assumed(self) -> None:
        unknown = estimate(self.jobs, {}, Limits())
        assert unknown > 0
        limits = Limits(prepare_s=100.0, patience=4.0)
        assert estimate([Job(NMT, UNROLLED)], {}, limits) > 400


def test_compiling_several_times_may_take_longer() -> None:
    limits = Limits(prepare_s=10.0, patience=3.0)
    assert limits.prepare_limit_s(NMT, EAGER) == 10
    assert limits.prepare_limit_s(NMT, UNROLLED) == 30
    assert limits.prepare_limit_s(make_case("gpt2", "batch"), EAGER) == 30


def test_a_case_without_contenders_is_left_out() -> None:
    options = Options(device="cpu", contenders=("eager+graph",))
    assert make_plan([NMT], options, {}) == []


def test_only_tiny_models_run_on_the_cpu() -> None:
    check_device("cpu", tiny=True)
    with pytest.raises(InvalidInput, match="--tiny"):
        check_device("cpu", tiny=False)
    with pytest.raises(InvalidInput, match="cuda or cpu"):
        check_device("tpu", tiny=True)


def test_every_process_has_cold_caches_that_are_removed(tmp_path: Path) -> None:
    program = (
        "import json, os, sys; sys.stdin.readline(); "
        "names = 'TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR ECORNN_CACHE'.split(); "
        "print(json.dumps({'metrics': {name: os.environ[name] for name in names}}))"
    )
    jobs = [Job(NMT, EAGER), Job(NMT, CHECKPOINT)]
    command = (sys.executable, "-c", program)
    found = [
        job.metrics for job in run_jobs(jobs, Limits(), "cpu", "quick", lambda _: None, command)
    ]
    folders = [str(path) for metrics in found for path in metrics.values()]
    assert len(set(folders)) == 6
    assert not any(Path(folder).exists() for folder in folders)
