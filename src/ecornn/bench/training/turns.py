"""Who times steps next.

Contenders take turns, round by round, each round beginning with another one. A step that waits for
its host may take a third longer than the last one: the median of so few samples is uncertain by
several percent. Two that a target compares have further rounds, together, as long as the median of
one is uncertain and they are near each other: a host that is slow for some seconds must be slow for
both of them. Nobody waits for what is certain, such as replays of graphs, nor for what is so far
apart that it is no question.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan

from ecornn.bench.training.contenders import ALL
from ecornn.bench.training.targets import ECHO_TARGETS

#: A median is certain when its standard error is at most this share of it. Of the quotient of two
#: it is 2.1 % then, which is what a target of 5 % needs to be judged by.
CERTAIN = 0.015
#: Two medians are near each other when the larger is at most so much larger. Targets ask for 2 to
#: 10 %, and the median of seven turns is rarely off by as much again.
NEAR = 0.2


@dataclass
class Turns:
    """`wanted`: that a contender takes in any case. `further`: at most so many more, while
    `uncertainty`, of the `median` of its samples so far, is too large. `over`: it takes none any
    more."""

    wanted: int = 0
    further: int = 0
    uncertainty: float = inf
    median: float = nan
    over: bool = False

    def may_in(self, turn: int) -> bool:
        return self.wanted > 0 and not self.over and turn < self.wanted + self.further

    @property
    def uncertain(self) -> bool:
        return self.uncertainty > CERTAIN


def rounds(turns: Mapping[str, Turns]) -> Iterator[str]:
    """Names of contenders of one case, as it is their turn. Between two of them somebody notes in
    `turns` what came of it."""
    pairs = compared(tuple(turns))
    last = max((mine.wanted + mine.further for mine in turns.values()), default=0)
    for turn in range(last):
        going_on = {
            name for pair in pairs if open_in(turn, *(turns[one] for one in pair)) for name in pair
        }
        takers = [name for name, mine in turns.items() if turn < mine.wanted or name in going_on]
        if not takers:
            return
        first = turn % len(takers)
        for name in (*takers[first:], *takers[:first]):
            if not turns[name].over:
                yield name


def open_in(turn: int, one: Turns, other: Turns) -> bool:
    """Is it still a question who of two is the quicker, and by how much?"""
    if not (one.may_in(turn) and other.may_in(turn) and (one.uncertain or other.uncertain)):
        return False
    # nobody knows yet: not near
    return max(one.median, other.median) <= (1 + NEAR) * min(one.median, other.median)


def compared(names: Sequence[str]) -> list[tuple[str, str]]:
    """Ours and others whose times a target sets beside each other."""
    found: dict[tuple[str, str], None] = {}
    for target in ECHO_TARGETS:
        there = [name for name in names if name in target.times_compared]
        ours = [name for name in there if ALL[name].is_ours]
        found |= {(mine, name): None for mine in ours for name in there if name not in ours}
    return list(found)
