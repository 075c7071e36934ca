"""From a joint graph to its two passes: read, refuse or plan, rank, rewrite, verify.

torch's own ways to split a graph are always among the candidates, so that the outcome is never
worse than they are, and are what is left when a graph is not understood.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import fx

from ecornn.echo.bits_choice import plans_in_bits
from ecornn.echo.graph import FAILURES, NotUnderstood
from ecornn.echo.joint import Joint, make_joint
from ecornn.echo.keep_choice import consider_others, kept_first
from ecornn.echo.keep_modes import RecurrentCall, recurrent_calls
from ecornn.echo.options import BUDGETS, MIN
from ecornn.echo.passes import Passes
from ecornn.echo.plan.budget import NO_LIMITS, DoesNotFit, Limits, OfTorch, plans_for, refuse
from ecornn.echo.plan.estimate import Estimate, Plan, estimate_of
from ecornn.echo.plan.prices import Prices
from ecornn.echo.ranking import most_kept, place, quickest_first
from ecornn.echo.request import Request
from ecornn.echo.rewrite import Modules, duplicate, program_of, split
from ecornn.echo.stock import STOCK, partitioned
from ecornn.echo.verify import differences, refusal, writes
from ecornn.errors import EcornnError
from ecornn.garbage import no_garbage_collected

#: How many of our own plans are rewritten before torch's are taken.
TRIES = 3


@dataclass(frozen=True)
class Candidate:
    """One way to split a graph, and what it would hold and take."""

    strategy: str
    estimate: Estimate
    modules: Modules | None = None  # of torch's own ways
    plan: Plan | None = None  # of ours
    joint: Joint | None = None  # None where the graph could not be read


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
    #: Its recurrent layers.
    recurrent: tuple[RecurrentCall, ...] = ()
    #: Of both passes, when all is kept.
    step_seconds: float = 0.0

    def candidate(self, strategy: str) -> Candidate:
        return next(c for c in self.candidates if c.strategy == strategy)


def decide(
    module: fx.GraphModule, inputs: Sequence[Any], forward_outputs: int, request: Request
) -> Decision:
    """The best split for a request. Raises where a budget in bytes cannot be met."""
    # 4.3 of 11.9 s went into it for an encoder-decoder transformer of 4,968 nodes
    with no_garbage_collected():
        try:
            return _fitting(module, inputs, forward_outputs, request)
        except EcornnError:  # what was asked for cannot be had, or no way to split is right
            raise
        except FAILURES as error:
            why = f"the analysis failed with {type(error).__name__}: {_first_line(error)}"
            return _left_to_torch(module, inputs, forward_outputs, request, why)


def _fitting(
    module: fx.GraphModule, inputs: Sequence[Any], forward_outputs: int, request: Request
) -> Decision:
    """Raises where nothing that was found fits a budget."""
    try:
        return _decided(module, inputs, forward_outputs, request)
    except DoesNotFit as tight:
        # whoever asks for the least is served by a wider search than whoever asks for some
        least = _decided(module, inputs, forward_outputs, replace(request, memory=MIN))
        smallest = least.chosen.estimate.peak(request.calls)
        if smallest > tight.most and not request.or_least:
            raise refuse(request.memory, tight.limits, smallest) from None
        return replace(least, request=request, limits=tight.limits)


def _decided(
    module: fx.GraphModule, inputs: Sequence[Any], forward_outputs: int, request: Request
) -> Decision:
    try:
        calls = recurrent_calls(module)
        gates = kept_first(request.memory, calls)
        first = make_joint(module, forward_outputs, calls, gates, pricing=request.pricing)
        why = refusal(first.as_written.module, first.as_written.passes)
    except NotUnderstood as error:
        why = _first_line(error)
    if request.written_later:
        why = "the model writes to what it was given, which the backward pass must not read again"
    if why is not None:
        return _left_to_torch(module, inputs, forward_outputs, request, why)
    refused: list[tuple[str, str]] = []
    considered = partial(_considered, inputs, request, refused)
    candidates, limits = considered(first)

    def consider(again: Sequence[RecurrentCall], kept: Sequence[RecurrentCall]) -> bool:
        left = (gates - {call.name for call in again}) | {call.name for call in kept}
        try:
            joint = make_joint(
                module, forward_outputs, calls, left, again, kept, pricing=request.pricing
            )
        except FAILURES as error:
            refused.append((f"{len(again or kept)} recurrent layers", _first_line(error)))
            return False
        found, _ = considered(joint, limits)
        if kept:  # torch's own compilers would not: only where no more is held than by them
            of_torch = {c.strategy: c.estimate.peak(request.calls) for c in candidates if c.modules}
            most = of_torch.get("torch's min-cut", of_torch.get("keep all", 0))
            found = [one for one in found if one.estimate.peak(request.calls) <= most]
        candidates.extend(found)
        return any(place(one, limits, request) is not None for one in found)

    fits = [c.estimate.seconds_added for c in candidates if place(c, limits, request)]
    free = [call for call in calls if call.free]
    consider_others(request.memory, free, min(fits, default=None), consider)
    asked = [c for c in candidates if request.of_torch in (None, c.strategy)]
    plans = partial(_timed_plans, request, candidates)
    bits, limits = plans_in_bits(request, limits, first, refused, plans)
    try:
        chosen, modules = _of_pools(request, limits, asked, bits, refused)
    except NotUnderstood:
        if not first.large or request.of_torch is not None:
            raise
        of_torch = _stock(inputs, request, refused, first, ("keep all",))
        chosen, modules = _first_that_is_right(request, limits, of_torch, refused)
        candidates = [*of_torch, *candidates]
    assert chosen.joint is not None
    candidates += bits
    return Decision(
        *(request, chosen, modules, tuple(candidates), tuple(refused)),
        *(chosen.joint.passes, chosen.joint.prices, limits),
        fallback=None if chosen.plan else _failed(candidates, refused),
        recurrent=tuple(calls),
        step_seconds=first.prices.step_seconds,
    )


def _considered(
    inputs: Sequence[Any],
    request: Request,
    refused: list[tuple[str, str]],
    joint: Joint,
    limits: Limits | None = None,
) -> tuple[list[Candidate], Limits]:
    """Ways to split one joint graph, the time of gates that are made again included; and the
    limits: those given, which are of another one, or its own."""
    candidates = [] if joint.large else _stock(inputs, request, refused, joint, tuple(STOCK))
    if request.of_torch is not None:
        return candidates, NO_LIMITS
    if joint.large:
        count = len(joint.passes.graph.operations)
        why = f"not tried: it would take long for {count:,} operations"
        refused.append((joint.strategy("torch's min-cut"), why))
    there = {candidate.strategy: candidate for candidate in candidates}
    of_torch, keep_all = (
        there.get(joint.strategy(name)) for name in ("torch's min-cut", "keep all")
    )
    plans = partial(
        _plans,
        request,
        before=0 if keep_all is None else keep_all.estimate.peak(request.calls),
    )
    found, own = plans(joint, limits, of_torch=of_torch)
    if joint.merged_from is not None and request.memory.kind != "auto":
        # where memory is what is asked for, some graphs have smaller plans as they were written
        more, _ = plans(joint.merged_from, limits or own)
        found += more
    candidates += [one for one in found if one.strategy not in there]
    return candidates, limits or own


def _plans(
    request: Request,
    joint: Joint,
    limits: Limits | None,
    *,
    before: int,
    of_torch: Candidate | None = None,
) -> tuple[list[Candidate], Limits]:
    """Our own, and the limits: those given, or the graph's own. `before`: the peak of torch's way
    to keep all, `of_torch`: its min-cut, if they are there."""
    found, own = plans_for(
        *(request.memory, joint.passes, joint.prices, request.calls, before),
        *(request.beside_s, request.among_others),
        limits=limits and limits.moved(-joint.added_s),
        of_torch=None
        if of_torch is None
        else OfTorch(kept_by(of_torch), _without_gates(of_torch.estimate, joint)),
    )
    plans = [
        Candidate(
            joint.strategy(one.plan.label),
            _with_gates(one.estimate, joint),
            plan=one.plan,
            joint=joint,
        )
        for one in found
    ]
    return plans, own


def _timed_plans(
    request: Request, candidates: list[Candidate], joint: Joint, limits: Limits | None
) -> tuple[list[tuple[float, Candidate]], Limits]:
    """As `_plans`, each with the seconds that it adds; torch's first candidate keeps all."""
    before = next((c.estimate.peak(request.calls) for c in candidates if c.modules), 0)
    found, own = _plans(request, joint, limits, before=before)
    return [(one.estimate.seconds_added, one) for one in found], own


