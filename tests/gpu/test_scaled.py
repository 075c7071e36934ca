"""Float32 forwards as float16 times powers of two, on a GPU, wherever there is such a tile: whether
one was measured to be the fastest or not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ecornn.backends import persistent_calls
from ecornn.backends.registry import by_name
from ecornn.kernels.persistent import device
from ecornn.kernels.persistent.choose import Request, as_precise, ranked
from ecornn.kernels.persistent.launch import architecture, kernel
from ecornn.kernels.persistent.tile import Geometry
from support.persistent_calls import (
    arriving,
    assert_like_the_definition,
    make_call,
    run,
    widened,
)
from support.tolerances import ONE_STEP, assert_matches

pytestmark = pytest.mark.gpu

#: TF32 has half precision's eleven bits.
TF32_BOUND = ONE_STEP[torch.float16]


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> set[bool]:
    """Whether scaled tiles that ran exchanged through L2: every forward pass has one from here
    on."""
    found: set[bool] = set()

    def geometry(ask: Request, index: int) -> Geometry | None:
        if "scaled" not in as_precise(ask):
            return device.geometry(ask, index)
        for one in ranked(replace(ask, numbers="scaled"), device.chip(index)):
            needed = one.all_blocks if one.tile.grid else one.tile.cluster
            if kernel(one.tile, architecture(index)).blocks_at_once() >= needed:
                found.add(one.tile.grid)
                return one
        return None

    monkeypatch.setattr(persistent_calls, "geometry", geometry)
    monkeypatch.setattr(persistent_calls, "_LAUNCHES", {})
    return found


@pytest.mark.parametrize(
    ("cell", "hidden", "batch", "more"),
    [
        ("lstm", 64, 1, {}),
        ("lstm", 64, 16, {"directions": 2}),
        ("lstm", 129, 3, {}),
        ("lstm", 256, 4, {"keep": "gates"}),
        ("lstm", 500, 5, {"directions": 2}),
        ("lstm", 512, 64, {}),
        ("lstm", 1024, 4, {"keep": "gates"}),
        ("lstm", 1024, 64, {}),
        ("lstm", 1000, 16, {}),
        ("gru", 64, 3, {}),
        ("gru", 384, 9, {"directions": 2}),
        ("gru", 1024, 16, {}),
        ("rnn_tanh", 256, 5, {}),
        ("rnn_tanh", 1024, 33, {}),
    ],
    ids=str,
)
def test_results_and_gradients_are_the_definition_s(
    cell: str, hidden: int, batch: int, more: dict[str, Any], grids: set[bool]
) -> None:
    steps = 200 if hidden == 1024 else 33
    assert_like_the_definition(
        make_call(cell, torch.float32, hidden, batch, steps, **more), TF32_BOUND
    )
    assert grids


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh"])
@pytest.mark.parametrize("hidden", [96, 384, 1024])
def test_lengths_and_resets(cell: str, hidden: int, grids: set[bool]) -> None:
    generator = torch.Generator("cuda").manual_seed(3)
    lengths = torch.randint(0, 41, (9,), generator=generator, device="cuda")
    resets = torch.rand(40, 9, generator=generator, device="cuda") < 0.2
    more = {"lengths_B": lengths, "resets_TB": resets, "reset_to": "initial"}
    assert_like_the_definition(make_call(cell, torch.float32, hidden, 9, 40, **more), TF32_BOUND)
    assert grids


@pytest.mark.parametrize("hidden", [64, 256, 1024])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_initial_states_and_weights_may_be_large(cell: str, hidden: int, grids: set[bool]) -> None:
    """Of one unit, and of one sequence. Forwards: gradients are other kernels' affair."""
    call = make_call(cell, torch.float32, hidden, 3, 3)
    call.h0_DBR[:, 1, :8] *= 2.0**18
    call.weights[0].w_hh[:, 11] *= 2.0**12
    found = by_name("persistent").forward(call)
    want = by_name("reference").forward(widened(call))
    # what so large weights make of the rounding of states
    assert_matches(found.output_TBO, want.output_TBO, 8 * TF32_BOUND * 3**0.5)
    device.failure_flag().check()
    assert grids


@pytest.mark.parametrize("bits", [-1, 0x7FFFFFFF, -0x400000, 0x7F800000])
@pytest.mark.parametrize("hidden", [64, 256, 1024])
def test_what_is_no_number_stays_in_its_sequence(hidden: int, bits: int, grids: set[bool]) -> None:
    """The mark itself among them: what is published of a NaN must not look like it, or blocks would
    wait for it until they give up."""
    call = make_call("lstm", torch.float32, hidden, 3, 20)
    call.h0_DBR[0, 1, 5] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    found = by_name("persistent").forward(call).output_TBO
    want = by_name("reference").forward(widened(call)).output_TBO
    device.failure_flag().check()
    assert torch.equal(found[:, 1].isnan(), want[:, 1].isnan())
    assert_matches(found[:, [0, 2]], want[:, [0, 2]], TF32_BOUND * 20**0.5)
    assert grids


def test_the_same_bits_every_time_and_from_a_graph(grids: set[bool]) -> None:
    call = make_call("lstm", torch.float32, 1024, 16, 64)
    want, _ = run("persistent", call, arriving(call))
    again = by_name("persistent").forward(call)
    assert torch.equal(again.output_TBO, want.output_TBO)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = by_name("persistent").forward(call)
    captured.output_TBO.fill_(torch.nan)
    graph.replay()
    assert torch.equal(captured.output_TBO, want.output_TBO)
    device.failure_flag().check()
    assert grids == {True}
