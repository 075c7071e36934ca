"""One model, measured in a process of its own: `python -m ecornn.bench.profiling.worker PARENT`.

It speaks as the workers of training steps do, and says its figures so far after each part.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from ecornn.bench.profiling.measure import EFFORTS, Measurement
from ecornn.bench.runners import tf32_where_it_is_faster
from ecornn.bench.training.cases import ModelCase
from ecornn.bench.training.measure import first_line
from ecornn.bench.training.worker import Say, main


def serve(request: dict[str, Any], say: Say) -> None:
    device = torch.device(request["device"])
    torch.set_num_threads(request["threads"])
    job = Measurement(
        ModelCase.from_json(request["case"]),
        device,
        EFFORTS[request["effort"]],
        lambda figures: say({"so_far": figures}),
    )
    try:
        with tf32_where_it_is_faster(device):
            job.prepare()
            job.metrics["prepare_s"] = time.monotonic() - request["began"]
            say({"so_far": job.metrics})
            say({"ready": True})
            if sys.stdin.readline():
                job.measure()
                say({"metrics": job.metrics})
    except Exception as error:
        say({"metrics": {**job.metrics, "failed": first_line(error)}})
        raise  # the whole story goes to the log


if __name__ == "__main__":
    main(serve)
