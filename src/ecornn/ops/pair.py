"""Two layers of a stack that run at the same time, as one function of autograd."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ecornn.backends.overlap import Decision
from ecornn.backends.persistent_pair import PlainPair
from ecornn.backends.protocol import LayerResult
from ecornn.ops.direct import layer_gradients
from ecornn.ops.recurrence import differentiable_recurrence


class PairRoute(NamedTuple):
    """How plain calls of one size run: both layers, the operator's constants, and why so."""

    layer: PlainPair
    constants: tuple[Any, ...]
    decision: Decision
    layers: int = 2


def run_pair_route(
    route: PairRoute,
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    weights: list[Tensor],
    *,
    needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(output, h_n, c_n) of both layers; the tensors must be such that the pair `fits`."""
    if needs_grad:
        found: tuple[Tensor, Tensor, Tensor | None] = _Pair.apply(route, x, h0, c0, *weights)
        return found
    return route.layer.forward(x, h0, c0, weights)[:3]


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, route: PairRoute, x: Any, h0: Any, c0: Any, *weights: Any) -> Any:
        output, h_n, c_n, between, cells, kept = route.layer.forward(x, h0, c0, weights)
        ctx.save_for_backward(x, h0, c0, between, output, cells, kept, *weights)
        ctx.route = route
        ctx.set_materialize_grads(False)
        return output, h_n, c_n

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        needed, pair = ctx.needs_input_grad, ctx.route.layer
        if all(grad is None for grad in grads):
            return (None,) * len(needed)
        saved = ctx.saved_tensors
        if torch.is_grad_enabled():
            # what lies between the layers depends on the first one's weights: both run again
            return (None, *_differentiable(ctx.route, saved, grads, needed[1:]))
        (x, h0, c0, *results), weights = saved[:7], saved[7:]
        given = (x, h0, c0, weights)
        # under autocast its products would be in autocast's numbers; hooks on saved tensors may
        # have given any of them another form
        plain = not torch._C._is_any_autocast_enabled()
        if not plain or not pair.fits(*given, *results):
            return (None, *_layer_by_layer(ctx.route, given, results, grads, needed[1]))
        found = pair.backward(
            grads, given, results, needs_input=needed[1], needs_states=needed[2] or needed[3]
        )
        return (None, *found[:3], *found.weights)


def _arguments(
    route: PairRoute, layer: int, x: Tensor, states: tuple[Any, ...], weights: Any
) -> tuple[Any, ...]:
    """The operator's for one of the two layers."""
    own, half = slice(layer, layer + 1), len(weights) // 2
    h0, c0 = (None if state is None else state[own] for state in states)
    part = list(weights[layer * half : (layer + 1) * half])
    return (x, h0, c0, part, None, None, None, None, *route.constants)


def _layer_by_layer(
    route: PairRoute, given: tuple[Any, ...], results: Any, grads: Any, needs_input: bool
) -> tuple[Any, ...]:
    """The same gradients the general way."""
    x, h0, c0, weights = given
    between, output, cells, kept = results
    d_output, d_h_n, d_c_n = grads
    d_states: list[tuple[Any, Any]] = []
    d_weights: list[Tensor | None] = []
    for layer, x_, y in ((1, between, output), (0, x, between)):
        own = slice(layer, layer + 1)
        gates = [] if kept is None else [kept[layer].view(*y.shape[:2], -1)]
        result = LayerResult(y, h0[own], None, None if cells is None else cells[layer], gates)
        arrived = (d_output, *(None if d is None else d[own] for d in (d_h_n, d_c_n)), None)
        arguments = _arguments(route, layer, x_, (h0, c0), weights)
        d_output, d_h0, d_c0, *own_weights = layer_gradients(
            arguments, result, arrived, needs_input=layer == 1 or needs_input
        )
        d_states.insert(0, (d_h0, d_c0))
        d_weights[:0] = own_weights
    d_h0, d_c0 = (None if s[0] is None else torch.cat(s) for s in zip(*d_states, strict=True))
    return (d_output, d_h0, d_c0, *d_weights)


def _differentiable(
    route: PairRoute, saved: tuple[Any, ...], grads: Any, needed: tuple[bool, ...]
) -> list[Tensor | None]:
    """Gradients that can be differentiated: those of both layers run again as operators."""
    given = (*saved[:3], *saved[7:])
    # aliases, so that each gets its own share alone even where one is computed from another
    aliases = [None if t is None else t.view_as(t) for t in given]
    x, h0, c0, *weights = aliases
    assert x is not None
    h_n, c_n = [], []
    for layer in range(2):
        arguments = _arguments(route, layer, x, (h0, c0), weights)
        x, h, c, *_ = differentiable_recurrence(*arguments)
        h_n.append(h)
        c_n.append(c)
    results = (x, torch.cat(h_n), None if c0 is None else torch.cat(c_n))
    pairs = [(y, d) for y, d in zip(results, grads, strict=True) if d is not None]
    wanted = [t for t, needs in zip(aliases, needed, strict=True) if t is not None and needs]
    found = iter(
        torch.autograd.grad(
            [y for y, _ in pairs],
            wanted,
            [d for _, d in pairs],
            create_graph=True,
            allow_unused=True,
        )
    )
    return [next(found) if needs else None for needs in needed]
