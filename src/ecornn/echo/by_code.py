"""What a graph is planned for where a budget, or the least, is one of the code that inductor makes.

Plans are ranked by an estimate of what their code holds. Once it is generated, replaying it gives
the number itself (`replay.py`). So both passes are compiled ahead of the first call; where their
code holds more than was asked for, they are planned for less, in proportion, and at last for the
least; and for the least some plans are compiled, and the one whose code holds least is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ecornn.echo.options import AUTO, MIN, Memory, refusal

#: How often a graph is planned for less before it is for the least: each time is a compilation.
TIGHTENINGS = 2


@dataclass(frozen=True)
class Aim:
    """What a graph is planned for. `of_torch`: the one of its ways that is taken; None: any.
    `or_least`: where no plan fits by the estimate, the smallest is taken. `limit`: the bytes that
    were asked for, where it is planned for less than these."""

    memory: Memory
    of_torch: str | None = None
    or_least: bool = False
    limit: int | None = None


KEEP_ALL = "keep all"
#: The code of one of these held least, of small networks on the CPU: where products are run again,
#: inductor's order may take more than is freed.
LEAST = (Aim(MIN), Aim(AUTO), Aim(MIN, "torch's min-cut"))


@dataclass(frozen=True)
class Tried:
    """`peak`: what the code that was generated for an aim holds, by its replay; `inputs` of that
    are inputs and weights. `planned`: by the estimate. `limit`: what was asked for, in bytes."""

    aim: Aim
    strategy: str
    peak: int
    inputs: int
    planned: int
    seconds_added: float
    limit: int | None = None


#: Compiles both passes for an aim. Given the most bytes that are of interest, None where they would
#: hold more, whatever code is made of them.
Attempt = Callable[[Aim, int | None], Tried | None]


def least_by_code(attempt: Attempt) -> Aim:
    return _least(attempt).aim


def within_by_code(memory: Memory, attempt: Attempt) -> Aim:
    """Raises where no code was found that holds no more than is asked for."""
    asked = _in_bytes(memory, attempt)
    last = _some(attempt(Aim(asked, or_least=True), None))
    limit = int(asked.amount) if asked.kind == "bytes" else last.limit
    assert limit is not None  # of a budget
    for _ in range(TIGHTENINGS):
        tighter = _tighter(last, limit)
        if tighter is None:
            break
        before, last = last, _some(attempt(Aim(tighter, or_least=True), None))
        if last is before:
            break
    # whatever was found on the way: what is named is what the least holds, and met if asked for
    found = last if last.peak <= limit else _least(attempt)
    if found.peak > limit:
        of = "the code of the forward and backward pass of this graph"
        raise refusal(memory, limit, found.peak, of)
    return replace(found.aim, limit=limit)


def _in_bytes(memory: Memory, attempt: Attempt) -> Memory:
    """A fraction is one of what code holds that keeps all; of an estimate where torch's way to do
    that is not made, as of large graphs."""
    whole = attempt(Aim(memory, KEEP_ALL), None) if memory.kind == "fraction" else None
    if whole is None:
        return memory
    return Memory("bytes", whole.inputs + int(memory.amount * (whole.peak - whole.inputs)))


def _least(attempt: Attempt) -> Tried:
    best = _some(attempt(LEAST[0], None))
    for aim in LEAST[1:]:
        one = attempt(aim, best.peak)
        best = best if one is None else min(best, one, key=lambda o: (o.peak, o.seconds_added))
    return best


def _some(one: Tried | None) -> Tried:
    assert one is not None  # without a limit
    return one


def _tighter(one: Tried, limit: int) -> Memory | None:
    """What to plan for so that code which does not fit will, if it holds as much more than its plan
    as it did: beside inputs and weights, which are there whatever the plan."""
    inputs, planned = one.inputs, one.planned
    if not inputs < limit < one.peak or planned <= inputs:
        return None
    return Memory("bytes", inputs + (planned - inputs) * (limit - inputs) // (one.peak - inputs))
