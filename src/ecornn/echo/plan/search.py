"""Plans between keeping all and holding as little as can be, each with its estimate.

Where they come from: Echo's bidirectional analysis; the same with its small results kept, so that
no chain of cheap operators runs back through a recurrent state; the same changed a little where
its peak is; the same with products run again up to some depth, where that is allowed. Each with
one copy of what is run again, and with copies for readers that are far apart. Where it is known
what torch's min-cut keeps, which is made to take little time, also those between it and these.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from ecornn.echo.analysis.repetition import repetition
from ecornn.echo.passes import Passes
from ecornn.echo.plan.bidirectional import bidirectional
from ecornn.echo.plan.estimate import Estimate, Estimates, Plan
from ecornn.echo.plan.groups import Group, groups_of, kept_with, run_again
from ecornn.echo.plan.prices import Prices
from ecornn.echo.plan.refine import refined
from ecornn.echo.plan.seeds import with_whole_seeds
from ecornn.echo.plan.sums import with_sums
from ecornn.echo.plan.units import units_of
from ecornn.echo.schedule import FOR_ALL

#: Operations gone through for estimates, at most; each takes about 10 µs on one core.
MOST_WORK = 150_000
#: Beside that, for plans between torch's and ours.
WORK_BETWEEN = 150_000
#: The same for refining one plan; each takes about 50 µs there.
REFINING = 10_000
#: How many plans, of those with the lowest peaks, are looked at more closely; and how many where
#: the lowest peak is all that is asked for.
BEST = 4
BEST_FOR_LEAST = 12
#: How many products in a row may be run again.
DEPTHS = (1, 2, 4, 8, 16)
#: Of how many recurrent states in a row one is kept, where not all are.
FEWER_STATES = (2, 4, 8, 32)
#: How many sizes below which results are kept are tried.
SIZES = 3
#: A copy serves this part of the operations on the gradient.
PARTS = (4, 16, 64)


#: Of a plan: what is kept, and its window.
Key = tuple[frozenset[int], int]


@dataclass(frozen=True)
class Found:
    plan: Plan
    estimate: Estimate
    runs_products: bool


@dataclass
class Search:
    """Estimates are made once for each plan."""

    passes: Passes
    prices: Prices
    calls: int = 1
    most: int = BEST
    among_others: bool = False  # as in `Estimate.weight`
    of_torch: frozenset[int] | None = None  # what its min-cut keeps
    found: dict[Key, Found] = field(default_factory=dict)
    _groups: dict[frozenset[int], list[Group]] = field(default_factory=dict)
    _groups_of_torch: dict[frozenset[int], list[Group]] = field(default_factory=dict)
    _families_found: list[Found] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._estimates = Estimates(self.passes, self.prices)
        self._states = repetition(self.passes).states

    def look_at(self, label: str, kept: frozenset[int], window: int = FOR_ALL) -> Found:
        kept = with_whole_seeds(self.passes, kept)
        if (kept, window) not in self.found:
            plan, operations = Plan(label, kept, window), self.passes.graph.operations
            again = run_again(self.passes, kept)
            products = any(operations[i].kind == "product" for i in again)
            one = Found(plan, self._estimates.of(plan), products)
            self.found[kept, window] = one
        return self.found[kept, window]

    def peak(self, one: Found) -> int:
        return one.estimate.peak(self.calls)

    def weight(self, one: Found) -> int:
        return one.estimate.weight(self.calls, among_others=self.among_others)

    @property
    def tired(self) -> bool:
        return self._work > MOST_WORK

    @property
    def exhausted(self) -> bool:
        """Also for plans between torch's and ours."""
        return self._work > MOST_WORK + WORK_BETWEEN

    @property
    def half_tired(self) -> bool:
        """The rest is for the best of the families."""
        return self._work > MOST_WORK / 2

    @property
    def _work(self) -> int:
        return len(self.found) * len(self.passes.graph.operations)

    def best(self) -> list[Found]:
        """Plans of the least weight, each set of kept results once."""
        found: dict[frozenset[int], Found] = {}
        for one in sorted(
            self.found.values(), key=lambda f: (self.weight(f), f.estimate.seconds_added)
        ):
            found.setdefault(one.plan.kept, one)
        return list(found.values())[: self.most]

    def explore(self, *, products: bool) -> list[Found]:
        """All plans of the families above, the more distant ones only while not tired."""
        self.look_at("keep all", self.passes.needed)
        for label, kept in self._families(products):
            if self.half_tired:
                break
            self._families_found.append(self.look_at(label, kept))
        for one in self.best():
            windows = [len(self.passes.backward) // part for part in PARTS]
            windows = [window for window in windows if window > 2]
            # inductor moves products that stand apart: estimates of those are the least certain
            if not (self.prices.fuses and one.runs_products):
                windows.append(0)
            for window in windows:
                if not self.half_tired:
                    whom = f"{window} operations" if window else "each reader"
                    self.look_at(f"{one.plan.label}, a copy for {whom}", one.plan.kept, window)
        return list(self.found.values())

    def _families(self, products: bool) -> Iterator[tuple[str, frozenset[int]]]:
        base = self._bidirectional()
        yield "bidirectional", base
        yield from self._small_kept("bidirectional", base)
        for many in FEWER_STATES:
            kept = self._bidirectional(one_state_in=many)
            if kept == base:
                break
            yield f"bidirectional, one state in {many} kept", kept
        if products and self.calls == 1:
            kept = refined(self.passes, base, most_work=REFINING).kept
            yield "bidirectional, refined where its peak is", kept
        if products:
            before = base
            for depth in DEPTHS:
                also = shallow_products(self.passes, depth)
                kept = self._bidirectional(also)
                if kept == before:
                    break
                before = kept
                name = f"products run again, {depth} in a row at most"
                yield name, kept
                yield from self._small_kept(name, kept)

    def _bidirectional(self, also: Collection[int] = (), one_state_in: int = 1) -> frozenset[int]:
        kept = bidirectional(self.passes, also, one_state_in, self._states)
        return with_sums(self.passes, kept) if self.prices.fuses else kept

    def _small_kept(self, label: str, kept: frozenset[int]) -> Iterator[tuple[str, frozenset[int]]]:
        again = run_again(self.passes, kept) & self.passes.needed
        size = {i: self.passes.bytes_of(frozenset({i})) for i in again}
        sizes = sorted(set(size.values()) - {0})
        for most in sizes[:-1][-SIZES:]:
            small = frozenset(i for i in again if size[i] <= most)
            yield f"{label}, what is no larger than {most:,} bytes kept", kept | small

    def fewer(self, one: Found, taken: int) -> Found:
        """A plan with only the most worthwhile of its groups."""
        groups = self.groups(one)
        kept = kept_with(self.passes, one.plan.kept, groups, taken)
        label = f"{one.plan.label}, {taken} of {len(groups)} groups"
        return self.look_at(label, kept, one.plan.window)

    @property
    def far_from_torch(self) -> list[Found]:
        """Plans that run no product again, each with groups of which torch keeps something."""
        if self.of_torch is None:
            return []
        found = [one for one in self._families_found if not one.runs_products]
        return [one for one in found if self.groups_of_torch(one)]

    def nearer(self, one: Found, taken: int) -> Found:
        """A plan with only the most worthwhile of its groups, in place of which torch keeps
        something: of the others that is kept."""
        assert self.of_torch is not None
        groups, of_torch = self.groups_of_torch(one), self.of_torch
        kept = one.plan.kept | {i for group in groups[taken:] for i in group.operations & of_torch}
        label = f"{one.plan.label}, {taken} of {len(groups)} groups, else as torch's min-cut"
        return self.look_at(label, kept, one.plan.window)

    def groups_of_torch(self, one: Found) -> list[Group]:
        """Of a plan's groups, those in place of which torch keeps something: which free most of it
        a second first."""
        assert self.of_torch is not None
        of_torch = self.of_torch
        key = one.plan.kept
        if key not in self._groups_of_torch:
            freed = {
                group: self.passes.bytes_of(group.operations & of_torch)
                for group in self.groups(one)
            }
            found = [group for group, count in freed.items() if count]
            found.sort(key=lambda g: (_seconds_each(g, freed[g]), min(g.operations)))
            self._groups_of_torch[key] = found
        return self._groups_of_torch[key]

    def groups(self, one: Found) -> list[Group]:
        if one.plan.kept not in self._groups:
            kept = one.plan.kept
            self._groups[kept] = (
                units_of(self.passes, kept, self.prices)
                if self.prices.fuses
                else groups_of(self.passes, kept, self.prices.seconds)
            )
        return self._groups[one.plan.kept]


def _seconds_each(group: Group, freed: int) -> float:
    return group.seconds / freed


def shallow_products(passes: Passes, depth: int) -> frozenset[int]:
    """Products of the forward pass, so many in a row and then one that is not among them."""
    operations = passes.graph.operations
    row = [0] * len(operations)  # products to run again to have this result
    found: set[int] = set()
    for i, operation in enumerate(operations):
        if i in passes.backward or operation.kind in ("input", "constant", "number"):
            continue
        row[i] = max((row[used] for used in operation.uses), default=0)
        if operation.kind in ("random", "opaque"):
            row[i] = 0
        elif operation.kind == "product":
            row[i] = row[i] + 1 if row[i] < depth else 0
            if row[i]:
                found.add(i)
    return frozenset(found)
