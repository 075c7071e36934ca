"""The plain call, recognized in a few microseconds.

One step of a small layer, as a reinforcement learning agent takes it, is 20 µs of arithmetic on a
CPU; reading the call in full and planning it takes half as long again. So a call that has nothing
special about it is recognized by a chain of cheap tests, and runs on torch's kernels as a whole, or
layer by layer on the persistent ones, which is also what the planner says of it
(`tests/nn/test_plain.py` holds the two together). Everything else, bad input included, is left to
the full reading.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ecornn.backends.aten_network import NetworkCall
from ecornn.backends.zeros import zero_state
from ecornn.kernels.persistent.device import numbers_of, unavailable
from ecornn.nn.overlapped import StackRoute
from ecornn.nn.stack import (
    StackCall,
    arguments_of,
    is_brief,
    is_long,
    is_roomy,
    is_short,
    plan_from,
    run_stack,
    run_whole,
    short_way,
    watched,
)
from ecornn.ops.checks import check_lengths_within
from ecornn.ops.direct import PlainRoute, plain_route, run_plain_route
from ecornn.ops.keeping import states_alone
from ecornn.ops.transforms import transforms_active

if TYPE_CHECKING:
    from ecornn.nn.base import RecurrentLayer
    from ecornn.planner import ExecutionPlan

_DEVICES = ("cpu", "cuda")
_BACKENDS, _KEEP = ("auto", "persistent"), ("auto", "states", "gates")

#: The whole call by torch's kernels.
_WHOLE = "whole"
#: Sizes of calls met so far, and how they run; None where the short way does not serve them.
_ROUTES: dict[tuple[Any, ...], PlainRoute | StackRoute | str | None] = {}
#: Beyond this many sizes all are forgotten: each takes microseconds to find again.
MOST_ROUTES = 4096


def plain_call(layer: RecurrentLayer, x: Any, hx: Any) -> NetworkCall | None:
    """The call as torch's kernels take it, or None if it may not be plain."""
    if (
        torch.compiler.is_compiling()
        or type(x) is not Tensor
        or x.dim() != 3
        or x.layout != torch.strided
        or x.is_nested
        or not _has_no_extras(layer)
        or torch._C._is_any_autocast_enabled()
        or transforms_active()
        or forward_ad._current_level >= 0
    ):
        return None
    made, own = layer._made, layer._parameters
    try:
        weights: list[Any] = [own[name] for name in made.names]
    except KeyError:
        return None  # pruned, parametrized or replicated: read as attributes
    weight, dtype, device = weights[0], x.dtype, x.device
    if layer.batch_first:
        x = x.transpose(0, 1)
    steps, batch, features = x.shape
    if (
        features != layer.input_size
        or steps == 0
        or dtype != weight.dtype
        or device != weight.device
        or device.type not in _DEVICES
        or (device.type == "cpu" and not _torch_may(layer))
        or is_long(steps, device.type)
    ):
        return None
    states = _plain_states(hx, made.state_sizes, layer.num_layers * made.directions, batch, x)
    if states is None:
        return None
    h0, c0 = states
    needs_grad = torch.is_grad_enabled() and (
        weight.requires_grad
        or x.requires_grad
        or any([t.requires_grad for t in (h0, *weights)])  # noqa: C419 a list is the faster
        or (c0 is not None and c0.requires_grad)
    )
    return NetworkCall(
        *(made.cell, x, h0, c0, weights),
        *(layer.bias, layer.num_layers, layer.bidirectional),
        layer.dropout if layer.training and layer.num_layers > 1 else 0.0,
        needs_grad,
    )


