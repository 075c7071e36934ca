"""The plan that serves a budget: the cheapest that fits, the smallest that is nearly free, or the
smallest there is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ecornn.echo.options import Memory, refusal
from ecornn.echo.passes import Passes
from ecornn.echo.plan.estimate import Estimate
from ecornn.echo.plan.groups import Group
from ecornn.echo.plan.prices import Prices, read_by_heavy
from ecornn.echo.plan.search import BEST, BEST_FOR_LEAST, Found, Key, Search
from ecornn.errors import InvalidInput

#: Of the estimated time of a step: what "auto" takes beyond the quickest plan that is known.
NEARLY_FREE = 0.02
#: And at most, where it frees so many times as large a share of the memory. The kernels that make a
#: translator's attention again take an estimated 4 % of its decoder's step for sentences of 50
#: words, 7 % for 100, and free 69 and 83 % of what torch's min-cut holds; what is freed of
#: ResNet-50 is six times what it takes at best.
WELL_SPENT, TIMES_FREED = 0.1, 8
#: Of that of both passes: what any plan spends at most. Beyond, a smaller batch is the better way.
AT_MOST = 1.0

#: Of a peak: one that is lower by less than this is not worth any time; estimates are not as good
#: as that, and what is hardly anything would count where plans differ by little else. With 3 % the
#: backward pass of an encoder-decoder transformer has an estimated 233 kernels beside its products,
#: with 5 % it has 211 (torch's own plan: 159), at a peak 3 % higher.
ALIKE = 0.05
#: Of a peak: what "auto" leaves unsaved where saving it takes time. With 1.5 % GPT-2's backward
#: pass has an estimated 201 kernels beside its products, with 3 % it has 189, at a peak 1.4 %
#: higher.
LITTLE = 0.03


@dataclass(frozen=True)
class OfTorch:
    """torch's min-cut: what it keeps, and what is estimated for it as it is: it may merge more than
    a plan of ours that keeps the same."""

    kept: frozenset[int]
    estimate: Estimate


@dataclass(frozen=True)
class Quickest:
    """Of plans that are known the quickest: what it adds to a step that keeps all, how long a step
    takes with it, and the bytes that plans are compared by."""

    seconds_added: float
    step_seconds: float
    weight: int


@dataclass(frozen=True)
class Limits:
    """A budget as numbers: what fits, and what may be spent. `quickest`: where more may be spent
    well."""

    bytes: int | None
    seconds: float
    quickest: Quickest | None = None

    def allow(self, seconds_added: float, weight: int) -> bool:
        if seconds_added <= self.seconds or self.quickest is None:
            return seconds_added <= self.seconds
        share = (seconds_added - self.quickest.seconds_added) / self.quickest.step_seconds
        freed = 1 - weight / self.quickest.weight
        return share <= WELL_SPENT and freed >= TIMES_FREED * share

    def moved(self, seconds: float) -> Limits:
        """For times that are told beside others."""
        quickest = self.quickest
        if quickest is not None:
            quickest = replace(quickest, seconds_added=quickest.seconds_added + seconds)
        return Limits(self.bytes, self.seconds + seconds, quickest)


NO_LIMITS = Limits(None, float("inf"))


class DoesNotFit(Exception):
    """No plan that was looked at is within a budget of so many bytes."""

    def __init__(self, limits: Limits, most: int) -> None:
        super().__init__(f"{most:,} bytes")
        self.limits, self.most = limits, most


def limits_of(
    memory: Memory,
    passes: Passes,
    keep_all_peak: int,
    step_seconds: float,
    quickest: Quickest,
) -> Limits:
    """`step_seconds`: of both passes, when all is kept."""
    if memory.kind == "auto":
        free = quickest.seconds_added + NEARLY_FREE * quickest.step_seconds
        return Limits(None, free, quickest)
    most = AT_MOST * step_seconds
    if memory.kind == "fraction":
        inputs = bytes_of_inputs(passes)
        return Limits(inputs + int(memory.amount * (keep_all_peak - inputs)), most)
    return Limits(int(memory.amount) if memory.kind == "bytes" else None, most)


def bytes_of_inputs(passes: Passes) -> int:
    graph = passes.graph
    storages = {
        s for i in graph.inputs if i not in passes.backward for s in graph.operations[i].holds
    }
    return sum(graph.storages[s] for s in storages)


def plans_for(
    memory: Memory,
    passes: Passes,
    prices: Prices,
    calls: int,
    keep_all_peak: int = 0,
    beside_s: float = 0.0,
    among_others: bool = False,
    limits: Limits | None = None,
    of_torch: OfTorch | None = None,
) -> tuple[list[Found], Limits]:
    """Plans that were estimated, and the limits that were meant. `keep_all_peak`: of torch's
    own way to keep all, if that was tried; ours keeps every result that is read, which is more.
    `beside_s`: seconds that a step takes elsewhere. `among_others`: as in `Estimate.weight`.
    `limits`: where they are known already, from another graph of the same computation. `of_torch`:
    torch's min-cut, if that was tried."""
    best = BEST_FOR_LEAST if memory.kind == "min" else BEST
    kept = None if of_torch is None else of_torch.kept
    search = Search(passes, prices, calls, best, among_others, kept)
    search.explore(products=memory.kind != "auto")
    keep_all = search.look_at("keep all", passes.needed)
    most = keep_all_peak or search.peak(keep_all)
    for one in search.far_from_torch:
        if memory.kind == "auto" and not search.exhausted:
            search.nearer(one, _free(search.groups_of_torch(one)))
    quickest = _quickest(search, beside_s, of_torch)
    limits = limits or limits_of(memory, passes, most, prices.step_seconds, quickest)
    in_vain: set[Key] = set()
    # the best few of the families, with as many of their groups as the limits call for
    for one in search.best():
        fits = limits.bytes
        if fits is not None:
            _boundary(search, one, partial(_fits, search, fits))
        else:
            beyond = partial(_takes_more, search, limits)
            if beyond(one):
                _boundary(search, one, beyond)
            elif memory.kind == "auto":
                without_the_least(search, one)
            else:
                in_vain |= _least(search, one, beyond)
    _between(search, limits)
    return [one for key, one in search.found.items() if key not in in_vain], limits


