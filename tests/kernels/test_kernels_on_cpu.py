"""The persistent kernels themselves, from their sources, run on a CPU against the definition.

Every thread of a launch is a thread here (`support/on_cpu`): what blocks wait for, where they read
and how lanes share work is as on a GPU. Its memory order and its rounding are not.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ecornn.backends import persistent_calls
from ecornn.backends.overlap import backward_schedule, forward_schedule
from ecornn.backends.pair_kernels import Pass
from ecornn.backends.persistent_pair import PlainPair
from ecornn.backends.persistent_plain import PlainLayer
from ecornn.backends.protocol import (
    BackwardRequest,
    CallGrads,
    LayerCall,
    ResultGrads,
    present,
)
from ecornn.backends.registry import by_name
from ecornn.kernels.persistent import gradients as small_gradients
from ecornn.kernels.persistent import shares, transposed
from ecornn.kernels.persistent.choose import Request
from ecornn.kernels.persistent.floor import FloorArguments
from ecornn.kernels.persistent.tile import POLLING, Geometry
from ecornn.kernels.reference import DirectionWeights
from support.kernel_cases import (
    BF16,
    FP32,
    STEPS,
    TF32_ERROR,
    Case,
    converted,
    multiplied_as,
    run,
)
from support.machine import Machine
from support.on_cpu import OnCpu, run_kernel, run_small, unavailable
from support.tolerances import assert_matches, tolerance

pytestmark = [
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
    # a thousand threads, which coverage would trace
    pytest.mark.no_cover,
]

CASES = (
    Case("lstm", BF16, 129, 9),
    Case("lstm", BF16, 24, 17, pieces=True),
    Case("gru", BF16, 64, 9, features=True),
    Case("gru", FP32, 24, 9, "L2 and clusters", pieces=True),
    Case("lstm", FP32, 129, 5, "L2 and clusters"),
    Case("lstm", FP32, 64, 5, directions=2, features=True),
    Case("rnn_tanh", BF16, 129, 1),
    Case("lstm", BF16, 85, 13, "cluster", features=True),
    Case("gru", FP32, 24, 3, "one block"),
    Case("lstm", FP32, 64, 9, numbers="tf32"),
    Case("gru", FP32, 24, 3, "cluster", numbers="tf32"),
    # sequences repeated, so that all lanes have work: every cell, both widths, a last group that is
    # not full, units that end inside a warp's, several items of a thread
    Case("lstm", BF16, 64, 3, "one block", width=1),
    Case("lstm", BF16, 60, 3, "one block", width=2, directions=2, features=True),
    Case("gru", FP32, 24, 3, "one block", width=2, features=True, pieces=True),
    Case("rnn_tanh", BF16, 40, 2, "one block", width=1, features=True),
    Case("rnn_relu", FP32, 33, 3, "one block", width=2),
    Case("lstm", FP32, 64, 1, "one block", width=1, numbers="tf32"),
    Case("gru", BF16, 85, 3, "cluster", width=2, features=True),
    # whole rows of several tiles in registers
    Case("lstm", BF16, 64, 13, "one block"),
    # four tiles abreast, several chunks of each at once, and the last tile not full
    Case("gru", BF16, 64, 29, directions=2, features=True, at_once=8),
    # so many weights in registers that shares are read late
    Case("lstm", FP32, 128, 5, numbers="tf32", buffers=1),
    # gates' gradients that every reader rounds
    Case("gru", FP32, 64, 9, numbers="tf32", rounded=False),
    # weights partly in shared memory, from the middle of a row of tiles on
    Case("lstm", BF16, 128, 5, in_registers=1),
    Case("gru", FP32, 64, 9, in_registers=3, numbers="tf32"),
    Case("lstm", BF16, 128, 5, in_registers=7),
    # every way to wait, of several pieces: sizes that end inside a tile, tiles abreast
    Case("lstm", BF16, 24, 17, polling="all"),
    Case("lstm", BF16, 24, 17, polling="all delayed"),
    Case("gru", BF16, 64, 9, polling="all", features=True),
    Case("gru", FP32, 24, 9, "L2 and clusters", polling="all delayed", numbers="tf32"),
    # marks asked for ahead, both ways, as far as there are any
    Case("lstm", BF16, 24, 17, marks_ahead=4),
    Case("gru", FP32, 24, 9, "L2 and clusters", directions=2, marks_ahead=3),
    # weights that pass through shared memory, not all at once: every regime, whole vectors and not,
    # some that stay there
    Case("lstm", BF16, 64, 13, "one block", staged=True),
    Case("lstm", BF16, 60, 3, "one block", width=2, directions=2, staged=True),
    Case("gru", FP32, 24, 3, "one block", width=2, pieces=True, staged=True),
    Case("lstm", BF16, 85, 13, "cluster", features=True, staged=True),
    Case("rnn_tanh", FP32, 85, 2, "cluster", numbers="ieee", width=2, staged=True),
    Case("gru", FP32, 24, 9, "L2 and clusters", numbers="tf32", staged=True),
    Case("lstm", BF16, 128, 5, in_registers=7, staged=True),
    Case("gru", FP32, 64, 9, in_registers=3, numbers="tf32", staged=True),
    # on the ordinary units: every cell, regime and width, of which all but 8 leave columns out
    Case("lstm", FP32, 129, 2, "L2 and clusters", width=2, numbers="ieee"),
    Case("gru", FP32, 24, 9, "L2 and clusters", features=True, numbers="ieee"),
    Case("gru", FP32, 24, 9, directions=2, pieces=True, numbers="ieee"),
    Case("gru", FP32, 60, 3, width=4, numbers="ieee"),
    Case("rnn_tanh", FP32, 85, 2, "cluster", width=2, numbers="ieee"),
    Case("lstm", FP32, 60, 1, width=1, numbers="ieee"),
    Case("rnn_relu", FP32, 33, 1, width=1, features=True, numbers="ieee"),
    Case("lstm", FP32, 40, 9, "one block", numbers="ieee"),
    Case("gru", FP32, 24, 3, "one block", width=2, features=True, numbers="ieee"),
    Case("lstm", FP32, 40, 3, "one block", width=1, directions=2, numbers="ieee"),
    # as scaled float16: every regime, both cells that have it, rows that are no whole vectors of
    # float16 or of float32, steps that show their states late, what is exchanged beside the output
    Case("lstm", FP32, 129, 9, numbers="scaled"),
    Case("lstm", FP32, 24, 17, directions=2, pieces=True, numbers="scaled"),
    Case("lstm", FP32, 28, 9, features=True, numbers="scaled", polling="all delayed"),
    Case("rnn_tanh", FP32, 96, 9, "L2 and clusters", numbers="scaled", marks_ahead=3),
    Case("lstm", FP32, 85, 13, "cluster", features=True, numbers="scaled"),
    Case("rnn_tanh", FP32, 129, 2, "cluster", numbers="scaled"),
    Case("lstm", FP32, 64, 13, "one block", numbers="scaled"),
    Case("lstm", FP32, 60, 3, "one block", width=2, directions=2, features=True, numbers="scaled"),
    Case("lstm", FP32, 64, 1, "one block", width=1, pieces=True, numbers="scaled"),
    Case("lstm", FP32, 128, 5, in_registers=1, numbers="scaled"),
    Case("gru", FP32, 64, 9, features=True, numbers="scaled"),
    Case("gru", FP32, 85, 3, "cluster", numbers="scaled"),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layer_is_the_definition_s(
    case: Case, machine: Machine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[OnCpu] = []

    def launcher(geometry: Geometry, _device: Any) -> OnCpu:
        made.append(OnCpu(geometry, folder))
        return made[-1]

    monkeypatch.setattr(persistent_calls, "geometry", case.geometry)
    monkeypatch.setattr(persistent_calls, "launcher", launcher)
    monkeypatch.setattr(persistent_calls, "SMALL_BYTES", 1 if case.pieces else 1 << 30)
    multiplied_as(monkeypatch, case.numbers)
    call = case.call()
    shape = (STEPS, case.batch, case.directions * case.hidden)
    state = (case.directions, case.batch, case.hidden)
    generator = torch.Generator().manual_seed(4)
    draws = [
        torch.randn(size, generator=generator).to(case.dtype) for size in (shape, state, state)
    ]
    grads = ResultGrads(*(*draws[:2], draws[2] if case.cell == "lstm" else None, None))
    found, found_grads = run("persistent", call, grads)
    wide = ResultGrads(*(None if g is None else g.double() for g in grads))
    want, want_grads = run("reference", converted(call, torch.float64), wide)
    bound = 2 * tolerance(case.dtype, STEPS)
    if case.numbers in ("tf32", "scaled"):
        bound = 2 * TF32_ERROR * STEPS**0.5
    pairs = [
        *zip(found[:3], want[:3], strict=True),
        (found_grads.input_TBI, want_grads.input_TBI),
        (found_grads.h0_DBR, want_grads.h0_DBR),
        (found_grads.c0_DBH, want_grads.c0_DBH),
        *zip(found_grads.weights, want_grads.weights, strict=True),
    ]
    for one, other in pairs:
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert_matches(one, other, bound)
    assert len(made) >= 2
    assert not any(launcher.failed for launcher in made)


@pytest.mark.parametrize(
    "case",
    [
        Case("lstm", BF16, 64, 13, "one block"),
        # writes a step's when the next one is under way
        Case("lstm", BF16, 64, 3, "one block", width=1),
        Case("lstm", FP32, 24, 5, "cluster"),
    ],
    ids=str,
)
def test_gates_have_their_gradients_in_their_place(
    case: Case, machine: Machine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_place: list[bool] = []

    class Noting(OnCpu):
        def __call__(self, arguments: Any, stream: Any = None, *, early: bool = False) -> None:
            if self.geometry.tile.kernel == "backward":
                in_place.append(arguments.gates[0] == arguments.d_gates[0])
            super().__call__(arguments, stream, early=early)

    monkeypatch.setattr(persistent_calls, "geometry", case.geometry)
    monkeypatch.setattr(persistent_calls, "launcher", lambda g, _: Noting(g, folder))
    monkeypatch.setattr(shares, "MOST_WORK", {2: 0, 4: 0})
    monkeypatch.setattr(small_gradients, "MOST_WORK", {2: 0, 4: 0})
    multiplied_as(monkeypatch, case.numbers)
    call = replace(case.call(), keep="states")
    generator = torch.Generator().manual_seed(6)
    d_output = torch.randn(STEPS, case.batch, case.hidden, generator=generator).to(case.dtype)
    want, want_grads = run("persistent", call, ResultGrads(d_output, None, None, None))
    layer, weights = PlainLayer(call), tuple(call.flat_weights())
    inputs = (call.input_TBI, call.h0_DBR, call.c0_DBH)
    found = layer.forward(*inputs, weights)
    grads = layer.backward(
        (d_output, None, None),
        (*inputs, weights),
        [found.output_TBO, found.cells_TBE, found.kept],
        needs_input=True,
        needs_states=True,
    )
    assert in_place == [False, True]
    pairs = [(found.output_TBO, want.output_TBO)]
    pairs += zip([*grads[:3], *grads.weights], [*want_grads[:3], *want_grads.weights], strict=True)
    for one, other in pairs:
        assert_matches(one, other.double(), tolerance(case.dtype, STEPS))


@pytest.mark.parametrize(
    "case",
    [
        Case("lstm", BF16, 24, 5),
        Case("gru", FP32, 24, 3, "cluster"),
        Case("rnn_tanh", BF16, 64, 9),
        Case("lstm", FP32, 24, 5, "cluster"),
        Case("lstm", FP32, 24, 5, numbers="scaled"),
    ],
    ids=str,
)
def test_two_layers_at_once_are_the_definition_s(
    case: Case, machine: Machine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In three pieces forwards and two backwards, which go on with what the one before left."""
    monkeypatch.setattr(shares, "MOST_WORK", {2: 0, 4: 0})
    scaled = case.numbers == "scaled"
    first = replace(case.call(), keep="states" if case.cell == "rnn_tanh" else "gates")
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(case.dtype)

    rows, state = first.weights[0].w_ih.shape[0], (2, case.batch, case.hidden)
    second = DirectionWeights(
        *(draw(rows, case.hidden, scale=case.hidden**-0.5) for _ in range(2)),
        draw(rows),
        draw(rows),
    )
    h0, c0 = draw(*state), draw(*state) if case.cell == "lstm" else None
    made: list[OnCpu] = []

    def run_of(kernel: str, schedule: Any, count: int) -> Pass:
        numbers = "bf16" if case.dtype == BF16 else "tf32" if scaled else "tf32x3"
        ask = Request(kernel, case.cell, numbers, *state[:0:-1])
        found = case.geometry(ask, None)
        assert found is not None
        made.append(OnCpu(found, folder))
        return Pass(made[-1], schedule, (STEPS, case.batch, case.hidden), count)  # type: ignore[arg-type]

    passes = (run_of("forward", forward_schedule, 3), run_of("backward", backward_schedule, 2))
    pair = PlainPair(first, present(second), *passes)
    weights = [*first.flat_weights(), *present(second)]
    found = pair.forward(first.input_TBI, h0, c0, weights)
    grads = [draw(STEPS, *state[1:]), draw(*state), None if c0 is None else draw(*state)]
    left = (found.between_TBR, found.output_TBR, found.cells_STBH, found.kept)
    given = (first.input_TBI, h0, c0, weights)
    back = pair.backward(tuple(grads), given, left, needs_input=True, needs_states=True)  # type: ignore[arg-type]
    assert not any(launcher.failed for launcher in made)

    want, want_grads = stacked(
        converted(first, torch.float64),
        second.to(torch.float64),
        *doubled([h0, c0]),
        doubled(grads),
    )
    pairs = zip([*found[:3], *back[:3], *back.weights], [*want, *want_grads], strict=True)
    for one, other in pairs:
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            bound = TF32_ERROR * STEPS**0.5 if scaled else tolerance(case.dtype, STEPS)
            assert_matches(one, other, 4 * bound)


