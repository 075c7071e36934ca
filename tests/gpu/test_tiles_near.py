"""Tiles near those that were measured: the same weights, kept elsewhere, are multiplied in the same
order, so that every result is the same to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from ecornn.backends import persistent_calls
from ecornn.backends.protocol import CallGrads, LayerResult
from ecornn.kernels.persistent import device
from ecornn.kernels.persistent.choose import Request, candidates
from ecornn.kernels.persistent.tile import Geometry
from ecornn.kernels.persistent.tune import register_ways, staging_ways
from support.persistent_calls import arriving, assert_like_the_definition, make_call, run

pytestmark = pytest.mark.gpu


def most_in_registers(geometry: Geometry) -> Geometry:
    ways = register_ways(geometry, "sm_90a")
    return ways[-1] if ways else geometry


def staged(geometry: Geometry) -> Geometry:
    ways = staging_ways(geometry)  # none of scaled numbers
    return ways[0] if ways else geometry


def changed(change: Callable[[Geometry], Geometry], monkeypatch: pytest.MonkeyPatch) -> set[bool]:
    """Every tile that is asked for from here on; whether some were others than those known."""
    others: set[bool] = set()

    def geometry(ask: Request, index: int) -> Geometry | None:
        known = device.geometry(ask, index)
        if known is None:
            return None
        found = change(known)
        others.add(found != known)
        return found

    monkeypatch.setattr(persistent_calls, "geometry", geometry)
    monkeypatch.setattr(persistent_calls, "_LAUNCHES", {})
    return others


def every_result(result: LayerResult, grads: CallGrads) -> list[torch.Tensor]:
    found = [*result[:3], grads.input_TBI, grads.h0_DBR, grads.c0_DBH, *grads.weights]
    return [one for one in found if one is not None]


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="tiles were measured for compute capability 9.0",
)
@pytest.mark.parametrize(
    ("dtype", "hidden", "batch", "change"),
    [
        (torch.float32, 1024, 4, most_in_registers),
        (torch.float32, 1024, 64, most_in_registers),
        (torch.bfloat16, 2048, 1, most_in_registers),
        (torch.float16, 2048, 16, most_in_registers),
        (torch.bfloat16, 1024, 64, most_in_registers),
        # every regime, whole vectors and not
        (torch.float32, 64, 4, staged),
        (torch.bfloat16, 129, 3, staged),
        (torch.float32, 256, 16, staged),
        (torch.float16, 500, 5, staged),
        (torch.float32, 1024, 4, staged),
        (torch.bfloat16, 2048, 1, staged),
        (torch.bfloat16, 1024, 64, staged),
    ],
    ids=lambda given: getattr(given, "__name__", str(given)),
)
def test_results_are_the_same_to_the_bit(
    dtype: torch.dtype,
    hidden: int,
    batch: int,
    change: Callable[[Geometry], Geometry],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = make_call("lstm", dtype, hidden, batch, 12, inputs=hidden)
    grads = arriving(call)
    want = every_result(*run("persistent", call, grads))
    others = changed(change, monkeypatch)
    found = every_result(*run("persistent", call, grads))
    assert True in others, "no tile was another one"
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    device.failure_flag().check()


@pytest.mark.parametrize("kernel", ["forward", "backward"])
def test_weights_from_the_middle_of_a_row_of_tiles_on_in_shared_memory(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a small layer, which would have all of them in registers."""

    def fewer(ask: Request, index: int) -> Geometry:
        every = candidates(ask, device.chip(index))
        found = next(g for g in every if g.tile.grid and g.tile.chunks > 2)
        tile = found.tile
        rows, chunks = divmod(tile.in_registers - (ask.kernel == kernel), tile.chunks)
        return replace(found, tile=replace(tile, register_tiles=rows, register_chunks=chunks))

    monkeypatch.setattr(persistent_calls, "geometry", fewer)
    monkeypatch.setattr(persistent_calls, "_LAUNCHES", {})
    assert_like_the_definition(make_call("lstm", torch.bfloat16, 384, 5, 9))
