"""Real processes, really killed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ecornn.bench.training.processes import Child, NoAnswer
from ecornn.settings import child_environment

PACKAGE = Path("nowhere")


def start(program: str) -> Child:
    return Child([sys.executable, "-c", program], child_environment(PACKAGE, {"SAID": "hello"}))


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


def until(holds: Callable[[], bool]) -> bool:
    for _ in range(200):
        if holds():
            return True
        time.sleep(0.02)
    return False


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    # one that nobody has waited for is dead all the same
    return not status.is_file() or status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_child_answers_in_lines() -> None:
    program = (
        "import json, os, sys\n"
        "for line in sys.stdin:\n"
        "    print(json.dumps({'heard': json.loads(line), 'said': os.environ['SAID']}), flush=True)"
    )
    with start(program) as child:
        for message in ({"a": 1}, "two"):
            child.send(message)
            assert child.receive(soon()) == {"heard": message, "said": "hello"}


def test_a_child_that_hangs_is_killed_with_its_own_children() -> None:
    program = (
        "import json, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(json.dumps({'other': other.pid}), flush=True)\n"
        "time.sleep(600)"
    )
    with start(program) as child:
        other = child.receive(soon())["other"]
        assert alive(child.pid)
        assert alive(other)
        with pytest.raises(NoAnswer, match="killed") as found:
            child.receive(soon(0.2))
        assert found.value.late
    assert until(lambda: not alive(child.pid) and not alive(other))


def test_what_was_said_in_time_is_read_afterwards() -> None:
    with start("print('{\"ready\": true}', flush=True); import time; time.sleep(600)") as child:
        time.sleep(2)
        assert child.receive(time.monotonic() - 1) == {"ready": True}


def test_a_signal_is_named() -> None:
    program = (
        "import os, signal, sys; print('about to', file=sys.stderr, flush=True); "
        "os.kill(os.getpid(), signal.SIGSEGV)"
    )
    with start(program) as child, pytest.raises(NoAnswer) as found:
        child.receive(soon())
    assert str(found.value) == "ended by SIGSEGV: about to"
    assert not found.value.late


def test_an_exit_code_and_the_last_words_are_told() -> None:
    with start("raise SystemExit('no luck')") as child, pytest.raises(NoAnswer) as found:
        child.receive(soon())
    assert str(found.value) == "ended with code 1: no luck"
    with start("raise SystemExit(3)") as child, pytest.raises(NoAnswer, match="said nothing"):
        child.receive(soon())


def test_speaking_to_a_child_that_is_gone_is_no_error() -> None:
    with start("pass") as child:
        with pytest.raises(NoAnswer):
            child.receive(soon())
        child.send("still there?")
