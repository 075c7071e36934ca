"""Every contender's calls under torch's profiler, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ecornn.bench.problem import Problem
from ecornn.bench.runners import Entry
from ecornn.bench.timeline.operations import Operation, summary
from ecornn.bench.timing import Effort

WARM_UP_CALLS = 3
#: In a row, as the benchmark of times has them.
CALLS = 5
UNSEEN = "torch's profiler saw no operation of the GPU"


def watch(entries: Sequence[Entry], problem: Problem, effort: Effort) -> None:
    """Takes the place of the clock in `run_cases`. How many samples there would be does not matter
    here: figures are of some calls in one run of the profiler, whose own work for each operation
    is in the time between them."""
    del effort
    for entry in entries:
        if entry.call is None:
            continue
        passes: list[tuple[str, Callable[[], Any]]] = [("forward", entry.call.forward)]
        passes += [] if entry.layer_call is None else [("train", entry.layer_call.train)]
        for which, call in passes:
            with torch.set_grad_enabled(which == "train"):
                seen = operations_of(call)
            if not seen:
                entry.drop("not_measured", UNSEEN)
                break
            entry.metrics |= summary(which, seen, CALLS, problem.case.steps)


def operations_of(call: Callable[[], Any]) -> list[Operation]:
    for _ in range(WARM_UP_CALLS):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    profiler = recorded.profiler
    events = [] if profiler is None else profiler.kineto_results.events()
    on_gpu = torch._C._autograd.DeviceType.CUDA
    return [
        Operation(event.name(), event.start_ns(), event.duration_ns())
        for event in events
        if event.device_type() == on_gpu
    ]
