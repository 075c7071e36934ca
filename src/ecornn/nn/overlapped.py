"""Stacks whose layers run two by two at the same time: which, and how they are run.

Shape suffixes: as in `stack`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ecornn.backends.overlap import Decision
from ecornn.backends.pair_choice import PairAsk, choose, passes
from ecornn.backends.persistent_calls import SMALL_BYTES, padded
from ecornn.backends.persistent_pair import PlainPair
from ecornn.kernels.persistent.device import numbers_of
from ecornn.kernels.persistent.model import describe
from ecornn.ops.direct import PlainRoute, plain_route, run_plain_route
from ecornn.ops.pair import PairRoute, run_pair_route
from ecornn.ops.recurrence import read_call
from ecornn.spec import GATES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ecornn.nn.stack import StackCall
    from ecornn.planner import ExecutionPlan

#: By everything that decides about a stack; where its layers run one after the other, why: they
#: would not be quicker, or cannot run at once.
_FOUND: dict[tuple[Any, ...], StackRoute | Decision | str] = {}
#: Beyond this many all are forgotten.
MOST_ROUTES = 4096


class StackRoute(NamedTuple):
    """How plain calls of a stack of one size run: its layers two by two, and what is left over."""

    pairs: tuple[PairRoute, ...]
    last: PlainRoute | None

    def fits(self, h0: Tensor, c0: Tensor | None, weights: Sequence[Tensor]) -> bool:
        """The input is brought into the right form, and what lies between layers has it."""
        if h0.get_device() != torch.cuda.current_device():
            return False
        count = len(weights) // self.layers
        for at, pair in enumerate(self.pairs):
            own = weights[2 * at * count : 2 * (at + 1) * count]
            if not pair.pair.fits(h0, h0, c0, own):
                return False
        return self.last is None or self.last.layer.fits(h0, h0, c0, weights[-count:])

    @property
    def layers(self) -> int:
        return 2 * len(self.pairs) + (self.last is not None)

    def run(
        self,
        x: Tensor,
        h0: Tensor,
        c0: Tensor | None,
        weights: Sequence[Tensor],
        *,
        needs_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(output, h_n, c_n) of tensors that fit."""
        x = x.contiguous()
        if self.layers == 2:
            return run_pair_route(self.pairs[0], x, h0, c0, list(weights), needs_grad=needs_grad)
        count = len(weights) // self.layers
        h_n, c_n = [], []
        for at in range(0, self.layers, 2):
            states = (h0[at : at + 2], None if c0 is None else c0[at : at + 2])
            own = list(weights[at * count : (at + 2) * count])
            if at // 2 < len(self.pairs):
                route = self.pairs[at // 2]
                x, h, c = run_pair_route(route, x, *states, own, needs_grad=needs_grad)
            else:
                assert self.last is not None
                x, h, c = run_plain_route(self.last, x, *states, own, needs_grad=needs_grad)
            h_n.append(h)
            c_n.append(c)
        return x, torch.cat(h_n), None if c0 is None else torch.cat(c_n)  # type: ignore[arg-type]


def stack_route(call: StackCall, plan: ExecutionPlan) -> StackRoute | Decision | str:
    """For calls like this one on the persistent kernels; or why its layers run one after the
    other."""
    x = call.input_TBI
    key = (
        *(call.cell, call.layout, call.layers, call.directions, x.shape, x.dtype, x.device),
        *(call.h0.shape[-1], numbers_of(x.dtype), plan.keep, plan.spec.captured),
        *(plan.spec.needs_grad, special(call)),
    )
    found = _FOUND.get(key)
    if found is None:
        if len(_FOUND) >= MOST_ROUTES:
            _FOUND.clear()
        found = _find(call, plan)
        # what a graph that is being captured may have depends on what is loaded by then
        if not plan.spec.captured:
            _FOUND[key] = found
    return found


def special(call: StackCall) -> str | None:
    """What of a call stands against it."""
    reasons = (
        (call.directions > 1, "both directions of one run at once already"),
        (call.dropout > 0, "there is dropout between them"),
        (call.lengths_B is not None, "there are lengths"),
        (call.resets_TB is not None, "there are resets"),
        (call.cell_states, "all cell states are asked for"),
        (call.zoneout_h > 0 or call.zoneout_c > 0, "there is zoneout"),
    )
    return next((reason for holds, reason in reasons if holds), None)


def _find(call: StackCall, plan: ExecutionPlan) -> StackRoute | Decision | str:
    x, hidden = call.input_TBI, call.h0.shape[-1]
    steps, batch, _ = x.shape
    numbers = numbers_of(x.dtype)
    assert numbers is not None
    kept_in_place = plan.keep == "gates" and call.cell == "lstm"
    shares = steps * batch * GATES[call.cell] * hidden * x.element_size()
    reasons = (
        (special(call) is not None, str(special(call))),
        (0 in x.shape, "there is nothing to compute"),
        (padded(hidden, x.dtype) != hidden, "a row of h is no whole number of 16 bytes"),
        (
            plan.keep == "states" and call.cell in ("lstm", "gru"),
            "gates that are not kept are made again piece by piece",
        ),
        (
            shares > SMALL_BYTES and not kept_in_place,
            "their gates' inputs are so large that they are made piece by piece",
        ),
    )
    if (reason := next((text for holds, text in reasons if holds), None)) is not None:
        return reason
    device = x.get_device()
    sizes = (call.cell, numbers, hidden, batch, steps)
    ask = PairAsk(*sizes, device, plan.spec.needs_grad, plan.spec.captured)
    decision = choose(ask)
    if isinstance(decision, str) or not decision.pays:
        return decision
    return _route(call, plan, ask, decision)


def _route(call: StackCall, plan: ExecutionPlan, ask: PairAsk, decision: Decision) -> StackRoute:
    x, count = call.input_TBI, len(call.weights) // call.layers
    constants = (
        *(call.cell, call.layout, call.reset_to, call.after_end, call.cell_states),
        *(plan.backend, plan.keep),
    )
    between = x.new_empty(1).expand(*x.shape[:2], ask.hidden)  # for its shape alone

    def arguments(layer: int) -> tuple[Any, ...]:
        own = slice(layer, layer + 1)
        c0 = None if call.c0 is None else call.c0[own]
        weights = list(call.weights[layer * count : (layer + 1) * count])
        states = (call.h0[own], c0)
        return (x if layer == 0 else between, *states, weights, *(None,) * 4, *constants)

    both = [*passes(ask, decision), None][:2]
    pairs = []
    for at in range(0, call.layers - 1, 2):
        second = arguments(at + 1)[3]
        pair = PlainPair(read_call(*arguments(at)), second, both[0], both[1])  # type: ignore[arg-type]
        pairs.append(PairRoute(pair, constants, decision))
    last = plain_route(arguments(call.layers - 1)) if call.layers % 2 else None
    return StackRoute(tuple(pairs), last)


def told(route: StackRoute | Decision | str) -> list[str]:
    """For a person to read."""
    if isinstance(route, Decision):
        return [str(route)]
    if isinstance(route, str):
        return [f"layers run one after the other: {route}"]
    pair = route.pairs[0]
    shared = [run for run in pair.pair.passes if len(run.pieces) > 1]
    return [str(pair.decision), *(f"each by {describe(run.launcher.geometry)}" for run in shared)]
