"""One contender of one case, measured in a process of its own.

`python -m ecornn.bench.training.worker PARENT` reads a request, a line of JSON, from its input;
prepares; says `{"ready": true, "turns": …, "further": …}`, where it wants so many, and as many more
if its median is uncertain; times some steps at every line "turn", while nobody else does, and says
`{"timed": …, "uncertainty": …, "median": …}`; measures the rest at the line "measure", and says
`{"metrics": …}`. Where it cannot, it says why instead. PARENT is the process that asks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from ecornn.bench.models.tasks import task_named
from ecornn.bench.runners import tf32_where_it_is_faster
from ecornn.bench.timing import uncertainty
from ecornn.bench.training.build import NotMeasurable, configured
from ecornn.bench.training.cases import ModelCase
from ecornn.bench.training.contenders import ALL, EAGER
from ecornn.bench.training.measure import EFFORTS, Effort, Measurement, first_line

#: Answers a request by what it says.
Say = Callable[[dict[str, Any]], None]
Serve = Callable[[dict[str, Any], Say], None]

NO_TURNS = Effort(turns=0, further=0, steps=0, tries=0)

#: How soon a process notices.
ORPHANED_AFTER_S = 0.5


def serve(request: dict[str, Any], say: Say) -> None:
    case, contender = ModelCase.from_json(request["case"]), ALL[request["contender"]]
    device = torch.device(request["device"])
    effort = EFFORTS[request["effort"]]
    job = Measurement(case, contender, device, effort, request["known_peak"])
    checking = case.part == "check"
    if checking:
        strict = task_named(case.model).strict
        torch.use_deterministic_algorithms(True, warn_only=not strict)
    try:
        with (
            tf32_where_it_is_faster(device),
            configured(contender, request["compilers"], eager_draws=checking),
        ):
            if device.type == "cuda":
                torch.zeros(1, device=device)  # the context is nobody's set-up
            job.prepare()
            # the clock of the process that asked: this one's start is part of it
            job.metrics["prepare_s"] = time.monotonic() - request["began"]
            effort = job.effort if job.takes_turns else NO_TURNS
            say({"ready": True, "turns": effort.turns, "further": effort.further})
            while (line := sys.stdin.readline()) and json.loads(line) == "turn":
                job.turn()
                said = {"uncertainty": uncertainty(job.seconds), "median": median(job.seconds)}
                say({"timed": len(job.seconds), **said})
            if line:
                job.measure()
                say({"metrics": job.metrics})
    except NotMeasurable as error:
        say({"metrics": {"not_measured": str(error)}})
    except Exception as error:
        # Whatever a contender raises is its row. torch's own way to fail at what it was never
        # said to do is no failure of ours.
        why = "failed" if contender.is_ours or contender is EAGER else "not_measured"
        say({"metrics": {why: first_line(error)}})
        raise  # the whole story goes to the log


def end_with_parent(parent: int) -> None:
    """A process that nobody waits for any more must not keep the GPU: when whoever asked is gone,
    killed perhaps, this one and the compilers it has started go too."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(ORPHANED_AFTER_S)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def main(serve: Serve = serve) -> None:
    end_with_parent(int(sys.argv[1]))
    # What torch's compilers print must not get between the messages.
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    serve(json.loads(sys.stdin.readline()), say)


if __name__ == "__main__":
    main()
