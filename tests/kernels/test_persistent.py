"""Persistent kernels without a GPU: every tile compiles for every architecture, the model's choices
are sound, and the host's reckoning agrees with the compiler's."""

from __future__ import annotations

import ctypes
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from ecornn.backends.persistent_calls import Piece, pieces
from ecornn.kernels.jit import CompileError, Variant, build
from ecornn.kernels.jit.key import SOURCES
from ecornn.kernels.jit.resources import resources
from ecornn.kernels.losses import CrossEntropyArguments
from ecornn.kernels.persistent import device
from ecornn.kernels.persistent.arguments import BackwardArguments, ForwardArguments
from ecornn.kernels.persistent.choose import (
    Request,
    candidates,
    measured,
    ranked,
    registers,
)
from ecornn.kernels.persistent.floor import FloorArguments
from ecornn.kernels.persistent.gradients import MOST_UNITS, SPLIT, GradientArguments, is_small
from ecornn.kernels.persistent.model import WITHOUT_WAITS, describe, estimate, explain, terms
from ecornn.kernels.persistent.shares import ShareArguments
from ecornn.kernels.persistent.tables import remember, table
from ecornn.kernels.persistent.tile import CELLS, TILE_ROWS, Geometry
from ecornn.kernels.persistent.transposed import TransposeArguments
from ecornn.kernels.persistent.tune import entry
from ecornn.kernels.row_losses import RowLossArguments
from ecornn.spec import GATES
from support.chips import CHIPS, HOPPER, KERNELS, needs_compiler


@pytest.mark.parametrize(("batch", "width"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (9, 8)])
def test_ieee_leaves_out_columns_that_are_not_there(batch: int, width: int) -> None:
    """Where sums meet in shared memory; else columns that are left out are repeated."""
    found = list(candidates(Request("forward", "gru", "ieee", 256, batch), HOPPER))
    own = {g.tile.width for g in found if g.group_batch == batch and not g.tile.direct}
    assert own == {width}
    for numbers in ("tf32", "tf32x3"):
        other = candidates(Request("forward", "gru", numbers, 256, batch), HOPPER)
        assert {g.tile.width for g in other if not g.tile.direct} == {8}


def test_a_step_in_ieee_is_counted_by_its_units() -> None:
    """Its products take longer than a tensor core's, of more columns longer still."""
    fast = ranked(Request("forward", "lstm", "tf32", 512, 64), HOPPER)[0]
    slow = replace(fast, tile=replace(fast.tile, numbers="ieee"))
    assert estimate(slow, 512) > estimate(fast, 512)
    narrow, wide = (
        terms(replace(slow, tile=replace(slow.tile, width=width)), 512) for width in (1, 8)
    )
    name = "thousand cycles of ordinary units"
    assert 0 < narrow[name] < wide[name] / 4
    assert terms(fast, 512)[name] == 0 < terms(fast, 512)["products"]
    assert wide["products"] == 0
    told = explain(slow, 512)
    assert "forward lstm ieee:" in told
    assert name in told