def doubled(values: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if v is None else v.double() for v in values]


def stacked(
    first: LayerCall,
    second: DirectionWeights,
    h0: Any,
    c0: Any,
    grads: list[Tensor | None],
) -> tuple[list[Any], list[Any]]:
    """(output, h_n, c_n) of two layers by the definition, and the gradients of their input, states
    and weights."""

    def own(states: Tensor | None, layer: int) -> Any:
        return None if states is None else states[layer : layer + 1]

    def joined(*states: Tensor | None) -> Tensor | None:
        return None if states[0] is None else torch.cat(states)  # type: ignore[arg-type]

    calls = [replace(first, h0_DBR=own(h0, 0), c0_DBH=own(c0, 0), keep="states")]
    results = [by_name("reference").forward(calls[0])]
    states = {"h0_DBR": own(h0, 1), "c0_DBH": own(c0, 1)}
    calls.append(replace(calls[0], input_TBI=results[0].output_TBO, weights=(second,), **states))
    results.append(by_name("reference").forward(calls[1]))
    d_output, d_h_n, d_c_n = grads
    back: list[CallGrads] = []
    for layer in (1, 0):
        arrived = ResultGrads(d_output, own(d_h_n, layer), own(d_c_n, layer), None)
        found = by_name("reference").backward(
            calls[layer], results[layer], arrived, BackwardRequest()
        )
        back.insert(0, found)
        d_output = found.input_TBI
    left = [joined(*parts) for parts in zip(*(r[1:3] for r in results), strict=True)]
    d_states = [joined(*parts) for parts in zip(*(b[1:3] for b in back), strict=True)]
    d_weights = [*back[0].weights, *back[1].weights]
    return [results[1].output_TBO, *left], [d_output, *d_states, *d_weights]


