"""Ratios between contenders, and whether they and the memory are what the targets ask for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, Protocol

from ecornn.bench.cases import Case, Where
from ecornn.bench.contenders import is_ours, is_replayed
from ecornn.bench.results import AnyCase, Results, Row, rows_by_case
from ecornn.bench.targets import LayerTarget, MemoryTarget, Target

Outcome = Literal["passed", "failed", "not measured"]
OUTCOMES: tuple[Outcome, ...] = ("passed", "failed", "not measured")


class AnyTarget(Protocol):
    """What all targets have: a name for their group, the cases they speak of, a bound, a unit."""

    @property
    def name(self) -> str: ...
    @property
    def benchmark(self) -> str: ...
    @property
    def where(self) -> Where: ...
    @property
    def at_most(self) -> float | None: ...
    @property
    def unit(self) -> str: ...


class OwnTarget(AnyTarget, Protocol):
    """A target that judges the cases it speaks of by itself."""

    def judge(self, cases: Mapping[AnyCase, Mapping[str, Row]]) -> Iterable[Judgement]: ...


@dataclass(frozen=True)
class Judgement:
    """A target in one case. `found` is in the target's unit and bounded as it says; None without
    figures."""

    target: AnyTarget
    case: AnyCase | None
    outcome: Outcome
    found: float | None = None
    reason: str = ""


def ratio(row: Row, peer: Row, metric: str) -> float | None:
    """The peer's figure over the row's: how many times as fast, or as small, the row is. None
    unless both were measured, and in one run."""
    mine, theirs = row.number(metric), peer.number(metric)
    if mine is None or theirs is None or row.environment != peer.environment:
        return None
    if mine == 0:
        return math.inf if theirs else 1.0
    return theirs / mine


def pairs(contenders: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """(ours, peer) for every two that are called in the same way, or both replayed."""
    names = list(contenders)
    ours = [name for name in names if is_ours(name)]
    peers = [name for name in names if not is_ours(name)]
    return tuple(
        (mine, theirs)
        for mine in ours
        for theirs in peers
        if is_replayed(mine) == is_replayed(theirs)
    )


def judge(results: Results, targets: Iterable[LayerTarget | OwnTarget]) -> tuple[Judgement, ...]:
    """Every target of this benchmark in every case it speaks of."""
    found: list[Judgement] = []
    cases = rows_by_case(results.rows)
    for target in targets:
        if target.benchmark != results.benchmark:
            continue
        concerned = {case: rows for case, rows in cases.items() if case.matches(target.where)}
        if isinstance(target, LayerTarget):
            found += [_judge_case(target, case, rows) for case, rows in concerned.items()]
        else:
            found += target.judge(concerned)
        if not concerned:
            found.append(Judgement(target, None, "not measured", reason="no such case"))
    return tuple(found)


def _judge_case(target: LayerTarget, case: AnyCase, rows: Mapping[str, Row]) -> Judgement:
    mine = rows.get(target.contender)
    figure = None if mine is None else mine.number(target.metric)
    # Who has no figures misses the target; nobody misses one against a peer that has none.
    if mine is None or figure is None:
        return Judgement(target, case, "failed", reason=_why_not(mine, target.contender, target))
    if isinstance(target, MemoryTarget):
        assert isinstance(case, Case)
        found = figure / case.sequence_bytes
        return Judgement(target, case, "passed" if found <= target.at_most else "failed", found)
    return _judge_beside_peer(target, case, mine, rows.get(target.peer))


def _judge_beside_peer(target: Target, case: AnyCase, mine: Row, theirs: Row | None) -> Judgement:
    if theirs is None or theirs.number(target.metric) is None:
        return Judgement(target, case, "not measured", reason=_why_not(theirs, target.peer, target))
    times_as_fast = ratio(mine, theirs, target.metric)
    if times_as_fast is None:
        return Judgement(target, case, "not measured", reason="not measured in one run")
    if target.at_most is not None:
        found = 1 / times_as_fast if times_as_fast else math.inf
        met = found <= target.at_most
    else:
        found = times_as_fast
        met = target.at_least is not None and found >= target.at_least
    return Judgement(target, case, "passed" if met else "failed", found)


def _why_not(row: Row | None, name: str, target: LayerTarget) -> str:
    reason = "no row" if row is None else row.trouble or f"no {target.metric}"
    return f"{name}: {reason}"


def by_target(judgements: Iterable[Judgement]) -> list[tuple[AnyTarget, list[Judgement]]]:
    return [(group[0].target, group) for group in _grouped(judgements)]


def _grouped(judgements: Iterable[Judgement]) -> Iterator[list[Judgement]]:
    for _, group in groupby(judgements, key=lambda judgement: id(judgement.target)):
        yield list(group)


def worst(judgements: Iterable[Judgement]) -> float | None:
    """The figure that is nearest to missing its target, or farthest beyond."""
    known = [j for j in judgements if j.found is not None]
    if not known:
        return None
    choose = max if known[0].target.at_most is not None else min
    return choose(j.found for j in known if j.found is not None)


def tally(judgements: Iterable[Judgement]) -> str:
    counts = Counter(judgement.outcome for judgement in judgements)
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES)
