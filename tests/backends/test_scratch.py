"""The persistent backend takes what it says that it takes. Its launches do nothing here: what is
allocated around them is the same on any device."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ecornn.backends import (
    persistent_backward,
    persistent_calls,
    persistent_forward,
    persistent_products,
    persistent_scratch,
)
from ecornn.backends.persistent_scratch import scratch_of
from ecornn.backends.protocol import BackwardRequest, LayerCall, LayerResult, ResultGrads
from ecornn.bench.training.memory import allocated_peak
from ecornn.echo.replay import Ledger
from ecornn.kernels.persistent.choose import Request, candidates
from ecornn.kernels.persistent.tile import Geometry
from ecornn.ops.recurrence import read_call, recurrence, recurrence_backward
from ecornn.ops.scratch import scratch_bytes
from ecornn.spec import GATES, weight_layout
from support.chips import HOPPER
from support.machine import transpose_all

STEPS, BATCH, INPUTS = 120, 16, 24


@pytest.fixture
def _without_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (persistent_forward, persistent_backward):
        monkeypatch.setattr(module, "launches", lambda name, call: [])
        monkeypatch.setattr(module, "run", lambda every, arguments: None)
    # which launches, and is for small layers alone
    monkeypatch.setattr(persistent_backward.AtOnce, "serves", lambda *_: False)
    # so that small sizes are cut into pieces as large ones are
    monkeypatch.setattr(persistent_calls, "SMALL_BYTES", 1 << 16)


def arguments(cell: str, keep: str, directions: int, hidden: int, backend: str) -> tuple[Any, ...]:
    rows = GATES[cell] * hidden
    weights = []
    for _ in range(directions):
        weights += [torch.randn(rows, INPUTS), torch.randn(rows, hidden)]
        weights += [torch.randn(rows), torch.randn(rows)]
    x = torch.randn(STEPS, BATCH, INPUTS)
    h0 = torch.zeros(directions, BATCH, hidden)
    layout = weight_layout(cell, bias=True, projection=False, layer_norm=False)
    c0 = h0.clone() if cell == "lstm" else None
    nothing = (None,) * 4
    return (x, h0, c0, weights, *nothing, cell, layout, "zero", "zeros", False, backend, keep)


def results_of(call: LayerCall, result: LayerResult) -> int:
    made = [result.output_TBO, result.h_n_DBR, result.c_n_DBH, result.cells_TBE, *result.kept]
    return sum(one.nbytes for one in made if one is not None)


@pytest.mark.usefixtures("_without_launches")
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("keep", ["states", "gates"])
@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh"])
def test_what_is_taken_is_what_is_said(cell: str, keep: str, directions: int) -> None:
    call = read_call(*arguments(cell, keep, directions, 64, "persistent"))
    said = scratch_of(call)
    made: list[Any] = []
    peak = allocated_peak(lambda: made.append(persistent_forward.forward(call)))
    found = peak - results_of(call, made[0])
    assert found == pytest.approx(said.forward, rel=0.02, abs=40_000)
    grads = ResultGrads(torch.randn_like(made[0].output_TBO), None, None, None)
    given = (call, made[0], grads, BackwardRequest())
    peak = allocated_peak(lambda: made.append(persistent_backward.backward(*given)))
    gradients = [made[1].input_TBI, made[1].h0_DBR, made[1].c0_DBH, *made[1].weights]
    of_gradients = sum(one.nbytes for one in gradients if one is not None)
    found, said_beside = peak - of_gradients, said.beside(of_gradients)
    assert found == pytest.approx(said_beside, rel=0.05, abs=40_000)


@pytest.mark.usefixtures("_without_launches")
@pytest.mark.parametrize("inputs", [24, 200])
@pytest.mark.parametrize("keep", ["states", "gates"])
def test_factors_that_are_stored_by_columns_are_counted(
    keep: str, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In five pieces, and in one."""
    monkeypatch.setattr(f"{__name__}.INPUTS", inputs)
    call = read_call(*arguments("lstm", keep, 1, 64, "persistent"))
    without = scratch_of(call)
    transpose_all(monkeypatch)
    monkeypatch.setattr(persistent_products, "transpose_launcher", lambda _: lambda *_: None)
    said = scratch_of(call)
    assert said.backward > without.backward
    result = persistent_forward.forward(call)
    grads = ResultGrads(torch.randn_like(result.output_TBO), None, None, None)
    made: list[Any] = []
    given = (call, result, grads, BackwardRequest())
    peak = allocated_peak(lambda: made.append(persistent_backward.backward(*given)))
    gradients = [made[0].input_TBI, made[0].h0_DBR, made[0].c0_DBH, *made[0].weights]
    of_gradients = sum(one.nbytes for one in gradients if one is not None)
    found, said_beside = peak - of_gradients, said.beside(of_gradients)
    assert found == pytest.approx(said_beside, rel=0.1, abs=40_000)