def _quickest(search: Search, beside_s: float, of_torch: OfTorch | None) -> Quickest:
    estimates = [one.estimate for one in search.found.values()]
    estimates += [] if of_torch is None else [of_torch.estimate]
    found = min(estimates, key=lambda estimate: estimate.seconds_added)
    step = search.prices.step_seconds + found.seconds_added + beside_s
    weight = found.weight(search.calls, among_others=search.among_others)
    return Quickest(found.seconds_added, step, weight)


def _takes_more(search: Search, limits: Limits, one: Found) -> bool:
    return not limits.allow(one.estimate.seconds_added, search.weight(one))


def _fits(search: Search, most: int, one: Found) -> bool:
    return search.peak(one) <= most


def _free(groups: Sequence[Group]) -> int:
    """They come first."""
    return sum(group.seconds == 0 for group in groups)


def _between(search: Search, limits: Limits) -> None:
    """Look at plans between torch's and ours, near the limits."""
    fits = limits.bytes
    beyond: Callable[[Found], bool] = partial(_takes_more, search, limits)
    if fits is not None:
        beyond = partial(_fits, search, fits)
    for one in search.far_from_torch:
        if beyond(one):
            groups = search.groups_of_torch(one)
            low = _free(groups) if fits is None else 0
            plan = partial(search.nearer, one)
            _halve(plan, low, len(groups), beyond, lambda: search.exhausted)


def _boundary(search: Search, one: Found, beyond: Callable[[Found], bool]) -> None:
    """Look at plans with some of the groups of one, on both sides of where `beyond` begins."""
    groups = search.groups(one)
    low, high = 0, len(groups)
    free = _free(groups)
    if 0 < free < high and not search.tired:
        low, high = (low, free) if beyond(search.fewer(one, free)) else (free, high)
    _halve(partial(search.fewer, one), low, high, beyond, lambda: search.tired)


def _halve(
    plan: Callable[[int], Found],
    low: int,
    high: int,
    beyond: Callable[[Found], bool],
    tired: Callable[[], bool],
) -> None:
    """Look at plans of so many groups, on both sides of where `beyond` begins."""
    while high - low > 1 and not tired():
        middle = (low + high) // 2
        if beyond(plan(middle)):
            high = middle
        else:
            low = middle


def _least(search: Search, one: Found, beyond: Callable[[Found], bool]) -> set[Key]:
    """Look at plans with some of the groups of one, nearer and nearer to whichever holds least: for
    a kernel that reads what is in memory, making it again takes memory as well as time. Told are
    those that hold no less: they keep more between the passes, which other graphs find there."""
    before, every = dict(search.found), len(search.groups(one))
    found, step = every, every // 2
    while step and not search.tired:
        near = [n for n in (found, found - step, found + step) if 0 < n <= every]
        found = min(near, key=lambda n: search.weight(search.fewer(one, n)))
        step //= 2
    lowest = min(search.weight(known) for known in before.values() if not beyond(known))
    new = search.found.keys() - before.keys()
    return {key for key in new if search.weight(search.found[key]) >= lowest}


def without_the_least(search: Search, one: Found) -> None:
    """Look at a plan that also keeps the results which are hardly anything, all of them together,
    and take kernels to make again: one for each small weight's cast, say."""
    passes, left = search.passes, LITTLE * search.peak(one) / search.calls
    in_memory, launch = read_by_heavy(passes), search.prices.launch
    # whatever else is made again may be part of the kernel that reads it
    seconds = {
        group: group.seconds + launch * len(group.needed & in_memory)
        for group in search.groups(one)
        if group.seconds > 0
    }
    bytes_of = {group: passes.bytes_of(group.needed) for group in seconds}
    kept = one.plan.kept
    for group in sorted(seconds, key=lambda g: (bytes_of[g] / seconds[g], min(g.operations))):
        left -= bytes_of[group]
        if left < 0:
            break
        kept |= group.needed
    if kept == one.plan.kept:
        return
    # with copies for as many operations as in each plan of a peak like its own
    most = search.weight(one) * (1 + ALIKE)
    twins = [f for (k, _), f in search.found.items() if k == one.plan.kept]
    for twin in twins:
        if search.weight(twin) <= most and not search.tired:
            label = f"{twin.plan.label}, what is hardly anything kept too"
            search.look_at(label, kept, twin.plan.window)


def rank(
    limits: Limits, estimate: Estimate, calls: int, *, among_others: bool = False
) -> tuple[float, ...] | None:
    """Less is better; None: does not serve."""
    peak, added = estimate.peak(calls), estimate.seconds_added
    weight = estimate.weight(calls, among_others=among_others)
    if not limits.allow(added, weight):
        return None
    if limits.bytes is not None:
        return (added, peak) if peak <= limits.bytes else None
    return (weight, added)


def refuse(memory: Memory, limits: Limits, smallest: int) -> InvalidInput:
    assert limits.bytes is not None  # of a budget
    of = "the forward and backward pass of this graph"
    return refusal(memory, limits.bytes, smallest, of)