#: Left and right tiles that end inside one, in all three dimensions.
ROWS, INPUTS, UNITS = 70, 37, 20


@pytest.mark.parametrize("numbers", ["tf32x3", "ieee"])
def test_the_shares_of_small_layers(numbers: str, folder: Path) -> None:
    generator = torch.Generator().manual_seed(6)
    x, w = (torch.randn(n, INPUTS, generator=generator) for n in (ROWS, 4 * UNITS))
    found = torch.full((ROWS, 4 * UNITS), float("nan"))
    places = [t.data_ptr() for t in (x, w, found)]
    arguments = shares.ShareArguments(*places, ROWS, 4 * UNITS, INPUTS, 0)
    blocks = shares.share_blocks(ROWS, 4 * UNITS)
    run_small(shares.ShareTile(numbers), arguments, blocks, folder)
    assert_matches(found, x.double() @ w.double().T, tolerance(FP32))


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (64, 128), (70, 37), (3, 200)])
def test_a_matrix_column_by_column(rows: int, columns: int, folder: Path) -> None:
    """Of a part of each row, to a part of each row."""
    whole = torch.randn(rows, columns + 5, generator=torch.Generator().manual_seed(8))
    values, found = whole[:, 2 : 2 + columns], torch.full((columns, rows + 3), float("nan"))
    arguments = transposed.transpose_arguments(values, found[:, 1 : 1 + rows])
    blocks = transposed.transpose_blocks(rows, columns)
    run_small(transposed.TransposeTile(), arguments, blocks, folder)
    assert torch.equal(found[:, 1 : 1 + rows], values.t())
    assert found[:, [0, -2, -1]].isnan().all(), "nothing beside it is written"


