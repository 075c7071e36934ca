"""Registers: what is tuned or chosen spills nothing but what is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ecornn.kernels.persistent import tune
from ecornn.kernels.persistent.choose import Request, measured, ranked, registers
from ecornn.kernels.persistent.tables import table
from ecornn.kernels.persistent.tile import Tile
from support.chips import CHIPS, HOPPER, KERNELS, needs_compiler
from support.compilations import said_of


def _tuned(entry: dict[str, Any]) -> Tile:
    request = dict(entry["request"])
    if request["numbers"] == "half":
        request["numbers"] = "bf16"
    found = measured(Request(**request))
    assert found is not None
    return found.tile


#: Sizes that were measured apart share tiles: each is compiled once.
TUNED_TILES = {
    _tuned(entry): "-".join(map(str, entry["request"].values())) for entry in table().values()
}


#: Where the estimate leaves fewer registers than this, what lengths and resets, float16 or another
#: architecture take more may be too many. All variants were compiled once: of tiles with more room
#: none spills.
TIGHT = 16

#: What spills nevertheless, (architecture, tile, numbers, with lengths or resets): bytes a thread.
#: No tile of the same size is without: of these rows of weights either one alone is in registers,
#: or shared memory has no room for one more.
UNAVOIDABLE = {
    # Biases and addresses, by their machine code: stored before the loop, read from L1 once a step.
    ("sm_90a", "forward-lstm-half-1024-64-1", "bf16", True): 40,
    ("sm_90a", "forward-lstm-half-1024-64-1", "fp16", True): 40,
    ("sm_100a", "forward-lstm-half-1024-64-1", "bf16", False): 8,
    ("sm_100a", "forward-lstm-half-1024-64-1", "bf16", True): 72,
    ("sm_100a", "forward-lstm-half-1024-64-1", "fp16", False): 32,
    ("sm_100a", "forward-lstm-half-1024-64-1", "fp16", True): 72,
    ("sm_100a", "forward-lstm-tf32-1024-64-1", "tf32", True): 8,
}
#: The same of tiles that others could replace, which spill nothing and were slower on an H200: with
#: twice the vectors under way a step took 9.5 µs instead of 11.4 in TF32, 5.6 instead of 6.2 in
#: bfloat16; with more weights in registers 2.06 instead of 2.31. They are biases above all, read
#: once a step before the product.
QUICKER = {
    ("sm_90a", "backward-lstm-tf32-1024-64-1", "tf32", False): 8,
    ("sm_90a", "backward-lstm-tf32-1024-64-1", "tf32", True): 72,
    ("sm_90a", "backward-lstm-half-1024-64-1", "bf16", True): 16,
    ("sm_90a", "backward-lstm-half-1024-64-1", "fp16", False): 24,
    ("sm_90a", "backward-lstm-half-1024-64-1", "fp16", True): 8,
    ("sm_90a", "forward-lstm-half-1024-16-2", "bf16", False): 8,
    ("sm_90a", "forward-lstm-half-1024-16-2", "bf16", True): 24,
    ("sm_90a", "forward-lstm-half-1024-16-2", "fp16", False): 8,
    ("sm_90a", "forward-lstm-half-1024-16-2", "fp16", True): 24,
    ("sm_100a", "forward-lstm-half-1024-16-2", "bf16", True): 8,
    ("sm_100a", "forward-lstm-half-1024-16-2", "fp16", True): 8,
    ("sm_100a", "forward-lstm-tf32-512-64-1", "tf32", True): 8,
}
FRAMES = UNAVOIDABLE | QUICKER


@needs_compiler
@pytest.mark.parametrize("tile", TUNED_TILES, ids=TUNED_TILES.values())
def test_no_tuned_tile_spills_but_those_that_are_known(tile: Tile) -> None:
    used = said_of(tile.variant("sm_90a"))
    known = FRAMES.get(("sm_90a", TUNED_TILES[tile], tile.numbers, False), 0)
    assert used.frame_bytes == known
    assert known <= tune.SMALL_FRAME
    assert used.registers * tile.threads <= 65536


def _is_tight(tile: Tile) -> bool:
    return min(255, 65536 // tile.threads) - registers(tile) < TIGHT


def _tight_variants() -> list[tuple[str, str, str, bool]]:
    """With lengths and resets, half precisions in turn; and all that is known to spill, for
    Blackwell, which tiles are not tuned for, with every third of the others. Not what the test
    above compiles."""
    found = dict.fromkeys(v for v in FRAMES if v[3] or v[0] != "sm_90a" or v[2] == "fp16")
    for arch, each in (("sm_90a", 1), ("sm_100a", 3)):
        for place, (tile, name) in enumerate(TUNED_TILES.items()):
            numbers = ("bf16", "fp16")[place % 2] if tile.element_bytes == 2 else tile.numbers
            clusters = (1, *dict(CHIPS[arch].clusters))
            if _is_tight(tile) and tile.cluster in clusters and place % each == 0:
                found[arch, name, numbers, True] = None
    return list(found)


@needs_compiler
@pytest.mark.parametrize("variant", _tight_variants(), ids=lambda v: "-".join(map(str, v)))
def test_lengths_resets_float16_and_blackwell_spill_no_more_than_is_known(
    variant: tuple[str, str, str, bool],
) -> None:
    arch, name, numbers, features = variant
    plain = next(tile for tile, its in TUNED_TILES.items() if its == name)
    tile = replace(plain, numbers=numbers, features=features)
    assert _is_tight(plain), "what has room does not spill"
    used = said_of(tile.variant(arch))
    assert used.frame_bytes == FRAMES.get(variant, 0)
    assert used.registers * tile.threads <= 65536


def test_no_other_rows_in_registers_would_spare_what_spills() -> None:
    for arch, name, _, _ in UNAVOIDABLE:
        tile = next(tile for tile, its in TUNED_TILES.items() if its == name)
        less = replace(tile, register_tiles=tile.register_tiles - 1, partial_buffers=1)
        assert tile.register_tiles == 1 or less.shared_bytes > CHIPS[arch].shared_bytes


#: What the model names is what runs, but for two that were measured for TF32 and serve these.
IEEE_ASKS = [
    Request("forward", "lstm", "ieee", 64, 4),
    Request("backward", "lstm", "ieee", 512, 4),
    Request("forward", "gru", "ieee", 1024, 4, features=True),
    Request("backward", "gru", "ieee", 256, 33),
    Request("forward", "rnn_tanh", "ieee", 512, 64),
    Request("backward", "lstm", "ieee", 1000, 3),
]
SCALED_ASKS = [
    *(Request("forward", "lstm", "scaled", hidden, 16) for hidden in (64, 256, 512, 1024, 2048)),
    Request("forward", "lstm", "scaled", 1024, 4, features=True),
    Request("forward", "gru", "scaled", 512, 16),
    Request("forward", "gru", "scaled", 1024, 4),
    Request("forward", "rnn_tanh", "scaled", 1000, 5),
]


@needs_compiler
@pytest.mark.parametrize("ask", [*IEEE_ASKS, *SCALED_ASKS], ids=str)
def test_what_the_model_names_for_float32_does_not_spill(ask: Request) -> None:
    tile = ranked(ask, HOPPER)[0].tile
    used = said_of(tile.variant("sm_90a"))
    assert used.frame_bytes == 0
    assert used.registers * tile.threads <= 65536
    assert abs(registers(tile) - used.registers) <= 50, tile


@needs_compiler
def test_registers_are_about_what_the_compiler_takes() -> None:
    for hidden, batch in ((64, 4), (256, 16), (1024, 4)):
        for kernel in KERNELS:
            tile = ranked(Request(kernel, "lstm", "bf16", hidden, batch), HOPPER)[0].tile
            assert tile in TUNED_TILES
            assert abs(registers(tile) - said_of(tile.variant("sm_90a")).registers) <= 40, tile