def kept_by(candidate: Candidate) -> frozenset[int]:
    """What a split of torch's hands from one pass to the other."""
    assert candidate.modules is not None
    assert candidate.joint is not None
    passes = candidate.joint.passes
    backward = program_of(candidate.modules[1], passes)
    arriving = (step.operation for step in backward.steps[: backward.given])
    return frozenset(i for i in arriving if i not in passes.backward)


def _without_gates(estimate: Estimate, joint: Joint) -> Estimate:
    return replace(estimate, seconds_added=estimate.seconds_added - joint.added_s)


def _with_gates(estimate: Estimate, joint: Joint) -> Estimate:
    return replace(estimate, seconds_added=estimate.seconds_added + joint.added_s)


def _of_pools(
    request: Request,
    limits: Limits,
    candidates: list[Candidate],
    bits: list[Candidate],
    refused: list[tuple[str, str]],
) -> tuple[Candidate, Modules]:
    """Where bits are asked for, other plans serve if none that can keep them does."""
    if request.masks == "bits" and bits:
        try:
            return _first_that_is_right(request, limits, bits, refused)
        except (EcornnError, DoesNotFit):
            pass
    return _first_that_is_right(request, limits, [*candidates, *bits], refused)


def _first_that_is_right(
    request: Request,
    limits: Limits,
    candidates: list[Candidate],
    refused: list[tuple[str, str]],
) -> tuple[Candidate, Modules]:
    """In order of rank; what was rewritten wrongly is never used."""
    ranked = []
    for candidate in candidates:
        if candidate.estimate.kept_bytes > most_kept(request, candidates, candidate.joint):
            continue
        its_place = place(candidate, limits, request)
        if its_place is not None:
            ranked.append((its_place, candidate))
    ranked.sort(key=lambda one: one[0])
    if request.memory.kind == "auto" and ranked:
        ranked = quickest_first(ranked, request)
    tried = 0
    for _, candidate in ranked:
        if candidate.modules is not None:
            return candidate, candidate.modules
        if candidate.plan is None or candidate.joint is None or tried == TRIES:
            continue
        tried += 1
        plan, joint, passes = candidate.plan, candidate.joint, candidate.joint.passes
        try:
            modules = split(duplicate(joint.module), passes, plan.kept, plan.window)
            wrong = differences(joint.as_written.module, passes, modules)
        except FAILURES as error:
            wrong = [_first_line(error)]
        if not wrong:
            return candidate, modules
        refused.append((candidate.strategy, f"not the same computation: {wrong[0]}"))
    if not candidates or limits.bytes is None:
        raise NotUnderstood("; ".join(f"{name}: {why}" for name, why in refused))
    raise DoesNotFit(limits, limits.bytes)


