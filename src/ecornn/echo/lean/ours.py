"""Recurrent layers of this package that run as they are written, around compiled parts: which keep
gates that they need not keep, and what of it is told."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from ecornn.echo.keep_modes import FORWARD, gates_made_again
from ecornn.echo.parts import within
from ecornn.ops.keeping import gates_of
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


def gate_bytes(func: Any, args: Any) -> int:
    """Of a call of a recurrent layer of this package, whether it keeps them or not."""
    return gates_of(read_call(*args)).bytes if func is FORWARD else 0


def told_of_own(
    calls: Iterable[OwnCall], parts: Collection[str], states_alone: bool, why: str
) -> list[str]:
    """By layer, in sentences."""
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
