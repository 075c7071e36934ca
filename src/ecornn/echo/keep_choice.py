"""Which recurrent layers of free choice keep their gates: at first, and what else is considered."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ecornn.echo.keep_modes import RecurrentCall
from ecornn.echo.options import BUDGETS, Memory

#: For a budget, how often a number of layers between none and all is planned for: each is a joint
#: graph of its own.
BETWEEN = 3


def kept_first(memory: Memory, calls: Sequence[RecurrentCall]) -> frozenset[str]:
    """Names of those that keep their gates when all is kept. Where bytes are told there is no
    reason to keep less than fits; otherwise none, as torch's own compilers have it."""
    every = memory.kind in BUDGETS
    return frozenset(call.name for call in calls if call.free and every)


#: Plans for a joint graph in which the first calls make their gates again, and the others keep
#: theirs; whether that serves.
Consider = Callable[[Sequence[RecurrentCall], Sequence[RecurrentCall]], bool]


def consider_others(
    memory: Memory,
    calls: Sequence[RecurrentCall],
    quickest: float | None,
    consider: Consider,
) -> None:
    """`calls`: those of free choice. `quickest`: for a budget, the least time that a plan which
    fits adds so far, if one does."""
    if memory.kind == "auto":
        # where the peak is elsewhere, keeping them takes nothing and saves time
        few = [call for call in calls if call.few]
        if few:
            consider((), few)
        return
    if memory.kind == "min" or not calls:
        return
    if quickest is not None and quickest <= min(call.seconds for call in calls):
        return  # whatever makes gates again takes longer
    largest = sorted(calls, key=lambda call: -call.bytes)
    if not consider(largest, ()):
        return
    low, high = 0, len(largest)
    for _ in range(BETWEEN):
        if high - low == 1:
            break
        middle = (low + high) // 2
        low, high = (low, middle) if consider(largest[:middle], ()) else (middle, high)