@pytest.mark.parametrize("numbers", ["tf32x3", "ieee"])
def test_the_gradients_of_small_layers(numbers: str, folder: Path) -> None:
    batch, generator = 7, torch.Generator().manual_seed(7)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    d_gates, x, output = draw(ROWS, 4 * UNITS), draw(ROWS, INPUTS), draw(ROWS, UNITS)
    h0, w_ih = draw(batch, UNITS), draw(4 * UNITS, INPUTS)
    shapes = ((ROWS, INPUTS), (4 * UNITS, INPUTS), (4 * UNITS, UNITS), (4 * UNITS,), (4 * UNITS,))
    found = [torch.full(shape, float("nan")) for shape in shapes]
    places = [t.data_ptr() for t in (d_gates, x, output, h0, w_ih, *found)]
    sizes = (ROWS, batch, UNITS, INPUTS, UNITS, 0, 0)
    blocks = small_gradients.blocks("lstm", ROWS, UNITS, INPUTS, 1, needs_input=True)
    tile = small_gradients.GradientTile("lstm", numbers, 1)
    run_small(tile, small_gradients.GradientArguments(*places, *sizes), blocks, folder)
    wide = d_gates.double()
    before = torch.cat([h0, output[:-batch]]).double()
    sums = wide.sum(0)
    want = [wide @ w_ih.double(), wide.T @ x.double(), wide.T @ before, sums, sums]
    for one, other in zip(found, want, strict=True):
        assert_matches(one, other, tolerance(FP32))


