"""A stack of recurrent layers, carried out by a plan.

Shape suffixes: T time, B batch, I input size, L layers, D directions, R size of the state h,
H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ecornn.backends.aten_layer import CUDNN_MOST_STEPS, run_layer
from ecornn.backends.aten_network import NetworkCall, run_network
from ecornn.backends.reference import define
from ecornn.errors import NotDifferentiableTwice
from ecornn.kernels.persistent.device import numbers_of
from ecornn.kernels.reference.problem import working_dtype
from ecornn.nn.overlapped import StackRoute, stack_route
from ecornn.ops.direct import run_directly
from ecornn.ops.keeping import keeps_gates
from ecornn.ops.native import (
    cudnn_differentiable_again,
    differentiable_again,
    onednn_differentiable_again,
)
from ecornn.ops.recurrence import differentiable_recurrence, read_call, recurrence
from ecornn.planner import ExecutionPlan, plan
from ecornn.spec import RnnSpec, weight_layout


class StackCall(NamedTuple):
    """A whole stack with its input, states and weights, time first."""

    cell: str
    layout: str
    layers: int
    directions: int
    input_TBI: Tensor
    h0: Tensor  # (L · D, B, R)
    c0: Tensor | None  # (L · D, B, H)
    weights: tuple[Tensor, ...]  # layer by layer, direction by direction, as `layout` says
    lengths_B: Tensor | None = None
    resets_TB: Tensor | None = None
    after_end: str = "zeros"
    reset_to: str = "zero"
    cell_states: bool = False
    dropout: float = 0.0  # between layers; 0 outside of training
    one_mask_a_sequence: bool = False
    zoneout_h: float = 0.0
    zoneout_c: float = 0.0
    training: bool = False


class StackResult(NamedTuple):
    output_TBO: Tensor
    h_n: Tensor
    c_n: Tensor | None
    cells_TBE: Tensor | None  # of the last layer, where asked for


#: Plans by the fields of their `RnnSpec`, so that a call need not build the spec to find its plan,
#: and by what torch's settings make of float32 on a GPU: another kernel, which may not fit.
_PLANS: dict[tuple[Any, ...], ExecutionPlan] = {}


def plan_from(*fields: Any) -> ExecutionPlan:
    """`plan` for the fields of an `RnnSpec` in order: plain constants, so that a tracer can call
    this at trace time."""
    on_gpu = "cuda" in fields and torch.float32 in fields
    key = (*fields, numbers_of(torch.float32)) if on_gpu else fields
    found = _PLANS.get(key)
    if found is None:
        found = plan(RnnSpec(*fields))
        # what may run in a graph that is being captured depends on what is loaded by then
        if not found.spec.captured:
            _PLANS[key] = found
    return found


def run_stack(call: StackCall, plan: ExecutionPlan) -> StackResult:
    if plan.scope == "network":
        return StackResult(*run_whole(_whole(call, plan.spec.needs_grad)), None)
    x = call.input_TBI
    if (route := short_way(call, plan)) is not None:
        tensors = (x, call.h0, call.c0, call.weights)
        found = route.run(*tensors, needs_grad=plan.spec.needs_grad, dropout=call.dropout)
        return StackResult(*found, None)
    h_n: list[Tensor] = []
    c_n: list[Tensor] = []
    cells: Tensor | None = None
    for layer in range(call.layers):
        if layer > 0 and call.dropout > 0:
            x = drop(x, call.dropout, one_mask_a_sequence=call.one_mask_a_sequence)
        wanted = call.cell_states and layer == call.layers - 1
        x, h, c, cells = _run_one(arguments_of(call, x, layer, wanted, plan), plan)
        h_n.append(h)
        c_n.append(c)
    return StackResult(
        x,
        h_n[0] if len(h_n) == 1 else torch.cat(h_n),
        None if call.c0 is None else c_n[0] if len(c_n) == 1 else torch.cat(c_n),
        cells if call.cell_states else None,
    )


def short_way(call: StackCall, plan: ExecutionPlan) -> StackRoute | None:
    """How the layers of this call run, arranged before, perhaps two at the same time."""
    if call.layers == 1 or plan.scope != "direct" or watched(call.input_TBI):
        return None
    found = stack_route(call, plan)
    return found if found.fits(call.h0, call.c0, call.weights) else None


def explained(call: StackCall, plan: ExecutionPlan) -> ExecutionPlan:
    """The plan, and whether the layers of this very call run at the same time."""
    if call.layers == 1 or plan.backend != "persistent" or plan.scope != "direct":
        return plan
    return replace(plan, notes=stack_route(call, plan).told)


def drop(x_TBF: Tensor, probability: float, *, one_mask_a_sequence: bool) -> Tensor:
    if not one_mask_a_sequence:
        return F.dropout(x_TBF, probability, training=True)
    return x_TBF * F.dropout(torch.ones_like(x_TBF[:1]), probability, training=True)


def arguments_of(
    call: StackCall, x: Tensor, layer: int, cell_states: bool, plan: ExecutionPlan
) -> tuple[Any, ...]:
    """The recurrence operator's arguments for one layer."""
    states = slice(layer * call.directions, (layer + 1) * call.directions)
    h0 = call.h0[states]
    c0 = None if call.c0 is None else call.c0[states]
    a_layer = len(call.weights) // call.layers
    return (
        x,
        h0,
        c0,
        list(call.weights[layer * a_layer : (layer + 1) * a_layer]),
        call.resets_TB,
        call.lengths_B,
        _zoneout(call.zoneout_h, call, x, h0),
        None if c0 is None else _zoneout(call.zoneout_c, call, x, c0),
        call.cell,
        call.layout,
        call.reset_to,
        call.after_end,
        cell_states,
        plan.backend,
        plan.keep,
    )