def run_plain(
    layer: RecurrentLayer, call: NetworkCall
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """(output, h_n, c_n), time first; None where the full reading is needed."""
    x = call.input_TBI
    if not x.is_cuda or is_short(x.shape[0], "cuda") or unavailable() is not None:
        return run_whole(call) if _torch_may(layer) else None
    return _run_on_gpu(layer, call)


def _torch_may(layer: RecurrentLayer) -> bool:
    """Nobody has asked for our kernels, or for what only they do."""
    return layer.backend == "auto" and layer.keep == "auto"


def _run_on_gpu(
    layer: RecurrentLayer, call: NetworkCall
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    x = call.input_TBI
    captured, alone = torch.cuda.is_current_stream_capturing(), _is_alone(layer, call)
    if not alone and not _torch_may(layer):
        return None
    stacked = not alone and _is_stacked(layer, call)
    key = _key(layer, call, captured, False)
    route = _ROUTES.get(key) if alone or stacked else None
    if route == _WHOLE:
        return run_whole(call)
    if isinstance(route, StackRoute):
        tensors = (call.h0, call.c0, call.weights)
        if route.fits(*tensors):
            return route.run(x, *tensors, needs_grad=call.needs_grad, dropout=call.dropout)
    if isinstance(route, PlainRoute) and _fits(route, call):
        return _run_route(route, call)
    plan = _plan(layer, call, captured, False)
    if plan.backend != "persistent" and not _torch_may(layer):
        return None
    if plan.backend != "persistent":
        # what a graph that is being captured may have depends on what is loaded by then
        if alone and not captured:
            _remember(key, _WHOLE)
        return run_whole(call)
    stack = _stack(layer, call, None)
    if alone and key not in _ROUTES:
        found = plain_route(arguments_of(stack, x, 0, False, plan))
        _remember(key, found)
        # at once: a checkpoint that runs the first call again must find the same tensors kept
        if found is not None and _fits(found, call):
            return _run_route(found, call)
    if stacked and not captured and (way := short_way(stack, plan)) is not None:
        _remember(key, way)
    output, h_n, c_n, _ = run_stack(stack, plan)
    return output, h_n, c_n


def run_plain_with_lengths(
    layer: RecurrentLayer, call: NetworkCall, lengths: Any
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """The same of a call that has lengths beside; None where the full reading is needed."""
    x = call.input_TBI
    if (
        not x.is_cuda
        or is_short(x.shape[0], "cuda")
        or unavailable() is not None
        or torch.cuda.is_current_stream_capturing()
    ):
        return None
    return _run_on_gpu_with_lengths(layer, call, lengths)


def _run_on_gpu_with_lengths(
    layer: RecurrentLayer, call: NetworkCall, lengths: Any
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    x = call.input_TBI
    if (
        type(lengths) is not Tensor
        or lengths.dtype != torch.int64
        or lengths.shape != x.shape[1:2]
        or (lengths.device != x.device and lengths.device.type != "cpu")
        or not _is_alone(layer, call)
    ):
        return None
    key = _key(layer, call, False, True)
    if key not in _ROUTES:
        plan = _plan(layer, call, False, True)
        stack = _stack(layer, call, lengths.to(x.device))
        ours = plan.backend == "persistent"
        _remember(key, plain_route(arguments_of(stack, x, 0, False, plan)) if ours else None)
    route = _ROUTES[key]
    if not isinstance(route, PlainRoute) or not _fits(route, call):
        return None
    check_lengths_within(lengths, x.shape[0])
    return _run_route(route, call, lengths.to(x.device).contiguous())


def _is_alone(layer: RecurrentLayer, call: NetworkCall) -> bool:
    """One layer of one direction, which nobody watches."""
    several = call.layers != 1 or call.bidirectional or layer.proj_size
    return not several and not watched(call.input_TBI)


def _is_stacked(layer: RecurrentLayer, call: NetworkCall) -> bool:
    """Several layers of one direction, which nobody watches."""
    several = call.layers > 1 and not call.bidirectional
    return several and not layer.proj_size and not watched(call.input_TBI)


def _key(
    layer: RecurrentLayer, call: NetworkCall, captured: bool, lengths: bool
) -> tuple[Any, ...]:
    """All that decides about a call of one direction; see `PlainRoute` and `StackRoute`."""
    x, made = call.input_TBI, layer._made
    return (
        *(made.cell, made.layout, layer.input_size, layer.hidden_size, x.shape, x.dtype),
        *(x.get_device(), numbers_of(x.dtype), call.needs_grad, captured, lengths, call.layers),
        *(call.dropout > 0, layer.backend, layer.keep, states_alone()),
    )


def _plan(layer: RecurrentLayer, call: NetworkCall, captured: bool, lengths: bool) -> ExecutionPlan:
    x = call.input_TBI
    return plan_from(  # in the order of RnnSpec's fields
        *(layer._made.cell, layer.input_size, layer.hidden_size, call.layers, call.bidirectional),
        *(layer.proj_size, call.bias, x.dtype, "cuda", call.dropout),
        # no variational dropout, layer norm or zoneout
        *(False, False, False, lengths),
        # no resets or cell states
        *(False, False, call.needs_grad, layer.keep, layer.backend),
        # not traced, transformed, in forward mode or long
        *(False, False, False, False, captured),
        *(False, is_brief(x.shape[0], "cuda"), is_roomy(x, layer.hidden_size), x.shape[1]),
    )


def _stack(layer: RecurrentLayer, call: NetworkCall, lengths: Tensor | None) -> StackCall:
    made = layer._made
    return StackCall(
        *(made.cell, made.layout, call.layers, made.directions),
        *(call.input_TBI, call.h0, call.c0, tuple(call.weights)),
        lengths_B=lengths,
        dropout=call.dropout,
        training=layer.training,
    )


def _remember(key: tuple[Any, ...], route: PlainRoute | StackRoute | str | None) -> None:
    if len(_ROUTES) >= MOST_ROUTES:
        _ROUTES.clear()
    _ROUTES[key] = route


def _fits(route: PlainRoute, call: NetworkCall) -> bool:
    x = call.input_TBI
    on_this_device = x.get_device() == torch.cuda.current_device()
    return on_this_device and route.layer.fits(x, call.h0, call.c0, call.weights)


def _run_route(
    route: PlainRoute, call: NetworkCall, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    tensors = (call.input_TBI, call.h0, call.c0, call.weights, lengths)
    return run_plain_route(route, *tensors, needs_grad=call.needs_grad)


def _has_no_extras(layer: RecurrentLayer) -> bool:
    return (
        layer.backend in _BACKENDS
        and layer.keep in _KEEP
        and not layer.layer_norm
        and not layer.variational
        and layer.zoneout == (0.0, 0.0)
        and not (
            layer.training
            and (layer.input_dropout or layer.output_dropout or layer.recurrent_dropout)
        )
    )


def _plain_states(
    hx: Any, sizes: tuple[int, ...], count: int, batch: int, x: Tensor
) -> tuple[Tensor, Tensor | None] | None:
    if hx is None:
        h0 = zero_state(x, (count, batch, sizes[0]))
        return h0, zero_state(x, (count, batch, sizes[1])) if len(sizes) == 2 else None
    given = hx if len(sizes) == 2 else (hx,)
    if type(given) is not tuple or len(given) != len(sizes):
        return None
    for state, size in zip(given, sizes, strict=True):
        if (
            type(state) is not Tensor
            or state.layout != torch.strided
            or state.shape != (count, batch, size)
            or state.dtype != x.dtype
            or state.device != x.device
        ):
            return None
    return given[0], given[1] if len(given) == 2 else None