def test_sizes_that_are_padded_are_exchanged_elsewhere() -> None:
    whole, padded = (
        scratch_of(read_call(*arguments("lstm", "states", 1, hidden, "persistent")))
        for hidden in (64, 63)
    )
    assert padded.forward > whole.forward * 63 / 64 + STEPS * BATCH * 64 * 4 - 4096
    assert padded.before_gradients > whole.before_gradients


@pytest.fixture
def _an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent_scratch, "unavailable", lambda: None)
    monkeypatch.setattr(persistent_scratch, "chip", lambda index: HOPPER)


@pytest.mark.usefixtures("_without_launches", "_an_h200")
@pytest.mark.parametrize("grid", [False, True], ids=["cluster", "L2"])
def test_what_is_exchanged_beside_the_output_is_counted(
    grid: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = candidates(Request("forward", "lstm", "scaled", 136, BATCH), HOPPER)
    tile = next(geometry for geometry in found if geometry.tile.grid is grid)
    launch = persistent_calls.Launch(SimpleNamespace(geometry=tile), 0, BATCH, 0)  # type: ignore[arg-type]
    monkeypatch.setattr(persistent_forward, "launches", lambda name, call: [launch])
    call = read_call(*arguments("lstm", "gates", 1, 136, "persistent"))
    without = scratch_of(call).forward
    monkeypatch.setattr(persistent_scratch, "measured", lambda ask: tile)
    assert scratch_of(call).forward - without == (STEPS * BATCH * 136 * 2 if grid else 0)
    made: list[LayerResult] = []
    peak = allocated_peak(lambda: made.append(persistent_forward.forward(call)))
    taken = peak - results_of(call, made[0])
    assert taken == pytest.approx(scratch_of(call).forward, rel=0.02, abs=40_000)


@pytest.mark.usefixtures("_an_h200")
@pytest.mark.parametrize(
    ("batch", "directions", "halves"),
    [
        (64, 1, True),
        (128, 1, True),  # in two launches of what was measured
        (100, 1, False),  # of 50 each, which was not
        (32, 1, False),
    ],
)
def test_what_launches_of_a_part_exchange_is_counted(
    batch: int, directions: int, halves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the whole batch does not fit: of 1,024 units in TF32 not even 64 sequences would, but
    for what was measured."""
    request = Request("forward", "lstm", "scaled", 1024, 64)
    scaled = next(g for g in candidates(request, HOPPER) if g.tile.grid)
    asked: list[Request] = []

    def measured(ask: Request) -> Geometry | None:
        asked.append(ask)
        return scaled if (ask.hidden, ask.batch) == (1024, 64) else None

    monkeypatch.setattr(persistent_scratch, "measured", measured)
    call = read_call(*arguments("lstm", "gates", directions, 1024, "persistent"))
    call = replace(call, input_TBI=torch.empty(4, batch, INPUTS, device="meta"))
    found = scratch_of(call).forward
    assert found == (4 * batch * 1024 * 2 if halves else 0)
    assert asked[0].batch == batch


@pytest.mark.parametrize("keep", ["states", "gates", "auto"])
def test_the_operators_are_counted_with_it(keep: str) -> None:
    given = arguments("lstm", keep, 1, 64, "persistent")
    said = scratch_of(read_call(*arguments("lstm", keep.replace("auto", "states"), 1, 64, "")))
    assert scratch_bytes(recurrence._opoverload, given) == said.forward
    backward = (None,) * 4 + (given[0], given[0], [], True, 1, *given)
    gradients = sum(one.nbytes for one in (given[0], *given[3]))
    assert scratch_bytes(recurrence_backward._opoverload, backward) == said.beside(gradients)
    assert scratch_bytes(torch.ops.aten.mm.default, given) == 0
    ledger = Ledger("cpu")
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, given)
        with ledger:
            results = recurrence._opoverload(*fakes)
    leaves = [one for one in torch.utils._pytree.tree_leaves(results) if one.numel()]
    assert ledger.most == sum(one.nbytes for one in leaves) + said.forward


@pytest.mark.parametrize(("keep", "pieces"), [("none", 1), ("states", 2), ("gates", 1)])
def test_without_a_backward_pass_more_is_made_in_one_piece(keep: str, pieces: int) -> None:
    """Of 64 MiB: each piece is a launch, which reads the weights anew."""
    call = replace(
        read_call(*arguments("lstm", keep, 1, 64, "persistent")),
        input_TBI=torch.empty(256, 16, 8, dtype=torch.bfloat16, device="meta"),
        h0_DBR=torch.empty(1, 16, 2048, dtype=torch.bfloat16, device="meta"),
    )
    assert len(persistent_forward.forward_pieces(call)) == pieces
    longer = torch.empty(257, 16, 8, dtype=torch.bfloat16, device="meta")
    found = persistent_forward.forward_pieces(replace(call, input_TBI=longer))
    assert len(found) == (1 if keep == "gates" else 2)