def _zoneout(probability: float, call: StackCall, x: Tensor, state: Tensor) -> Tensor | None:
    """How much of the previous state stays: drawn 0 or 1 in training, its expectation otherwise."""
    if probability == 0:
        return None
    if not call.training:
        return (
            torch.full((1, 1, 1, 1), probability, dtype=torch.float32, device=x.device)
            .expand(call.directions, 1, 1, 1)
            .to(working_dtype(x.dtype))
        )
    shape = (call.directions, x.shape[0], x.shape[1], state.shape[-1])
    drawn = torch.rand(shape, device=x.device) < probability
    return drawn.to(working_dtype(x.dtype))


def _run_one(
    arguments: tuple[Any, ...], plan: ExecutionPlan
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if plan.scope == "direct" and not watched(arguments[0]):
        return run_directly(arguments, needs_grad=plan.spec.needs_grad)  # type: ignore[return-value]
    if plan.scope in ("operator", "direct"):
        run = recurrence if plan.spec.traced else differentiable_recurrence
        output, h_n, c_n, cells, _ = run(*arguments)
        return output, h_n, c_n, cells
    call = read_call(*arguments)
    if plan.scope == "inline":
        result = define(call)
        return _filled(result.output_TBO, result.h_n_DBR, result.c_n_DBH, result.cells_TBE)
    result = run_layer(call)
    found = _filled(result.output_TBO, result.h_n_DBR, result.c_n_DBH, None)
    if not plan.spec.needs_grad or not _only_once(call.cell, call.input_TBI):
        return found

    # of the tensors only those that autograd does not keep: it must not outlive the others
    lstm, others = call.c0_DBH is not None, arguments[4:-2]

    def definition(*tensors: Tensor) -> tuple[Tensor, ...]:
        x, h0, *rest = tensors
        c0 = rest.pop(0) if lstm else None
        again = (x, h0, c0, rest, *others, "reference", "states")
        return tuple(differentiable_recurrence(*again)[: 3 if lstm else 2])

    states = () if call.c0_DBH is None else (call.c0_DBH,)
    inputs = (call.input_TBI, call.h0_DBR, *states, *call.flat_weights())
    covered = differentiable_again(found[: 3 if states else 2], inputs, definition)
    return (*covered, *found[len(covered) :])  # type: ignore[return-value]


def watched(x: Tensor) -> bool:
    """Whether a mode, a tensor's own class or torch.jit.trace watches operators: fake tensors,
    counters of operations. They must see one, and a fake tensor has no memory to launch a kernel
    on."""
    return (
        type(x) not in (Tensor, torch.nn.Parameter)
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._is_tracing()
    )


def _filled(
    output: Tensor, h_n: Tensor, c_n: Tensor | None, cells: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The operator's form: what there is none of is an empty tensor."""
    empty = output.new_empty(0)
    return output, h_n, empty if c_n is None else c_n, empty if cells is None else cells


def _whole(call: StackCall, needs_grad: bool) -> NetworkCall:
    return NetworkCall(
        call.cell,
        call.input_TBI,
        call.h0,
        call.c0,
        list(call.weights),
        "b_ih" in call.layout,
        call.layers,
        call.directions == 2,
        call.dropout,
        needs_grad,
    )


def run_whole(call: NetworkCall) -> tuple[Tensor, Tensor, Tensor | None]:
    """The whole stack by torch's own kernels, recorded by autograd: (output, h_n, c_n)."""
    found = run_network(call)
    if not call.needs_grad or not _only_once(call.cell, call.input_TBI):
        return found
    nodes = call.layers * (2 if call.bidirectional else 1)
    if call.input_TBI.is_cuda:
        if cudnn_differentiable_again(found[0], len(call.weights), _definition(call)):
            return found
    elif onednn_differentiable_again(found[0], nodes):
        return found
    return _covered(call, found)


def _definition(call: NetworkCall) -> Callable[..., tuple[Tensor, ...]]:
    """(input, h_0, c_0 where there is one, weights) -> outputs, as the call's; it holds none of the
    call's own tensors."""
    cell, bias, layers, dropout = call.cell, call.bias, call.layers, call.dropout
    directions = 2 if call.bidirectional else 1

    def definition(*tensors: Tensor) -> tuple[Tensor, ...]:
        if dropout > 0:
            raise NotDifferentiableTwice(
                "a second derivative through torch's kernels with dropout between the layers: "
                "their masks are not known outside; make the layer with backend='reference'"
            )
        x, h0, *rest = tensors
        c0 = rest.pop(0) if cell == "lstm" else None
        a_direction = len(rest) // (layers * directions)
        projected = a_direction > (4 if bias else 2)
        layout = weight_layout(cell, bias=bias, projection=projected, layer_norm=False)
        again = StackCall(cell, layout, layers, directions, x, h0, c0, tuple(rest))
        return tuple(v for v in run_stack(again, _BY_REFERENCE)[:3] if v is not None)

    return definition


def _covered(
    call: NetworkCall, found: tuple[Tensor, Tensor, Tensor | None]
) -> tuple[Tensor, Tensor, Tensor | None]:
    states = () if call.c0 is None else (call.c0,)
    outputs = [t for t in found if t is not None]
    inputs = (call.input_TBI, call.h0, *states, *call.weights)
    output, h_n, *c_n = differentiable_again(outputs, inputs, _definition(call))
    return output, h_n, c_n[0] if c_n else None


def _only_once(cell: str, x: Tensor) -> bool:
    """Whether torch's kernel for this has no second derivative: cuDNN's and oneDNN's have none,
    ATen's own loops do."""
    return x.is_cuda or (cell == "lstm" and x.dtype != torch.float64)


#: For second derivatives of a whole stack.
_BY_REFERENCE = ExecutionPlan(
    RnnSpec("lstm", 0, 0), "reference", "states", "operator", "the definition is asked for"
)


#: Below this many steps a persistent kernel spends more on loading weights than it saves.
FEW_STEPS = 8


def is_roomy(x_TBI: Tensor, hidden: int) -> bool:
    steps, batch = x_TBI.shape[:2]
    return x_TBI.is_cuda and keeps_gates(4 * hidden * steps * batch * x_TBI.element_size())


#: Up to so many steps a call's cost on the host is not hidden behind the GPU's work.
SOME_STEPS = 512


def is_brief(steps: int, device: str) -> bool:
    return device == "cuda" and steps <= SOME_STEPS


def is_short(steps: int, device: str) -> bool:
    return device == "cuda" and steps < FEW_STEPS


def is_long(steps: int, device: str) -> bool:
    return device == "cuda" and steps > CUDNN_MOST_STEPS
