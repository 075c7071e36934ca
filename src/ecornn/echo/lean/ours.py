"""Recurrent layers of this package that run as they are written, around compiled parts: which keep
gates that they need not keep, and what of it is told."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from ecornn.echo.analysis.machine import machine_of
from ecornn.echo.keep_modes import FORWARD, gates_made_again
from ecornn.echo.parts import within
from ecornn.echo.work import Work
from ecornn.ops.keeping import flops_of, gates_of
from ecornn.ops.recurrence import read_call
from ecornn.planner import keeps_gates_unasked
from ecornn.sizes import size_text


@dataclass(frozen=True)
class OwnCall:
    """A call of such a layer, or of one layer of a stack, that keeps its gates unless it is told
    not to: within which part; their bytes, and the seconds of making them again."""

    path: str
    bytes: int
    seconds: float


def own_call(path: str, func: Any, args: Any) -> OwnCall | None:
    """Of a call of an operator on tensors without numbers; None if it is none of these."""
    if func is not FORWARD:
        return None
    call, backend = read_call(*args), args[-2]
    gates, seconds = gates_made_again(call)
    if not gates.few or not keeps_gates_unasked(backend, call.cell):
        return None
    return OwnCall(path, gates.bytes, seconds)


#: Kernels of one time step of a layer of torch's: its product, and its gates. Ours has one for all
#: of them, whose blocks wait for each other at every step for no longer than that.
KERNELS = 2


@dataclass(frozen=True)
class OwnRun:
    """A call of a recurrent layer of this package: within which part, the bytes of its results, and
    the seconds of its forward pass."""

    path: str
    bytes: int
    seconds: float


def own_run(path: str, func: Any, args: Any) -> OwnRun | None:
    """Of a call of an operator on tensors without numbers; None if it is none of these."""
    if func is not FORWARD:
        return None
    call = read_call(*args)
    x = call.input_TBI
    steps, batch = x.shape[:2]
    results = steps * batch * call.directions * call.h0_DBR.shape[-1] * x.element_size()
    machine = machine_of(x.device)
    work = Work(None, gates_of(call).read_bytes, results, flops_of(call), x.dtype, x.device)
    waits = KERNELS * steps * call.directions * machine.launch_s
    seconds = machine.seconds(work, product=True) + waits
    return OwnRun(path, results, seconds)


def told_of_own(
    calls: Iterable[OwnCall], parts: Collection[str], states_alone: bool, why: str
) -> list[str]:
    """By layer, in sentences; `parts`: those of which it is told elsewhere."""
    layers: dict[str, list[OwnCall]] = {}
    for call in calls:
        if call.path not in parts and not within(call.path, parts):
            layers.setdefault(call.path, []).append(call)
    found = []
    for path, own in layers.items():
        size = size_text(sum(call.bytes for call in own))
        time = f"{sum(call.seconds for call in own) * 1e6:.1f} µs"
        if states_alone:
            what = f"keeps its states alone: {size} of gates less, {time} to make them again"
        else:
            what = f"keeps its gates, {size}, which would take {time} to make again"
        found.append(f"{path} {what}; {why}")
    return found
