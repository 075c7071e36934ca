"""Who times steps next.

Contenders take turns, round by round, each round beginning with another one. A step that waits for
its host may take a third longer than the last one: the median of so few samples is uncertain by
several percent, and who is compared by it has further rounds, as long as that is so. Those that a
target compares go on together, since a host that is slow for some seconds must be slow for all of
them; replays of graphs, whose samples hardly differ, stop early.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from ecornn.bench.training.targets import ECHO_TARGETS

#: A median is certain when its standard error is at most this share of it. Of the quotient of two
#: it is 2.1 % then, which is what a target of 5 % needs to be judged by.
CERTAIN = 0.015


@dataclass
class Turns:
    """`wanted`: that a contender takes in any case. `further`: at most so many more, while
    `uncertainty`, of the median of its samples so far, is too large. `over`: it takes none any
    more."""

    wanted: int = 0
    further: int = 0
    uncertainty: float = inf
    over: bool = False

    def uncertain_in(self, turn: int) -> bool:
        may = not self.over and turn < self.wanted + self.further
        return may and self.uncertainty > CERTAIN


def rounds(turns: Mapping[str, Turns]) -> Iterator[str]:
    """Names of contenders of one case, as it is their turn. Between two of them somebody notes in
    `turns` what came of it."""
    together = companies(tuple(turns))
    last = max((mine.wanted + mine.further for mine in turns.values()), default=0)
    for turn in range(last):
        going_on = {
            name
            for company in together
            if any(turns[name].uncertain_in(turn) for name in company)
            for name in company
            if turns[name].wanted  # a part that is not timed has none at all
        }
        takers = [name for name, mine in turns.items() if turn < mine.wanted or name in going_on]
        if not takers:
            return
        first = turn % len(takers)
        for name in (*takers[first:], *takers[:first]):
            if not turns[name].over:
                yield name


def companies(names: Sequence[str]) -> list[set[str]]:
    """Those whose times a target compares, with each other or with the same third one, go on
    together; who is compared with nobody is alone."""
    found = [{name} for name in names]
    for target in ECHO_TARGETS:
        touched = [company for company in found if company & target.times_compared]
        if touched:
            found = [company for company in found if company not in touched]
            found.append(set().union(*touched))
    return found
