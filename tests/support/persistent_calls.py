"""Calls of layers on a GPU, and what the definition in float64 makes of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ecornn.backends.protocol import BackwardRequest, CallGrads, LayerCall, LayerResult, ResultGrads
from ecornn.backends.registry import by_name
from ecornn.kernels.persistent import device
from ecornn.kernels.reference import DirectionWeights
from ecornn.spec import GATES
from support.tolerances import assert_matches, tolerance


def make_call(
    cell: str,
    dtype: torch.dtype,
    hidden: int,
    batch: int,
    steps: int,
    *,
    directions: int = 1,
    bias: bool = True,
    inputs: int = 24,
    **more: Any,
) -> LayerCall:
    generator = torch.Generator("cuda").manual_seed(hidden + 7 * batch + steps)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=generator, device="cuda", dtype=torch.float64)
        return (values * scale).to(dtype)

    rows = GATES[cell] * hidden
    # a unit of a ReLU network that rounding switches off changes its gradient by all of it: most
    # units are kept away from zero
    relu = cell == "rnn_relu"
    scale = (0.3 if relu else 1.0) * hidden**-0.5
    weights = tuple(
        DirectionWeights(
            draw(rows, inputs, scale=0.3),
            draw(rows, hidden, scale=scale),
            draw(rows, scale=0.3) + (5.0 if relu else 0.0) if bias else None,
            draw(rows, scale=0.3) if bias else None,
        )
        for _ in range(directions)
    )
    state = (directions, batch, hidden)
    return LayerCall(
        cell,
        draw(steps, batch, inputs),
        draw(*state, scale=0.5),
        draw(*state) if cell == "lstm" else None,
        weights,
        **{"keep": "states", **more},
    )


def widened(call: LayerCall) -> LayerCall:
    """The same call in float64."""
    return replace(
        call,
        input_TBI=call.input_TBI.double(),
        h0_DBR=call.h0_DBR.double(),
        c0_DBH=None if call.c0_DBH is None else call.c0_DBH.double(),
        weights=tuple(w.to(torch.float64) for w in call.weights),
        keep="states",
    )


def run(name: str, call: LayerCall, grads: ResultGrads) -> tuple[LayerResult, CallGrads]:
    backend = by_name(name)
    result = backend.forward(call)
    return result, backend.backward(call, result, grads, BackwardRequest())


def arriving(call: LayerCall, *, states: bool = True) -> ResultGrads:
    steps, batch = call.input_TBI.shape[:2]
    hidden, d = call.h0_DBR.shape[-1], call.directions
    draw = torch.Generator("cuda").manual_seed(3)

    def values(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=draw, device="cuda", dtype=torch.float64)
        return drawn.to(call.input_TBI.dtype)

    return ResultGrads(
        values(steps, batch, d * hidden),
        values(d, batch, hidden) if states else None,
        values(d, batch, hidden) if states and call.cell == "lstm" else None,
        values(steps, batch, d * hidden) if call.cell == "lstm" and call.cell_states else None,
    )


def assert_like_the_definition(call: LayerCall, bound: float | None = None) -> None:
    grads = arriving(call)
    dtype, steps = call.input_TBI.dtype, call.input_TBI.shape[0]
    wide = ResultGrads(*(None if g is None else g.double() for g in grads))
    want, want_grads = run("reference", widened(call), wide)
    found, found_grads = run("persistent", call, grads)
    one_step = tolerance(dtype) if bound is None else bound
    allowed = one_step * steps**0.5
    pairs = [
        ("output", found.output_TBO, want.output_TBO, allowed),
        ("h_n", found.h_n_DBR, want.h_n_DBR, allowed),
        ("c_n", found.c_n_DBH, want.c_n_DBH, allowed),
        ("d_input", found_grads.input_TBI, want_grads.input_TBI, 2 * allowed),
        ("d_h0", found_grads.h0_DBR, want_grads.h0_DBR, 2 * allowed),
        ("d_c0", found_grads.c0_DBH, want_grads.c0_DBH, 2 * allowed),
    ]
    pairs += [
        (f"weight {i}", f, w, 2 * allowed)
        for i, (f, w) in enumerate(zip(found_grads.weights, want_grads.weights, strict=True))
    ]
    for what, a, b, limit in pairs:
        assert (a is None) == (b is None), what
        if a is not None and b is not None:
            assert_matches(a, b, limit, what)
    device.failure_flag().check()
