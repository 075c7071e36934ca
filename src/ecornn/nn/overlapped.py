"""Plain stacks, arranged once: which of their layers run two at the same time, and how all are run.

Shape suffixes: as in `stack`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ecornn.backends.overlap import Decision
from ecornn.backends.pair_choice import PairAsk, choose, passes
from ecornn.backends.persistent_calls import padded, small_bytes
from ecornn.backends.persistent_pair import PlainPair
from ecornn.backends.persistent_plain import PlainLayer
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

#: By everything that decides about a stack.
_FOUND: dict[tuple[Any, ...], StackRoute] = {}
#: Beyond this many all are forgotten.
MOST_ROUTES = 4096
#: Stands against two layers at once, but not against the short way.
DROPOUT = "there is dropout between them"


class StackRoute(NamedTuple):
    """How calls of a stack of one size run: one layer or two at a time; no parts where the short
    way does not serve them. `told`: why so, for a person to read."""

    parts: tuple[PairRoute | PlainRoute, ...]
    layers: int
    told: tuple[str, ...]

    def fits(self, h0: Tensor, c0: Tensor | None, weights: Sequence[Tensor]) -> bool:
        """The input is brought into the right form, and what lies between layers has it."""
        if not self.parts or h0.get_device() != torch.cuda.current_device():
            return False
        at, count = 0, len(weights) // self.layers
        for part in self.parts:
            layer: PlainPair | PlainLayer
            layer, last = part.layer, at + part.layers * count
            if not layer.fits(h0, h0, c0, weights[at:last]):
                return False
            at = last
        return True

    def run(
        self,
        x: Tensor,
        h0: Tensor,
        c0: Tensor | None,
        weights: Sequence[Tensor],
        *,
        needs_grad: bool,
        dropout: float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(output, h_n, c_n) of tensors that fit. `dropout`: between layers."""
        x = x.contiguous()
        if len(self.parts) == 1 and isinstance(self.parts[0], PairRoute):
            given = (x, h0, c0, list(weights))
            return run_pair_route(self.parts[0], *given, needs_grad=needs_grad)
        h_n, c_n, at, count = [], [], 0, len(weights) // self.layers
        for part in self.parts:
            last = at + part.layers
            if dropout > 0 and at > 0:
                x = F.dropout(x, dropout, training=True)
            states = (h0[at:last], None if c0 is None else c0[at:last])
            own = list(weights[at * count : last * count])
            if isinstance(part, PairRoute):
                x, h, c = run_pair_route(part, x, *states, own, needs_grad=needs_grad)
            else:
                x, h, c = run_plain_route(part, x, *states, own, needs_grad=needs_grad)
            h_n.append(h)
            c_n.append(c)
            at = last
        return x, torch.cat(h_n), None if c0 is None else torch.cat(c_n)  # type: ignore[arg-type]


def stack_route(call: StackCall, plan: ExecutionPlan) -> StackRoute:
    """For calls like this one on the persistent kernels."""
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
    """What of a call stands against two layers at once, and, but for dropout, against the short
    way."""
    reasons = (
        (call.directions > 1, "both directions of one run at once already"),
        (call.lengths_B is not None, "there are lengths"),
        (call.resets_TB is not None, "there are resets"),
        (call.cell_states, "all cell states are asked for"),
        (call.zoneout_h > 0 or call.zoneout_c > 0, "there is zoneout"),
        (call.dropout > 0 and call.one_mask_a_sequence, "they share a mask over all steps"),
        (call.dropout > 0, DROPOUT),  # the last: whoever is told this has nothing of the others
    )
    return next((reason for holds, reason in reasons if holds), None)


def _find(call: StackCall, plan: ExecutionPlan) -> StackRoute:
    reason = special(call)
    if reason not in (None, DROPOUT):
        return StackRoute((), call.layers, (_apart(reason),))
    reason = reason or _unfit(call, plan)
    if reason is None:
        x, numbers = call.input_TBI, numbers_of(call.input_TBI.dtype)
        assert numbers is not None
        steps, batch, _ = x.shape
        sizes = (call.cell, numbers, call.h0.shape[-1], batch, steps, x.get_device())
        ask = PairAsk(*sizes, plan.spec.needs_grad, plan.spec.captured, _is_large(call, plan))
        decision = choose(ask)
        if isinstance(decision, Decision) and decision.pays:
            return _two_by_two(call, plan, ask, decision)
        reason = decision if isinstance(decision, str) else None
    told = str(decision) if reason is None else _apart(reason)
    single = [plain_route(_arguments(call, plan, layer)) for layer in range(call.layers)]
    parts = tuple(route for route in single if route is not None)
    return StackRoute(parts if len(parts) == call.layers else (), call.layers, (told,))


def _apart(reason: str | None) -> str:
    return f"layers run one after the other: {reason}"


def _unfit(call: StackCall, plan: ExecutionPlan) -> str | None:
    """What of a plain call's sizes stands against two layers at once."""
    x, hidden = call.input_TBI, call.h0.shape[-1]
    reasons = (
        (0 in x.shape, "there is nothing to compute"),
        (padded(hidden, x.dtype) != hidden, "a row of h is no whole number of 16 bytes"),
        (
            plan.keep == "states" and call.cell in ("lstm", "gru"),
            "gates that are not kept are made again piece by piece",
        ),
    )
    return next((text for holds, text in reasons if holds), None)


def _is_large(call: StackCall, plan: ExecutionPlan) -> bool:
    """Whether the input's share of the gates is not to be there for all of time."""
    x, hidden = call.input_TBI, call.h0.shape[-1]
    kept_in_place = plan.keep == "gates" and call.cell == "lstm"
    shares = x.shape[0] * x.shape[1] * GATES[call.cell] * hidden * x.element_size()
    return shares > small_bytes(plan.keep) and not kept_in_place


def _arguments(call: StackCall, plan: ExecutionPlan, layer: int) -> tuple[Any, ...]:
    """The operator's for one layer; of its input's values none is known."""
    own, count = slice(layer, layer + 1), len(call.weights) // call.layers
    x = call.input_TBI
    if layer > 0:
        x = x.new_empty(1).expand(*x.shape[:2], call.h0.shape[-1])
    c0 = None if call.c0 is None else call.c0[own]
    weights = list(call.weights[layer * count : (layer + 1) * count])
    return (x, call.h0[own], c0, weights, *(None,) * 4, *_constants(call, plan))


def _constants(call: StackCall, plan: ExecutionPlan) -> tuple[Any, ...]:
    # what a call asks for at resets and after ends says nothing where it has none
    return (call.cell, call.layout, "zero", "zeros", False, plan.backend, plan.keep)


def _two_by_two(
    call: StackCall, plan: ExecutionPlan, ask: PairAsk, decision: Decision
) -> StackRoute:
    runs = passes(ask, decision)
    parts: list[PairRoute | PlainRoute] = []
    for at in range(0, call.layers - 1, 2):
        first, second = (_arguments(call, plan, at + layer) for layer in range(2))
        pair = PlainPair(read_call(*first), second[3], runs[0], runs[1] if len(runs) > 1 else None)
        parts.append(PairRoute(pair, _constants(call, plan), decision))
    if call.layers % 2:
        last = plain_route(_arguments(call, plan, call.layers - 1))
        assert last is not None  # it is like the others, which a pair serves
        parts.append(last)
    shared = (describe(run.launcher.geometry) for run in runs if len(run.pieces) > 1)
    return StackRoute(
        tuple(parts), call.layers, (str(decision), *(f"each by {one}" for one in shared))
    )
