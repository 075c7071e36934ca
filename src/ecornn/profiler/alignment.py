"""Which storage of one step is which of another, that has a few more or fewer.

A library takes scratch or not as the sizes have it, so that two batches' allocations may differ.
The fewest insertions and deletions that make one sequence of the other are found greedily, as
programs that compare texts do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

#: Operator, module and phase; or what was there before.
Key = tuple[str, str, str]
#: An operator's scratch and its result have one place: what is given up before anything else is
#: taken is told apart.
SCRATCH = " (scratch)"
#: More than so many insertions and deletions are not looked for: those are other steps.
MOST = 500


def key_of(at: Key, born: int, freed: int | None) -> Key:
    operator, module, phase = at
    return (operator + SCRATCH, module, phase) if freed == born + 1 else at


def aligned(below: Sequence[Key], above: Sequence[Key]) -> NDArray[np.int64]:
    """For each key of `above` its place in `below`, in order; -1 if it has none."""
    places = np.full(len(above), -1, np.int64)
    if list(below) == list(above):
        return np.arange(len(above))
    reached = _furthest(below, above)
    if reached is None:
        return places
    x, y = len(below), len(above)
    for edits in range(len(reached) - 1, -1, -1):
        line, start_x, start_y = x - y, 0, 0
        if edits:
            before = reached[edits - 1]
            came_from = line + 1 if _is_new(before, line, edits) else line - 1
            start_x = before[came_from]
            start_y = start_x - came_from
        while x > start_x and y > start_y:
            x, y = x - 1, y - 1
            places[y] = x
        x, y = start_x, start_y
    return places


def _furthest(below: Sequence[Key], above: Sequence[Key]) -> list[dict[int, int]] | None:
    """After each number of edits, how far along `below` one comes on each diagonal."""
    reached: list[dict[int, int]] = []
    last: dict[int, int] = {1: 0}
    for edits in range(MOST + 1):
        now: dict[int, int] = {}
        for line in range(-edits, edits + 1, 2):
            new = _is_new(last, line, edits)
            x = last.get(line + 1, 0) if new else last[line - 1] + 1
            while x < len(below) and x - line < len(above) and below[x] == above[x - line]:
                x += 1
            now[line] = x
            if x >= len(below) and x - line >= len(above):
                return [*reached, now]
        reached.append(now)
        last = now
    return None


def _is_new(last: Mapping[int, int], line: int, edits: int) -> bool:
    """Whether a diagonal is best reached by a key that only the second sequence has."""
    if line in (-edits, edits):
        return line == -edits
    return last.get(line - 1, -1) < last.get(line + 1, -1)
