"""Who times steps how often, with clocks that say what they are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from statistics import median

import pytest

from ecornn.bench.timing import uncertainty
from ecornn.bench.training.contenders import CONTENDERS
from ecornn.bench.training.turns import CERTAIN, NEAR, Turns, compared, rounds

WANTED, FURTHER, STEPS = 4, 12, 2

#: Seconds of a contender's steps, one after the other.
Clock = Iterator[float]


def steady(seconds: float = 1.0) -> Clock:
    while True:
        yield seconds


def noisy(share: float, seconds: float = 1.0) -> Clock:
    """Slow and quick steps in turns."""
    for i in count():
        yield seconds * (1.0 + share * (i % 3 - 1))


def calming(after: int) -> Clock:
    for i in count():
        yield 1.0 + (0.2 * (i % 3 - 1) if i < after else 0.0)


def taken(clocks: dict[str, Clock], breaks: Callable[[str, int], bool] | None = None) -> list[str]:
    turns = {name: Turns(WANTED, FURTHER) for name in clocks}
    samples: dict[str, list[float]] = {name: [] for name in clocks}
    found = []
    for name in rounds(turns):
        found.append(name)
        samples[name] += [next(clocks[name]) for _ in range(STEPS)]
        turns[name].uncertainty = uncertainty(samples[name])
        turns[name].median = median(samples[name])
        turns[name].over = breaks is not None and breaks(name, len(samples[name]))
    return found


def test_the_certain_take_the_turns_they_want() -> None:
    assert taken({"eager": steady(), "echo": steady()}) == [
        *("eager", "echo", "echo", "eager") * 2,
    ]


def test_the_uncertain_go_on_and_not_for_ever() -> None:
    found = taken({"eager": steady(), "echo": noisy(0.5)})
    assert found.count("echo") == found.count("eager") == WANTED + FURTHER


def test_whom_no_target_compares_take_the_turns_they_want() -> None:
    found = taken({"eager": noisy(0.5), "checkpoint": noisy(0.5), "budget=0.5": noisy(0.5)})
    assert len(found) == 3 * WANTED


def test_they_go_on_until_they_are_certain() -> None:
    found = taken({"echo": calming(after=2 * WANTED), "eager": steady()})
    assert 2 * WANTED < len(found) < 2 * (WANTED + FURTHER)


@pytest.mark.parametrize(("times", "more"), [(1 + NEAR / 2, True), (1 + 2 * NEAR, False)])
def test_whoever_is_far_apart_does_not_go_on(times: float, more: bool) -> None:
    for slower, quicker in (("echo", "eager"), ("eager", "echo")):
        found = taken({slower: noisy(0.1, times), quicker: noisy(0.1)})
        assert (len(found) > 2 * WANTED) is more


def test_whom_a_target_compares_go_on_together_in_turns() -> None:
    found = taken({"echo": noisy(0.5), "torch.compile": steady(), "echo+graph": steady()})
    assert found.count("echo") == found.count("torch.compile") == WANTED + FURTHER
    assert found.count("echo+graph") == WANTED
    later = found[3 * WANTED :]
    pairs = [set(later[i : i + 2]) for i in range(0, len(later), 2)]
    assert pairs == [{"echo", "torch.compile"}] * FURTHER
    assert later[:4] == ["echo", "torch.compile", "torch.compile", "echo"]


def test_who_is_lost_keeps_nobody_going() -> None:
    def breaks(name: str, samples: int) -> bool:
        return name == "echo" and samples == STEPS * 2

    found = taken({"echo": noisy(0.5), "torch.compile": steady()}, breaks)
    assert (found.count("echo"), found.count("torch.compile")) == (2, WANTED)


def test_what_is_not_timed_has_no_turns() -> None:
    assert list(rounds({"echo": Turns(), "eager": Turns()})) == []
    turns = {"echo": Turns(), "eager": Turns(1, 2)}
    assert list(rounds(turns)) == ["eager"]
    turns = {"echo": Turns(1, 2), "eager": Turns(1, 2)}  # nobody says how long they take
    assert list(rounds(turns)) == ["echo", "eager"]


@pytest.mark.parametrize(("share", "more"), [(CERTAIN, False), (0.3, True)])
def test_a_few_percent_between_samples_are_certain_enough(share: float, more: bool) -> None:
    assert (len(taken({"echo": noisy(share), "eager": steady()})) > 2 * WANTED) is more


def test_ours_are_compared_with_others() -> None:
    found = compared([contender.name for contender in CONTENDERS["step"]])
    called = {("echo", "eager"), ("echo", "torch.compile"), ("echo+graph", "eager+graph")}
    options = ("torch.compile", "budget=0.5", "budget=0.1", "aggressive")
    called |= {(ours, option) for ours in ("echo", "echo memory=min") for option in options}
    assert set(found) == called