def _failed(candidates: list[Candidate], refused: list[tuple[str, str]]) -> str | None:
    """Of our plans, the first that was wrong."""
    ours = {candidate.strategy for candidate in candidates if candidate.plan is not None}
    return next((f"{name}: {why}" for name, why in refused if name in ours), None)


def _stock(
    inputs: Sequence[Any],
    request: Request,
    refused: list[tuple[str, str]],
    joint: Joint,
    names: Sequence[str],
) -> list[Candidate]:
    found = []
    written = joint.as_written
    for name in names:
        strategy = joint.strategy(name)
        # what is called twice is made again by whoever keeps all, not kept
        whose = written if name == "keep all" else joint
        try:
            outputs = whose.passes.forward_outputs
            modules = partitioned(name, whose.module, inputs, outputs, request.settings)
            # torch's min-cut reads a buffer again after the forward pass has written to it (2.13)
            if wrong := differences(written.module, whose.passes, modules):
                refused.append((strategy, f"not the same computation: {wrong[0]}"))
                continue
            forward, backward = (program_of(module, whose.passes) for module in modules)
            estimate = estimate_of(whose.passes, forward, backward, whose.prices)
            estimate = _with_gates(estimate, whose)
            found.append(Candidate(strategy, estimate, modules, joint=whose))
        except FAILURES as error:
            refused.append((strategy, _first_line(error)))
    return found


def _left_to_torch(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    forward_outputs: int,
    request: Request,
    why: str,
) -> Decision:
    """torch's own partition, whatever it holds; a budget cannot be promised then."""
    if request.memory.kind in BUDGETS:
        raise NotUnderstood(
            f'memory: {request.memory} cannot be promised, since {why}; ask for "auto", which'
            " leaves such a graph to torch's own partitioner"
        )
    # torch's min-cut (2.13) reads again in the backward pass what the forward pass has written to
    # since; whoever keeps all reads nothing again
    written = request.written_later or any(map(writes, module.graph.nodes))
    name = "keep all" if written else "torch's min-cut"
    modules = partitioned(name, module, inputs, forward_outputs, request.settings)
    unknown = Candidate(name, Estimate(0, 0, 0, 0.0), modules)
    return Decision(request, unknown, modules, (unknown,), (), fallback=why)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else repr(error)
