"""Choose a persistent kernel's tile: measured before, or by the model of `model.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from ecornn.kernels.persistent.model import estimate
from ecornn.kernels.persistent.tables import HALF, key_of, table
from ecornn.kernels.persistent.tile import (
    CHUNK_BYTES,
    TILE_ROWS,
    TILE_SEQUENCES,
    Geometry,
    Tile,
    exchanged_bytes,
    round_up,
)
from ecornn.spec import GATES


@dataclass(frozen=True)
class Chip:
    """What a GPU has, as far as tiles depend on it. Clusters are counted with one block on a
    multiprocessor: persistent blocks fill it."""

    multiprocessors: int
    shared_bytes: int  # that a block can have
    #: How many clusters of a size run at once; empty where there are none.
    clusters: tuple[tuple[int, int], ...] = ()

    def shared_by(self, kernels: int) -> Chip:
        """What each of so many kernels has that run at once."""
        clusters = ((size, count // kernels) for size, count in self.clusters)
        return Chip(
            self.multiprocessors // kernels,
            self.shared_bytes,
            tuple((size, count) for size, count in clusters if count > 0),
        )


@dataclass(frozen=True)
class Request:
    kernel: str
    cell: str
    numbers: str
    hidden: int
    batch: int
    directions: int = 1
    features: bool = False
    #: How many such kernels run at once, each on its part of the chip.
    share: int = 1


#: Float32 that was asked for, and other numbers that may serve: IEEE's, on the ordinary units,
#: which are as precise at least, and float16 times powers of two, which has as many bits as TF32.
#: A tensor core multiplies eight columns however few sequences there are; for one sequence the
#: ordinary units have half as long to do. Of float16 it takes twice as many, and blocks exchange
#: half as much.
AS_PRECISE = {"tf32": ("ieee", "scaled"), "tf32x3": ("ieee",)}
#: Cells whose states have a bound, which float16's exponents need: forwards alone.
BOUNDED = ("lstm", "gru", "rnn_tanh")


def as_precise(ask: Request) -> list[str]:
    """Other numbers that may serve a request."""
    return [n for n in AS_PRECISE.get(ask.numbers, ()) if n != "scaled" or _is_bounded(ask)]


def _is_bounded(ask: Request) -> bool:
    return ask.kernel == "forward" and ask.cell in BOUNDED


#: Steps that marks may be asked for ahead; of a backward kernel always, of a forward one where a
#: step has so many bytes of them: layers took 2 to 7 % less from 16 KiB on, and more with 8.
MARKS_AHEAD = {"forward": (0, 4), "backward": (2, 4)}
MANY_MARKS = 16 * 1024

#: Shared memory that weights may pass through before the first step (decision 0038): none, or so
#: much at least.
STAGED_BYTES = (0, 64 * 1024)


def ranked(ask: Request, chip: Chip) -> list[Geometry]:
    """Every way to serve a request, best first; empty where nothing fits."""
    chip = chip.shared_by(ask.share)
    found = sorted(candidates(ask, chip), key=lambda g: estimate(g, ask.hidden))
    if (known := measured(ask)) is not None and serves(known, ask, chip):
        found = [known, *(g for g in found if g != known)]
    return found


def serves(geometry: Geometry, ask: Request, chip: Chip) -> bool:
    """Whether it is one for the request, since a table may be older than the kernels, and a chip
    has room for it. The estimate of registers is not asked: what was measured did not spill. With
    lengths or resets, or on another chip, it may by some bytes."""
    tile = geometry.tile
    clusters = dict(((1, chip.multiprocessors), *chip.clusters)).get(tile.cluster, 0)
    needed = blocks_needed(geometry, ask.share)
    room = tile.shared_bytes <= chip.shared_bytes and clusters * tile.cluster >= needed
    return room and geometry.covers(ask.hidden, ask.batch)


def blocks_needed(geometry: Geometry, share: int = 1) -> int:
    """Blocks that must run at once: those that wait for each other; of a kernel that shares the
    chip all, since what does not fit beside the others would run after them."""
    whole = geometry.tile.grid or share > 1
    return geometry.all_blocks if whole else geometry.tile.cluster


def step_microseconds(geometry: Geometry, ask: Request) -> float:
    """What a step takes: as it was measured, or by the model, which is corrected by what the
    fastest tile of such a request took where that was measured and has the same numbers: of
    others, which other units multiply, the model errs otherwise."""
    entry, known = _entry(ask), measured(ask)
    guess = estimate(geometry, ask.hidden)
    if entry is None or known is None:
        return guess
    took = float(entry["microseconds"])
    if known == geometry:
        return took
    alike = known.tile.numbers == geometry.tile.numbers
    return max(took, guess * took / estimate(known, ask.hidden) if alike else guess)


def measured(ask: Request) -> Geometry | None:
    """The tile that was the fastest when this request was measured, with the chip to itself."""
    entry = _entry(ask)
    if entry is None:
        return None
    asked = {"kernel": ask.kernel, "cell": ask.cell, "numbers": ask.numbers}
    tile = Tile(**{**asked, "features": ask.features, **entry["tile"]}).serving(ask.hidden)
    return Geometry(tile, entry["blocks"], entry["groups"], ask.directions, entry["group_batch"])


def _entry(ask: Request) -> dict[str, Any] | None:
    """Of more precise numbers, where these were not measured, the one for TF32 if the ordinary
    units were the fastest there: what is quicker than TF32 is quicker than three products of it."""
    found = table().get(key_of(asdict(ask)))
    if found is None and ask.numbers in ("tf32x3", "ieee"):
        found = table().get(key_of(asdict(replace(ask, numbers="tf32"))))
        if found is not None and found["tile"].get("numbers") != "ieee":
            return None
    return found


def known_requests(numbers: str = "") -> list[Request]:
    """What the tables have an entry for, or those in some numbers; of half precisions, which they
    do not tell apart, in bfloat16."""
    asks = (entry["request"] for entry in table().values())
    found = [
        Request(**{**ask, "numbers": "bf16" if ask["numbers"] in HALF else ask["numbers"]})
        for ask in asks
    ]
    wanted = "bf16" if numbers in HALF else numbers
    return [ask for ask in found if wanted in ("", ask.numbers)]


def registers(tile: Tile) -> int:
    """About what a thread takes; fitted to what the compiler says, and compared in the tests."""
    pieces = -(-tile.chunks * tile.batch_tiles // tile.at_once)
    vectors = tile.at_once * 4 * min(2, pieces) if tile.grid else 20
    item = {"lstm": 11, "gru": 11, "rnn_tanh": 8, "rnn_relu": 8}[tile.cell] * tile.items
    # a product's two parts; the columns that each lane has all of; what sums are multiplied by
    split = {"tf32x3": 30, "ieee": 4 * tile.width * tile.abreast, "scaled": 16}.get(tile.numbers, 0)
    kernel = 79 if tile.kernel == "backward" else 74
    found = tile.weight_registers + vectors * 2 // 5 + item + split + kernel
    if tile.numbers != "ieee":
        return found + tile.sums * 2 // 3
    found += tile.sums + 12 * tile.ragged
    if tile.width <= 2:
        return found
    # products of many columns take so long that more of what comes next waits beside them
    beside = vectors * 2 // 5 + 2 * tile.row_tiles + 10 * (tile.owners > 1)
    return found + beside + (10 * tile.batch_tiles if tile.batch_tiles > 1 else 0)


def candidates(ask: Request, chip: Chip) -> Iterator[Geometry]:
    if ask.numbers == "scaled" and not _is_bounded(ask):
        return
    element = exchanged_bytes(ask.numbers)
    inner = 1 if ask.kernel == "forward" else GATES[ask.cell]
    length = inner * round_up(ask.hidden, 16 // element)  # of the exchanged vector
    chunks = -(-length * element // CHUNK_BYTES)
    for grid, cluster, units, blocks, at_once in _spreads(ask, chip):
        most_groups = at_once // (blocks * ask.directions)
        for groups in sorted(
            {min(most_groups, -(-ask.batch // n)) for n in (1, 2, 8, 16, 32)} - {0}
        ):
            group_batch = -(-ask.batch // groups)
            if group_batch > 32:
                continue
            for tile in _tiles(ask, grid, cluster, units, chunks, group_batch):
                if tile.shared_bytes > chip.shared_bytes:
                    tile = replace(tile, partial_buffers=1)
                if tile.shared_bytes <= chip.shared_bytes:
                    groups = -(-ask.batch // group_batch)
                    yield Geometry(tile, blocks, groups, ask.directions, group_batch)


def _spreads(ask: Request, chip: Chip) -> Iterator[tuple[bool, int, int, int, int]]:
    """Ways to spread the hidden units: (grid, cluster, units, blocks, blocks at once)."""
    for cluster, count in ((1, chip.multiprocessors), *chip.clusters):
        units = round_up(-(-ask.hidden // cluster), 8)
        if (cluster - 1) * units < ask.hidden:
            yield False, cluster, units, cluster, count * cluster
    # each block must see all states that a GRU begins with, to know their bound
    alone = ask.numbers == "scaled" and ask.cell == "gru"
    for cluster, count in ((1, chip.multiprocessors), *chip.clusters):
        if cluster > (1 if alone else 8):
            continue
        for units in (8, 16, 24, 32):
            blocks = round_up(-(-ask.hidden // units), cluster)
            if cluster < blocks <= count * cluster:
                yield True, cluster, units, blocks, count * cluster


def _tiles(
    ask: Request, grid: bool, cluster: int, units: int, chunks: int, group_batch: int
) -> Iterator[Tile]:
    outer = GATES[ask.cell] if ask.kernel == "forward" else 1
    owners = cluster if grid else 1
    own_chunks = -(-chunks // owners)
    element = exchanged_bytes(ask.numbers)
    small = outer * units * owners * (own_chunks if grid else 1) < 4 * TILE_ROWS
    for warps in (1, 2, 4, 8, 16) if small else (4, 8, 16):
        for row_warps in (1, 2, 4, 8, 16):
            k_warps = warps // row_warps
            # where sums stay in registers a unit has one row of a tile or four
            rows = 4 if outer > 1 and not grid and k_warps == 1 else outer
            tiles = -(-rows * units * owners // TILE_ROWS)
            # the vector would be read from memory once for each row of warps
            if (
                k_warps == 0
                or row_warps > tiles
                or k_warps > own_chunks
                or (grid and row_warps > 1)
            ):
                continue
            k_chunks, batch_tiles = -(-own_chunks // k_warps), -(-group_batch // TILE_SEQUENCES)
            together = _at_once(k_chunks * batch_tiles) if grid else (1,)
            direct = not grid and k_warps == 1
            widths = _widths(ask.numbers, direct, group_batch)
            for at_once, abreast, width in product(together, (1, 2, 4), widths):
                if batch_tiles % abreast or (grid and at_once % abreast):
                    continue
                row_tiles = -(-tiles // row_warps)
                if width < TILE_SEQUENCES and direct and outer > 1:
                    row_tiles = round_up(
                        row_tiles, 4
                    )  # lanes share units by twos, of two tiles each
                yield from _in_registers(
                    Tile(
                        *(ask.kernel, ask.cell, ask.numbers, units, row_warps, k_warps),
                        *(row_tiles, row_tiles, k_chunks, batch_tiles, grid, cluster),
                        at_once=at_once,
                        abreast=abreast,
                        width=width,
                        features=ask.features,
                        marks_ahead=_marks_ahead(ask, element) if grid else 0,
                    ).serving(ask.hidden)
                )


def _marks_ahead(ask: Request, element: int) -> int:
    """Forwards where a step's marks are so many that those of some hundred steps do not stay in
    L2; backwards there are four times as many."""
    if ask.kernel == "backward":
        return MARKS_AHEAD[ask.kernel][0]
    many = ask.batch * ask.hidden * element >= MANY_MARKS
    return MARKS_AHEAD[ask.kernel][many]


def _widths(numbers: str, direct: bool, group_batch: int) -> list[int]:
    """Sequences that a batch tile may have."""
    if direct:
        return [group_batch, TILE_SEQUENCES] if group_batch <= 2 else [TILE_SEQUENCES]
    if numbers == "ieee":  # what is not there is not multiplied
        return [next((n for n in (1, 2, 4) if n >= group_batch), TILE_SEQUENCES)]
    return [TILE_SEQUENCES]


def _in_registers(tile: Tile) -> Iterator[Tile]:
    """With as many of its rows in registers as fit, of one that has all of them there. The estimate
    may be too low by some: then with one row less, which does not spill."""
    each = tile.weight_registers // tile.register_tiles
    over = max(0, registers(tile) - _most_registers(tile))
    first = tile.register_tiles - -(-over // each)
    if first > 0:
        found = replace(tile, register_tiles=first)
        yield found
        if first > 1 and not _fits_easily(found):
            yield replace(tile, register_tiles=first - 1)


def _fits_easily(tile: Tile) -> bool:
    return registers(tile) <= _most_registers(tile) - 24


def _most_registers(tile: Tile) -> int:
    return min(255, 65536 // tile.threads)


def _at_once(vectors: int) -> Iterator[int]:
    """How many vectors a lane loads together: all where they are few."""
    if vectors <= 8:
        yield vectors
    if vectors > 2:
        yield from (n for n in (2, 4, 8) if n < vectors)
