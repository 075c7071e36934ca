"""Every kernel compiles for every architecture, without a GPU: one variant of each in every run,
the others when what they depend on has changed, or on their day (`support.compilations`)."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import pytest
import torch

from ecornn.kernels.jit import Variant
from ecornn.kernels.jit.key import SOURCES
from ecornn.kernels.losses import CrossEntropyTile
from ecornn.kernels.persistent.choose import BOUNDED, STAGED_BYTES, Request, ranked
from ecornn.kernels.persistent.gradients import SPLIT, GradientTile
from ecornn.kernels.persistent.shares import ShareTile
from ecornn.kernels.persistent.tile import ASKED, CELLS, POLLING, round_up
from ecornn.kernels.persistent.transposed import TransposeTile
from ecornn.kernels.row_losses import READ_AS, RowLossTile
from support.chips import CHIPS, HOPPER, KERNELS, needs_compiler
from support.compilations import compile_now, said_of


def small(source: str, arch: str) -> Variant:
    """One variant of a source."""
    ask = Request("backward" if source == "backward" else "forward", "lstm", "bf16", 40, 5)
    tile = ranked(ask, CHIPS[arch])[0].tile
    tiles = {
        "forward": tile,
        "backward": tile,
        "exchange_floor": replace(tile, kernel="exchange_floor"),
        "gradients": GradientTile("lstm", "bf16", SPLIT if CHIPS[arch].clusters else 1),
        "shares": ShareTile("bf16"),
        "transposed": TransposeTile(),
        "cross_entropy": CrossEntropyTile(),
        "row_losses": RowLossTile(READ_AS[torch.float32]),
    }
    return tiles[source].variant(arch)


@needs_compiler
@pytest.mark.parametrize("arch", CHIPS)
@pytest.mark.parametrize("source", sorted(path.stem for path in SOURCES.glob("*.cu")))
def test_every_source_is_compiled_in_every_run(source: str, arch: str) -> None:
    """Whatever is known of it, which must be the same."""
    variant = small(source, arch)
    assert compile_now(variant) == said_of(variant)


@needs_compiler
@pytest.mark.parametrize("arch", CHIPS)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("numbers", ASKED)
@pytest.mark.parametrize("kernel", KERNELS)
def test_compiles_for(arch: str, cell: str, numbers: str, kernel: str) -> None:
    # one block alone for some, all blocks for others, with and without lengths and resets
    place = CELLS.index(cell) + ASKED.index(numbers)
    large = place % 2
    ask = Request(kernel, cell, numbers, 384 if large else 40, 5, features=bool(large))
    tile = ranked(ask, CHIPS[arch])[0].tile
    used = said_of(tile.variant(arch))
    assert used.registers * tile.threads <= 65536  # or it could not be launched


@needs_compiler
@pytest.mark.parametrize("arch", CHIPS)
@pytest.mark.parametrize("cell", BOUNDED)
@pytest.mark.parametrize("hidden", [40, 384])
def test_scaled_numbers_compile_for(arch: str, cell: str, hidden: int) -> None:
    features = (BOUNDED.index(cell) + list(CHIPS).index(arch)) % 2 == 1
    ask = Request("forward", cell, "scaled", hidden, 5, features=features)
    used = said_of(ranked(ask, CHIPS[arch])[0].tile.variant(arch))
    assert used.registers <= 255
    assert used.frame_bytes == 0


@needs_compiler
@pytest.mark.parametrize(("arch", "kernel"), list(zip(CHIPS, KERNELS * len(CHIPS), strict=False)))
def test_sizes_that_end_inside_a_tile_compile_for(arch: str, kernel: str) -> None:
    found = ranked(Request(kernel, "lstm", "bf16", 1000, 5), CHIPS[arch])
    tile = next(g.tile for g in found if g.tile.ragged)
    used = said_of(tile.variant(arch))
    assert used.registers * tile.threads <= 65536


@needs_compiler
@pytest.mark.parametrize("arch", CHIPS)
@pytest.mark.parametrize("polling", POLLING[1:])
def test_every_way_to_wait_compiles_for(arch: str, polling: str) -> None:
    """In the kernels by turns, with the other ways that a tile can have: to round, to have weights
    in registers up to the middle of a row of tiles, and to have them pass through shared memory."""
    kernel = KERNELS[(list(CHIPS).index(arch) + POLLING.index(polling)) % 2]
    found = ranked(Request(kernel, "lstm", "tf32", 384, 5), CHIPS[arch])
    tile = next(g.tile for g in found if g.tile.grid and g.tile.chunks > 1)
    rows, chunks = divmod(tile.in_registers - 1, tile.chunks)
    tile = replace(tile, polling=polling, rounded=False, staged_bytes=STAGED_BYTES[1])
    tile = replace(tile, register_tiles=rows, register_chunks=chunks, partial_buffers=1)
    assert tile.shared_bytes <= CHIPS[arch].shared_bytes
    used = said_of(tile.variant(arch))
    assert used.registers * tile.threads <= 65536


def test_no_kernel_gives_cache_hints() -> None:
    """Of which a compiler that is in use makes wrong code (decision 0041)."""
    for path in SOURCES.iterdir():
        if path.suffix in (".cu", ".cuh"):
            assert not {"cache_hint", "createpolicy"} & set(re.findall(r"\w+", path.read_text()))


def test_only_gradients_that_are_exchanged_as_tf32_are_rounded() -> None:
    for kernel, numbers in (*product(KERNELS, ASKED), ("forward", "scaled")):
        found = {g.tile for g in ranked(Request(kernel, "lstm", numbers, 256, 4), HOPPER)}
        assert {tile.grid for tile in found} == {False, True}
        for tile in found:
            rounds = tile.grid and (kernel, tile.numbers) == ("backward", "tf32")
            assert dict(tile.variant("sm_90a").constants)["ROUNDED"] == rounds


@pytest.mark.parametrize("hidden", [85, 384, 1000, 1024])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_tile_knows_whether_the_inner_dimension_ends_inside_it(kernel: str, hidden: int) -> None:
    found = {g.tile for g in ranked(Request(kernel, "lstm", "bf16", hidden, 5), CHIPS["sm_90a"])}
    assert found
    for tile in found:
        lanes = product(range(tile.owners), range(tile.k_warps), range(tile.chunks), range(4))
        # as `k_of` in weights.cuh
        ends = [
            ((rank * tile.k_warps + warp) * tile.chunks + c) * 4 * tile.vector
            + (q + 1) * tile.vector
            for rank, warp, c, q in lanes
        ]
        sections = tile.inner * round_up(hidden, tile.vector)
        assert max(ends) >= sections
        assert tile.ragged == (tile.grid and max(ends) > sections)


@needs_compiler
@pytest.mark.parametrize("arch", CHIPS)
@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh"])
@pytest.mark.parametrize("numbers", ASKED)
def test_the_gradients_compile_for(arch: str, cell: str, numbers: str) -> None:
    tile = GradientTile(cell, numbers, SPLIT if CHIPS[arch].clusters else 1)
    used = said_of(tile.variant(arch))
    assert used.frame_bytes == 0


@needs_compiler
@pytest.mark.parametrize("arch", CHIPS)
@pytest.mark.parametrize("numbers", ASKED)
def test_the_shares_compile_for(arch: str, numbers: str) -> None:
    used = said_of(ShareTile(numbers).variant(arch))
    assert used.frame_bytes == 0


@needs_compiler
@pytest.mark.parametrize("arch", CHIPS)
def test_the_transposition_compiles_for(arch: str) -> None:
    assert said_of(TransposeTile().variant(arch)).frame_bytes == 0


@needs_compiler
@pytest.mark.parametrize("arch", CHIPS)
def test_the_gradient_of_cross_entropy_compiles_for(arch: str) -> None:
    used = said_of(CrossEntropyTile().variant(arch))
    assert used.frame_bytes == 0


@needs_compiler
@pytest.mark.parametrize("arch", CHIPS)
@pytest.mark.parametrize("numbers", sorted(READ_AS.values()))
def test_the_losses_of_rows_compile_for(arch: str, numbers: str) -> None:
    used = said_of(RowLossTile(numbers).variant(arch))
    assert used.frame_bytes == 0
