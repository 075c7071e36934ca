"""A joint graph as plans are made for it: read, its double calls merged, and priced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from ecornn.echo.analysis.cost import CostModel
from ecornn.echo.analysis.machine import machine_of
from ecornn.echo.graph import RERUN, read_graph
from ecornn.echo.keep_modes import RecurrentCall, with_modes
from ecornn.echo.mask_bits import with_masks_as_bits
from ecornn.echo.merged import with_single_calls
from ecornn.echo.passes import Passes
from ecornn.echo.plan.prices import Prices, draws_of, fused, one_by_one, within_a_kernel

#: Operations of a graph beyond which it is not merged, and torch's own splits are not tried unless
#: all plans of ours are wrong: its min-cut took 18 s for 13,686, and to keep all 1.8 of 9.6 s for
#: 15,126, which one of our own plans does as well.
MOST_OPERATIONS = 6000
OF_NOTHING_BYTES = 64


@dataclass(frozen=True)
class Pricing:
    """How times are estimated: of code that fuses, and measured where they can be."""

    fuses: bool
    measure: bool = False


@dataclass(frozen=True)
class Joint:
    """A joint graph. `gates`: of its recurrent calls of free choice, the names of those that keep
    their gates. Beside the first graph: how many do not that do there, or the other way round, and
    the seconds that this adds. `merged_from`: the same where operators are called twice on the same
    values, if they were; then `apart` is said of it."""

    module: fx.GraphModule
    passes: Passes
    prices: Prices
    gates: frozenset[str] = frozenset()
    again: int = 0
    kept: int = 0
    added_s: float = 0.0
    merged_from: Joint | None = None
    apart: bool = False
    #: Bits that a plan can keep in the place of masks, by name.
    bits: tuple[str, ...] = ()

    @property
    def large(self) -> bool:
        return len(self.passes.graph.operations) > MOST_OPERATIONS

    @property
    def as_written(self) -> Joint:
        return self if self.merged_from is None else self.merged_from

    def strategy(self, label: str) -> str:
        count = self.again or self.kept
        layers = f"{count} recurrent layer{'s' if count > 1 else ''}"
        what = "made again" if self.again else "kept"
        label = f"{label}, equal calls apart" if self.apart else label
        label = f"{label}, masks as bits" if self.bits else label
        return f"{label}, gates of {layers} {what}" if count else label


def make_joint(
    module: fx.GraphModule,
    forward_outputs: int,
    calls: Sequence[RecurrentCall],
    gates: frozenset[str],
    again: Sequence[RecurrentCall] = (),
    kept: Sequence[RecurrentCall] = (),
    *,
    pricing: Pricing,
    anywhere: frozenset[str] = frozenset(),
) -> Joint:
    """A graph without recurrent calls of free choice has the modes that it has."""
    if any(call.free for call in calls):
        module = with_modes(module, calls, gates)
    seconds = sum(call.seconds for call in again) - sum(call.seconds for call in kept)

    def joint(module: fx.GraphModule) -> Joint:
        passes = Passes(read_graph(module), forward_outputs)
        if anywhere:
            passes = replace(passes, anywhere=_anywhere(passes, anywhere))
        prices = prices_of(passes, fuses=pricing.fuses, measure=pricing.measure)
        return Joint(module, passes, prices, gates, len(again), len(kept), seconds)

    written = joint(module)
    # one by one, operators take as long whichever pass runs them
    if not pricing.fuses or written.large:
        return written
    if (merged := with_single_calls(module, written.passes)) is module:
        return written
    found = joint(merged)
    # times are told beside those of the merged graph
    more = written.prices.step_seconds - found.prices.step_seconds
    return replace(found, merged_from=replace(written, added_s=seconds + more, apart=True))


def in_bits(first: Joint, pricing: Pricing) -> Joint | None:
    """The same where a plan can keep masks as bits; times are told beside those of the first."""
    written = first.as_written
    module, bits, again = with_masks_as_bits(written.module, written.passes)
    if not bits:
        return None
    outputs = written.passes.forward_outputs
    found = make_joint(module, outputs, (), first.gates, pricing=pricing, anywhere=again)
    more = found.prices.step_seconds - first.prices.step_seconds
    apart = found.merged_from
    if apart is not None:
        apart = replace(apart, added_s=apart.added_s + more, bits=bits)
    return replace(found, added_s=found.added_s + more, merged_from=apart, bits=bits)


def _anywhere(passes: Passes, names: frozenset[str]) -> frozenset[int]:
    """Operations of these names, and small results that follow from nothing, as the places do by
    which bits are told apart."""
    found: set[int] = set()
    for i, operation in enumerate(passes.graph.operations):
        small = passes.graph.shown_bytes(i) <= OF_NOTHING_BYTES
        of_nothing = small and operation.kind in RERUN and found.issuperset(operation.uses)
        if operation.name in names or of_nothing:
            found.add(i)
    return frozenset(found)


def prices_of(passes: Passes, *, fuses: bool, measure: bool = False) -> Prices:
    """`measure`: times of operators that may be run again are measured, or were before."""
    costs, operations = CostModel.of(passes.graph, measure=measure), passes.graph.operations
    seconds = tuple(costs.seconds(operation) for operation in operations)
    told = costs.told() if measure else ""
    if not fuses:
        return replace(one_by_one(seconds), told=told)
    devices = [operation.work.device for operation in operations if operation.work.device]
    machine = machine_of(devices[0] if devices else None)
    within = [machine.launch_s * within_a_kernel(operation) for operation in operations]
    seconds = tuple(one - launch for one, launch in zip(seconds, within, strict=True))
    draws = draws_of(passes, machine.vector_rate)
    prices = fused(passes, seconds, machine.bandwidth, machine.compiled_launch_s, draws)
    fusing = f"{told}; what is fused counts by what it reads and writes" if told else ""
    return replace(prices, told=fusing)
