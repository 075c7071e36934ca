"""From a joint graph to its two passes: read, refuse or plan, rank, rewrite, verify.

torch's own ways to split a graph are always among the candidates, so that the outcome is never
worse than they are, and are what is left when a graph is not understood.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import fx
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

from ecornn.echo.analysis.cost import CostModel
from ecornn.echo.analysis.machine import machine_of
from ecornn.echo.graph import NotUnderstood, read_graph
from ecornn.echo.options import AUTO, Memory
from ecornn.echo.passes import Passes
from ecornn.echo.plan.budget import ALIKE, NO_LIMITS, Limits, plans_for, rank, refuse
from ecornn.echo.plan.estimate import Estimate, Plan, estimate_of
from ecornn.echo.plan.prices import Prices, fused, one_by_one, within_a_kernel
from ecornn.echo.rewrite import Modules, duplicate, program_of, split, without_unread_draws
from ecornn.echo.verify import differences, refusal, writes
from ecornn.garbage import no_garbage_collected

Partitioner = Callable[..., Modules]

#: torch's own, in the order in which a tie is decided: whoever recomputes less comes first.
STOCK: dict[str, Partitioner] = {
    "keep all": default_partition,
    "torch's min-cut": min_cut_rematerialization_partition,
}
#: Operations of a graph beyond which torch's own are not tried, unless all plans of ours are wrong:
#: its min-cut took 18 s for 13,686, and to keep all 1.8 of 9.6 s for 15,126, which one of our own
#: plans does as well.
MOST_FOR_STOCK = 6000
#: How many of our own plans are rewritten before torch's are taken.
TRIES = 3


@dataclass(frozen=True)
class Request:
    """What is asked for a graph. `calls`: how often its forward pass runs before its backward
    passes do. `settings` go to torch's partitioners as they come. `beside_s`: seconds that a step
    takes outside the graph, for each of these calls. `among_others`: other parts of a model run
    between its passes."""

    memory: Memory = AUTO
    calls: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    beside_s: float = 0.0
    among_others: bool = False

    def weight(self, estimate: Estimate) -> int:
        return estimate.weight(self.calls, among_others=self.among_others)


@dataclass(frozen=True)
class Candidate:
    """One way to split a graph, and what it would hold and take."""

    strategy: str
    estimate: Estimate
    modules: Modules | None = None  # of torch's own ways
    plan: Plan | None = None  # of ours


@dataclass(frozen=True)
class Decision:
    request: Request
    chosen: Candidate
    modules: Modules
    candidates: tuple[Candidate, ...]
    #: Strategies that could not serve, with the reason.
    refused: tuple[tuple[str, str], ...]
    #: None where the graph could not be read.
    passes: Passes | None = None
    prices: Prices | None = None
    limits: Limits = NO_LIMITS
    #: Why the graph was left to torch's own partitioner.
    fallback: str | None = None

    def candidate(self, strategy: str) -> Candidate:
        return next(c for c in self.candidates if c.strategy == strategy)


def decide(
    module: fx.GraphModule, inputs: Sequence[Any], forward_outputs: int, request: Request
) -> Decision:
    """The best split for a request. Raises where a budget in bytes cannot be met."""
    # 4.3 of 11.9 s went into it for an encoder-decoder transformer of 4,968 nodes
    with no_garbage_collected():
        return _decided(module, inputs, forward_outputs, request)


def _decided(
    module: fx.GraphModule, inputs: Sequence[Any], forward_outputs: int, request: Request
) -> Decision:
    try:
        passes = Passes(read_graph(module), forward_outputs)
        why = refusal(module, passes)
    except (NotUnderstood, RuntimeError, NotImplementedError, TypeError) as error:
        why = _first_line(error)
    if why is not None:
        return _left_to_torch(module, inputs, forward_outputs, request, why)
    prices = _prices(passes, fuses=request.settings.get("compiler") == "inductor")
    refused: list[tuple[str, str]] = []
    stock = partial(_stock, module, inputs, passes, prices, request, refused)
    count = len(passes.graph.operations)
    large = count > MOST_FOR_STOCK
    candidates = [] if large else stock(tuple(STOCK))
    if large:
        why = f"not tried: it would take long for {count:,} operations"
        refused.append(("torch's min-cut", why))
    there = {candidate.strategy: candidate.estimate for candidate in candidates}
    before = there["keep all"].peak(request.calls) if "keep all" in there else 0
    found, limits = plans_for(
        *(request.memory, passes, prices, request.calls, before),
        *(request.beside_s, request.among_others),
    )
    candidates += [
        Candidate(one.plan.label, one.estimate, plan=one.plan)
        for one in found
        if one.plan.label not in there
    ]
    right = partial(_first_that_is_right, module, passes, request, limits)
    try:
        chosen, modules = right(candidates, refused)
    except NotUnderstood:
        if not large:
            raise
        of_torch = stock(("keep all",))
        chosen, modules = right(of_torch, refused)
        candidates = [*of_torch, *candidates]
    return Decision(
        *(request, chosen, modules, tuple(candidates), tuple(refused), passes, prices, limits),
        fallback=None if chosen.plan else _failed(candidates, refused),
    )


def _first_that_is_right(
    module: fx.GraphModule,
    passes: Passes,
    request: Request,
    limits: Limits,
    candidates: list[Candidate],
    refused: list[tuple[str, str]],
) -> tuple[Candidate, Modules]:
    """In order of rank; what was rewritten wrongly is never used."""
    ranked = []
    most = _most_kept(request, candidates)
    for candidate in candidates:
        if candidate.estimate.kept_bytes > most:
            continue
        bounds = limits if candidate.plan else Limits(limits.bytes, float("inf"))
        others = request.among_others
        place = rank(bounds, candidate.estimate, request.calls, among_others=others)
        if place is not None:
            ranked.append((place, candidate))
    ranked.sort(key=lambda one: one[0])
    if request.memory.kind == "auto" and ranked:
        ranked = _quickest_first(ranked, request)
    tried = 0
    for _, candidate in ranked:
        if candidate.modules is not None:
            return candidate, candidate.modules
        if candidate.plan is None or tried == TRIES:
            continue
        tried += 1
        try:
            modules = split(duplicate(module), passes, candidate.plan.kept, candidate.plan.window)
            wrong = differences(module, passes, modules)
        except (NotUnderstood, AssertionError, RuntimeError) as error:
            wrong = [_first_line(error)]
        if not wrong:
            return candidate, modules
        refused.append((candidate.strategy, f"not the same computation: {wrong[0]}"))
    if not candidates or limits.bytes is None:
        raise NotUnderstood("; ".join(f"{name}: {why}" for name, why in refused))
    affordable = [c for c in candidates if not c.plan or c.estimate.seconds_added <= limits.seconds]
    smallest = min(candidate.estimate.peak(request.calls) for candidate in affordable)
    raise refuse(request.memory, limits, smallest)


def _quickest_first(
    ranked: list[tuple[tuple[float, ...], Candidate]], request: Request
) -> list[tuple[tuple[float, ...], Candidate]]:
    """Of those whose peaks are alike, whoever takes least time; then the others."""
    most = request.weight(ranked[0][1].estimate) * (1 + ALIKE)
    alike = [one for one in ranked if request.weight(one[1].estimate) <= most]
    alike.sort(key=lambda one: one[1].estimate.seconds_added)
    return [*alike, *(one for one in ranked if request.weight(one[1].estimate) > most)]


def _most_kept(request: Request, candidates: list[Candidate]) -> float:
    """Inductor reorders, so that its true peak is not quite the estimated one. What lies between
    the passes is the same whoever runs them: nobody keeps more than torch would."""
    if request.settings.get("compiler") != "inductor" or request.memory.kind not in ("auto", "min"):
        return float("inf")
    stock = (c.estimate.kept_bytes for c in candidates if c.strategy in STOCK)
    return min(stock, default=float("inf"))


def _failed(candidates: list[Candidate], refused: list[tuple[str, str]]) -> str | None:
    """Of our plans, the first that was wrong."""
    ours = {candidate.strategy for candidate in candidates if candidate.plan is not None}
    return next((f"{name}: {why}" for name, why in refused if name in ours), None)


def _stock(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    passes: Passes,
    prices: Prices,
    request: Request,
    refused: list[tuple[str, str]],
    names: Sequence[str],
) -> list[Candidate]:
    found = []
    for name in names:
        try:
            modules = _partitioned(STOCK[name], module, inputs, passes.forward_outputs, request)
            # torch's min-cut reads a buffer again after the forward pass has written to it (2.13)
            if wrong := differences(module, passes, modules):
                refused.append((name, f"not the same computation: {wrong[0]}"))
                continue
            found.append(Candidate(name, _simulated(modules, passes, prices), modules))
        except (NotUnderstood, AssertionError, RuntimeError) as error:
            refused.append((name, _first_line(error)))
    return found


def _partitioned(
    partitioner: Partitioner,
    module: fx.GraphModule,
    inputs: Sequence[Any],
    forward_outputs: int,
    request: Request,
) -> Modules:
    settings = dict(request.settings)
    if partitioner is default_partition:
        settings.pop("compiler", None)
    found: Modules = partitioner(
        duplicate(module), inputs, num_fwd_outputs=forward_outputs, **settings
    )
    return without_unread_draws(found)


def _left_to_torch(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    forward_outputs: int,
    request: Request,
    why: str,
) -> Decision:
    """torch's own partition, whatever it holds; a budget cannot be promised then."""
    if request.memory.kind in ("bytes", "fraction"):
        raise NotUnderstood(
            f'memory: {request.memory} cannot be promised, since {why}; ask for "auto", which'
            " leaves such a graph to torch's own partitioner"
        )
    # torch's min-cut (2.13) reads again in the backward pass what the forward pass has written to
    # since; whoever keeps all reads nothing again
    name = "keep all" if any(map(writes, module.graph.nodes)) else "torch's min-cut"
    modules = _partitioned(STOCK[name], module, inputs, forward_outputs, request)
    unknown = Candidate(name, Estimate(0, 0, 0, 0.0), modules)
    return Decision(request, unknown, modules, (unknown,), (), fallback=why)


def _simulated(modules: Modules, passes: Passes, prices: Prices) -> Estimate:
    forward, backward = (program_of(module, passes) for module in modules)
    return estimate_of(passes, forward, backward, prices)


def _prices(passes: Passes, *, fuses: bool) -> Prices:
    costs, operations = CostModel.of(passes.graph), passes.graph.operations
    seconds = tuple(costs.seconds(operation) for operation in operations)
    if not fuses:
        return one_by_one(seconds)
    devices = [operation.work.device for operation in operations if operation.work.device]
    machine = machine_of(devices[0] if devices else None)
    within = [machine.launch_s * within_a_kernel(operation) for operation in operations]
    seconds = tuple(one - launch for one, launch in zip(seconds, within, strict=True))
    return fused(passes, seconds, machine.bandwidth, machine.compiled_launch_s)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else repr(error)
