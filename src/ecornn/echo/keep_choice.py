"""Which recurrent layers of free choice keep their gates: at first, and what else is considered."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ecornn.echo.keep_modes import RecurrentCall
from ecornn.echo.options import Memory

#: For a budget, how often a number of layers between none and all is planned for: each is a joint
#: graph of its own.
BETWEEN = 3


def kept_first(memory: Memory, calls: Sequence[RecurrentCall]) -> frozenset[str]:
    """Names of those that keep their gates when all is kept. By itself a layer keeps few gates and
    no others; where bytes are told there is no reason to keep less than fits."""
    every = memory.kind in ("bytes", "fraction")
    return frozenset(call.name for call in calls if call.free and (call.few or every))


def nearly_free(calls: Sequence[RecurrentCall], seconds: float) -> list[RecurrentCall]:
    """As many as make their gates again in so many seconds together, those first that free most in
    a second; of calls alike the earlier one, whose gates are there for longer."""
    chosen: list[RecurrentCall] = []
    for call in sorted(calls, key=lambda one: -one.bytes / one.seconds):
        if sum(one.seconds for one in (*chosen, call)) <= seconds:
            chosen.append(call)
    return chosen


#: Plans for a joint graph in which these calls make their gates again; whether that serves.
Consider = Callable[[Sequence[RecurrentCall]], bool]


def consider_less(
    memory: Memory,
    calls: Sequence[RecurrentCall],
    seconds: float,
    quickest: float | None,
    consider: Consider,
) -> None:
    """`calls`: those that keep their gates at first. `seconds`: what may be spent. `quickest`: for
    a budget, the least time that a plan which fits adds so far, if one does."""
    calls = [call for call in calls if call.seconds <= seconds]
    if memory.kind == "auto":
        calls = nearly_free(calls, seconds)
    if not calls:
        return
    if memory.kind in ("auto", "min"):
        consider(calls)
        return
    if quickest is not None and quickest <= min(call.seconds for call in calls):
        return  # whatever makes gates again takes longer
    largest = sorted(calls, key=lambda call: -call.bytes)
    if not consider(largest):
        return
    low, high = 0, len(largest)
    for _ in range(BETWEEN):
        if high - low == 1:
            break
        middle = (low + high) // 2
        low, high = (low, middle) if consider(largest[:middle]) else (middle, high)
