"""The plan that serves a budget: the cheapest that fits, the smallest that is nearly free, or the
smallest there is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ecornn.echo.options import Memory
from ecornn.echo.passes import Passes
from ecornn.echo.plan.estimate import Estimate
from ecornn.echo.plan.prices import Prices, read_by_heavy
from ecornn.echo.plan.search import BEST, BEST_FOR_LEAST, Found, Key, Search
from ecornn.errors import InvalidInput
from ecornn.sizes import size_text

#: Of the estimated time of a step: what "auto" spends on recomputation at most.
NEARLY_FREE = 0.02
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
class Limits:
    """A budget as numbers: what fits, and what may be spent."""

    bytes: int | None
    seconds: float


NO_LIMITS = Limits(None, float("inf"))


def limits_of(
    memory: Memory,
    passes: Passes,
    keep_all_peak: int,
    step_seconds: float,
    beside_s: float = 0.0,
) -> Limits:
    if memory.kind == "auto":
        return Limits(None, NEARLY_FREE * (step_seconds + beside_s))
    most = AT_MOST * step_seconds
    if memory.kind == "fraction":
        inputs = _bytes_of_inputs(passes)
        return Limits(inputs + int(memory.amount * (keep_all_peak - inputs)), most)
    return Limits(int(memory.amount) if memory.kind == "bytes" else None, most)


def _bytes_of_inputs(passes: Passes) -> int:
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
) -> tuple[list[Found], Limits]:
    """Plans that were estimated, and the limits that were meant. `keep_all_peak`: of torch's
    own way to keep all, if that was tried; ours keeps every result that is read, which is more.
    `beside_s`: seconds that a step takes elsewhere. `among_others`: as in `Estimate.weight`.
    `limits`: where they are known already, from another graph of the same computation."""
    best = BEST_FOR_LEAST if memory.kind == "min" else BEST
    search = Search(passes, prices, calls, best, among_others)
    search.explore(products=memory.kind != "auto")
    keep_all = search.look_at("keep all", passes.needed)
    most = keep_all_peak or search.peak(keep_all)
    limits = limits or limits_of(memory, passes, most, prices.step_seconds, beside_s)
    in_vain: set[Key] = set()
    # the best few of the families, with as many of their groups as the limits call for
    for one in search.best():
        fits = limits.bytes
        if fits is not None:
            _boundary(search, one, lambda f: search.peak(f) <= fits)  # noqa: B023
        else:
            beyond = partial(_takes_more, limits.seconds)
            if beyond(one):
                _boundary(search, one, beyond)
            elif memory.kind == "auto":
                without_the_least(search, one)
            else:
                in_vain |= _least(search, one, beyond)
    return [one for key, one in search.found.items() if key not in in_vain], limits


def _takes_more(seconds: float, one: Found) -> bool:
    return one.estimate.seconds_added > seconds


def _boundary(search: Search, one: Found, beyond: Callable[[Found], bool]) -> None:
    """Look at plans with some of the groups of one, on both sides of where `beyond` begins."""
    groups = search.groups(one)
    low, high = 0, len(groups)
    free = sum(group.seconds == 0 for group in groups)  # they come first
    if 0 < free < high and not search.tired:
        low, high = (low, free) if beyond(search.fewer(one, free)) else (free, high)
    while high - low > 1 and not search.tired:
        middle = (low + high) // 2
        if beyond(search.fewer(one, middle)):
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
    if added > limits.seconds:
        return None
    if limits.bytes is not None:
        return (added, peak) if peak <= limits.bytes else None
    return (estimate.weight(calls, among_others=among_others), added)


def refuse(memory: Memory, limits: Limits, smallest: int) -> InvalidInput:
    return InvalidInput(
        "memory",
        f"{memory}, which is {limits.bytes:,} bytes here",
        f"at least {smallest:,} bytes ({size_text(smallest)}), the smallest peak that was found for"
        " the forward and backward pass of this graph, its inputs and weights included",
        'ask for that much, ask for "min", or make the batch smaller',
    )