@pytest.mark.parametrize(
    ("hidden", "batch", "numbers"),
    [
        *((64, 2, "bf16"), (384, 5, "bf16"), (1024, 16, "bf16")),
        *((64, 2, "ieee"), (384, 5, "ieee"), (700, 12, "ieee")),
    ],
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_as_many_rows_as_fit_are_in_registers(
    kernel: str, hidden: int, batch: int, numbers: str
) -> None:
    """And where the estimate is close one less as well, if shared memory has room for it."""
    asked = Request(kernel, "lstm", numbers, hidden, batch)
    found = {replace(g.tile, partial_buffers=2) for g in candidates(asked, HOPPER)}
    assert any(tile.register_tiles < tile.row_tiles for tile in found)
    for tile in found:
        most = min(255, 65536 // tile.threads)
        assert registers(tile) <= most
        more, less = (replace(tile, register_tiles=tile.register_tiles + n) for n in (1, -1))
        if tile.register_tiles < tile.row_tiles and registers(more) <= most:
            assert more in found
            assert registers(more) > most - 24
        elif registers(tile) > most - 24 and tile.register_tiles > 1:
            room = replace(less, partial_buffers=1).shared_bytes <= HOPPER.shared_bytes
            assert (less in found) is room


ASKS = [
    Request(kernel, cell, numbers, hidden, batch, directions)
    for kernel in KERNELS
    for cell, numbers in (
        *(("lstm", "bf16"), ("gru", "tf32"), ("rnn_tanh", "fp16")),
        *(("rnn_relu", "ieee"),),
    )
    for hidden, batch in ((1, 1), (7, 3), (64, 64), (100, 5), (256, 16), (512, 33), (1024, 4))
    for directions in (1, 2)
]


@pytest.mark.parametrize("ask", ASKS, ids=str)
def test_every_candidate_covers_the_problem(ask: Request) -> None:
    found = list(candidates(ask, HOPPER))
    assert found
    for geometry in found:
        tile = geometry.tile
        assert tile.shared_bytes <= HOPPER.shared_bytes
        assert tile.threads <= 512
        assert geometry.covers(ask.hidden, ask.batch)
        assert geometry.blocks * tile.units >= ask.hidden
        assert geometry.blocks % tile.cluster == 0
        assert geometry.groups * geometry.group_batch >= ask.batch
        assert (geometry.groups - 1) * geometry.group_batch < ask.batch  # no idle group
        assert tile.sequences >= geometry.group_batch
        rows = tile.row_warps * tile.row_tiles * TILE_ROWS
        assert rows >= tile.outer * tile.units * tile.owners
        covered = tile.k_warps * tile.chunks * tile.owners * 64 // tile.exchanged_bytes
        assert covered >= tile.inner * ask.hidden
        if tile.grid:
            assert geometry.all_blocks <= HOPPER.multiprocessors


@pytest.mark.parametrize("ask", ASKS[::3], ids=str)
def test_the_choice_is_the_models_best_or_measured(ask: Request) -> None:
    found = ranked(ask, HOPPER)
    known = measured(ask)
    if known is not None:
        assert found[0] == known
        found = found[1:]
    costs = [estimate(g, ask.hidden) for g in found]
    assert costs == sorted(costs)


def test_what_was_measured_is_taken_for_both_half_precisions() -> None:
    for numbers in ("bf16", "fp16"):
        ask = Request("forward", "lstm", numbers, 1024, 16)
        known = measured(ask)
        assert known is not None
        assert ranked(ask, HOPPER)[0] == known
        assert known.tile.numbers == numbers
    # a chip that has no clusters cannot run what was measured with them
    ask = Request("forward", "lstm", "bf16", 256, 1)
    assert measured(ask).tile.cluster > 1  # type: ignore[union-attr]
    assert all(g.tile.cluster == 1 for g in ranked(ask, CHIPS["sm_80"]))


def test_what_was_measured_is_for_its_request() -> None:
    for known_entry in table().values():
        ask = known_entry["request"]
        half = ask["numbers"] == "half"
        known = measured(Request(**{**ask, "numbers": "fp16" if half else ask["numbers"]}))
        assert known is not None
        assert known.covers(ask["hidden"], ask["batch"]), ask


def test_what_was_measured_is_taken_whatever_the_estimate_of_registers_says() -> None:
    ask = Request("forward", "lstm", "tf32", 512, 64)
    known = measured(ask)
    assert known is not None
    assert known not in list(candidates(ask, HOPPER))
    assert ranked(ask, HOPPER)[0] == known
    assert known not in ranked(ask, replace(HOPPER, multiprocessors=known.all_blocks - 1))
    assert known not in ranked(ask, replace(HOPPER, shared_bytes=known.tile.shared_bytes - 1))


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_tiles": 1},
        {"row_tiles": 1, "register_tiles": 1},
        {"chunks": 1},
        {"units": 8},
        {"group_batch": 8},
        {"blocks": 16},
    ],
    ids=str,
)
def test_a_table_of_other_sizes_is_not_followed(
    changes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels would leave units or sequences out, or write beyond their memory."""
    monkeypatch.setenv("ECORNN_CACHE", str(tmp_path))
    ask = Request("forward", "lstm", "bf16", 2048, 16)
    known = measured(ask)
    assert known is not None
    wrong = entry(ask, known, 1.0)
    for name, value in changes.items():
        (wrong if name in wrong else wrong["tile"])[name] = value
    try:
        remember([wrong])
        assert measured(ask) != known
        assert measured(ask) not in ranked(ask, HOPPER)
    finally:
        table.cache_clear()


def test_what_cannot_fit_has_no_candidates() -> None:
    assert not list(candidates(Request("forward", "lstm", "bf16", 6000, 1), HOPPER))
    assert not list(candidates(Request("forward", "lstm", "tf32", 2048, 1), CHIPS["sm_89"]))


def test_the_floor_waits_by_the_loop_of_the_forward_pass() -> None:
    """One of its own asked for the next piece when it had the one before, and was too slow."""
    floor, multiply = (
        (SOURCES / name).read_text() for name in ("exchange_floor.cu", "multiply.cuh")
    )
    assert "product.each_published(from, " in floor
    assert "request(" not in floor
    assert "await(" not in floor
    body = multiply.split("void multiply_published(")[1].split("\n  }\n")[0]
    assert "each_published(from, " in body
    assert "request(" not in body


@needs_compiler
@pytest.mark.parametrize(("hidden", "batch"), [(64, 4), (256, 4), (1024, 4), (1024, 16)])
def test_the_floor_compiles_for_the_forward_tiles(hidden: int, batch: int) -> None:
    found = ranked(Request("forward", "lstm", "bf16", hidden, batch), HOPPER)[0].tile
    assert batch == 4 or found.chunks * found.batch_tiles > found.at_once, "several pieces"
    code = build(replace(found, kernel="exchange_floor").variant("sm_90a"))
    assert resources(code).frame_bytes == 0


def test_the_model_explains_itself() -> None:
    ask = Request("backward", "gru", "fp16", 700, 12, directions=2)
    geometry: Geometry = ranked(ask, HOPPER)[0]
    first, second = explain(geometry, ask.hidden).splitlines()
    assert first == describe(geometry)
    assert "2 directions" in first
    whole, summed = second.split(" us a step by the model: ")
    assert float(whole) == pytest.approx(estimate(geometry, ask.hidden), abs=0.005)
    costs = [float(part.split()[0]) for part in summed.split(" + ")]
    assert sum(costs) == pytest.approx(float(whole), abs=0.005 * len(costs) + 0.01)
    assert costs == sorted(costs, reverse=True)
    assert "start" in terms(geometry, ask.hidden)
    assert "start" in summed


def test_the_model_says_of_one_block_that_it_waits_for_little() -> None:
    ask = Request("forward", "lstm", "bf16", 64, 1)
    alone = next(g for g in ranked(ask, HOPPER) if g.tile.width < 8 and g.tile.cluster == 1)
    assert f"× {WITHOUT_WAITS}" in explain(alone, 64)


def _members(source: str, name: str) -> list[str]:
    """Names of a structure's members, in order, as the source declares them."""
    body = re.search(rf"struct {name} {{(.*?)\n}};", (SOURCES / source).read_text(), re.S)
    assert body is not None
    plain = re.sub(r"//[^\n]*", "", body[1])
    return re.findall(r"(\w+)(?:\[2\])?\s*[,;]", plain)


@pytest.mark.parametrize(
    ("source", "structure"),
    [
        ("forward.cu", ForwardArguments),
        ("backward.cu", BackwardArguments),
        ("exchange_floor.cu", FloorArguments),
        ("gradients.cu", GradientArguments),
        ("shares.cu", ShareArguments),
        ("transposed.cu", TransposeArguments),
        ("cross_entropy.cu", CrossEntropyArguments),
        ("row_losses.cu", RowLossArguments),
    ],
)
def test_arguments_are_those_of_the_source(source: str, structure: type[ctypes.Structure]) -> None:
    names = [field[0] for field in structure._fields_]
    assert names == _members(source, structure.__name__)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(("steps", "share"), [(1, 0.25), (7, 0.2), (256, 0.25), (256, 1.0)])
def test_pieces_cover_time_once(steps: int, share: float, descending: bool) -> None:
    for row_bytes in (1, 10 << 20, 90 << 20):
        found = pieces(steps, row_bytes, share)
        times = [t for piece in found for t in range(*piece.times(descending=descending))]
        assert sorted(times) == list(range(steps))
        assert [piece.last for piece in found] == [False] * (len(found) - 1) + [True]
        assert max(piece.steps for piece in found) == found[0].steps


def test_small_buffers_are_not_cut() -> None:
    assert len(pieces(256, 1 << 10, 0.25)) == 1
    assert len(pieces(256, 64 << 20, 0.25)) == 4
    # two buffers of 32 MiB are small, two of 128 are not
    assert len(pieces(256, 128 << 10, 0.2, 2)) == 1
    assert len(pieces(256, 512 << 10, 0.2, 2)) == 5
    assert Piece(0, 3, 9).times(descending=True) == (6, 9)


def test_rows_follow_the_gates() -> None:
    for cell in CELLS:
        tile = ranked(Request("forward", cell, "bf16", 64, 1), HOPPER)[0].tile
        assert (tile.outer, tile.inner) == (GATES[cell], 1)
        tile = ranked(Request("backward", cell, "bf16", 64, 1), HOPPER)[0].tile
        assert (tile.outer, tile.inner) == (1, GATES[cell])


def test_the_failure_flag_is_the_host_s_whatever_torch_s_default_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And where the first call of a layer is one on tensors without numbers."""

    def zeros(*shape: int, pin_memory: bool, **options: Any) -> Any:
        assert pin_memory
        return made(*shape, **options)

    made = torch.zeros
    with torch.device("meta"), FakeTensorMode():
        torch.ones(1)  # torch remembers then which functions make tensors: the true ones
        monkeypatch.setattr(torch, "zeros", zeros)  # no memory can be pinned without a GPU
        flag = device.FailureFlag()
    assert flag.address == flag.tensor.data_ptr() != 0
    flag.check()


def test_one_launch_for_gradients_is_for_small_layers() -> None:
    """And where fewer blocks share the sums over all steps, for smaller ones."""

    def small(rows: int, split: int, hidden: int = 64, inputs: int = 64) -> bool:
        return is_small("lstm", torch.bfloat16, rows, hidden, inputs, split=split)

    most = {s: max(r for r in range(0, 1 << 17, 256) if small(r, s)) for s in (1, SPLIT)}
    assert 0 < most[1] <= most[SPLIT] / SPLIT + 256
    assert not small(1, SPLIT, hidden=2 * MOST_UNITS)
    assert not small(1, SPLIT, inputs=2 * MOST_UNITS)


def test_kernels_of_several_requests_are_built_side_by_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each waits for the other here; one that fails is told of when it is asked for."""
    both = threading.Barrier(2, timeout=60)
    asks = [Request(name, "lstm", "tf32", 512, 128, 1, False) for name in ("forward", "backward")]

    def build(variant: Variant) -> bytes:
        both.wait()
        raise CompileError(str(variant))

    monkeypatch.setattr(device, "compiled", build)
    monkeypatch.setattr(device, "architecture", lambda index: "sm_90a")
    monkeypatch.setattr(device, "chip", lambda index: HOPPER)
    monkeypatch.setattr(device, "_FOUND", {})
    device.build_side_by_side(asks, 0)
    assert not both.broken
    device.build_side_by_side(asks[:1], 0)  # one by itself is left to whoever asks for it
    monkeypatch.setattr(device, "_FOUND", {(ask, 0): None for ask in asks})
    device.build_side_by_side(asks, 0)
    assert not both.broken
    assert both.n_waiting == 0