@pytest.mark.parametrize("polling", POLLING)
def test_a_block_that_never_runs_is_given_up(
    polling: str, machine: Machine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, made = Case("gru", BF16, 24, 17, polling=polling), []

    def launcher(geometry: Geometry, _device: Any) -> OnCpu:
        made.append(OnCpu(geometry, folder, missing=1))
        return made[-1]

    monkeypatch.setattr(persistent_calls, "geometry", case.geometry)
    monkeypatch.setattr(persistent_calls, "launcher", launcher)
    by_name("persistent").forward(case.call())
    assert [launcher.failed for launcher in made] == [1]


@pytest.mark.parametrize(
    "case", [Case("rnn_tanh", BF16, 96, 9), Case("gru", FP32, 24, 3, "cluster")], ids=str
)
def test_the_floor_hands_on_the_states_of_every_step(case: Case, folder: Path) -> None:
    """Whoever read what was not published yet would fold its marks into what it hands on."""
    numbers = "bf16" if case.dtype == BF16 else case.numbers
    found = case.geometry(Request("forward", case.cell, numbers, case.hidden, case.batch), 0)
    assert found is not None
    several = found.tile.chunks * found.tile.batch_tiles > found.tile.at_once
    assert several or not found.tile.grid, "pieces that are asked for ahead"
    states_TBH = torch.full((STEPS, case.batch, case.hidden), -1.0, dtype=case.dtype)
    bits_TBH = states_TBH.view(torch.int32 if case.dtype == FP32 else torch.int16)
    bits_TBH.fill_(-1)
    seen = torch.full((found.all_blocks,), -1, dtype=torch.int32)
    gave_up, a = ctypes.c_int(0), FloorArguments()
    a.exchange, a.seen, a.failed = states_TBH.data_ptr(), seen.data_ptr(), ctypes.addressof(gave_up)
    a.steps, a.batch, a.hidden, a.group_batch = STEPS, case.batch, case.hidden, found.group_batch
    inside = (a.exchange, a.exchange + states_TBH.nbytes, 0, 0)
    floor = replace(found.tile, kernel="exchange_floor")
    grid = (found.blocks, found.groups, found.directions)
    outside = run_kernel(floor, folder, a, grid, exchanged=inside)
    assert (outside, gave_up.value) == (0, 0)
    assert (seen == 0).all()
    if found.tile.grid:
        assert all((bits_TBH[step] == step).all() for step in range(STEPS))
