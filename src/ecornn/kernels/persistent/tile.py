"""`Tile`: the compile-time shape of a persistent kernel, and `Geometry`: how it is launched."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from ecornn.kernels.jit import Variant
from ecornn.spec import GATES

CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
#: What may be asked for: half precisions and float32 as TF32, as three products of it and as IEEE.
ASKED = ("bf16", "fp16", "tf32", "tf32x3", "ieee")
#: How kernels multiply, as the sources number it. "scaled" is float32 as float16 times powers of
#: two (`scaled.cuh`).
NUMBERS = (*ASKED, "scaled")
#: How a lane learns that its vectors have come through L2, as `multiply.cuh` numbers the ways.
POLLING = ("first", "all", "all delayed")
#: Rows of a tensor-core product, and the sequences it takes at once.
TILE_ROWS = 16
TILE_SEQUENCES = 8
#: Bytes of the inner dimension that the four lanes of a row load at once.
CHUNK_BYTES = 64

#: Steps that values are asked for before they are used; as in `items.cuh`.
AHEAD = 2


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def exchanged_bytes(numbers: str) -> int:
    """Of each value that blocks exchange and multiply."""
    return 2 if numbers in ("bf16", "fp16", "scaled") else 4


@dataclass(frozen=True)
class Tile:
    """Every constant a kernel is compiled with; the names are those of the sources."""

    kernel: str  # "forward", "backward", or "exchange_floor": a forward pass's exchange alone
    cell: str
    numbers: str
    units: int
    row_warps: int
    k_warps: int
    row_tiles: int
    register_tiles: int
    chunks: int
    batch_tiles: int
    grid: bool
    cluster: int = 1
    partial_buffers: int = 2
    at_once: int = 8
    #: Batch tiles that are multiplied by weights which are read once.
    abreast: int = 1
    #: Sequences of a batch tile; fewer than 8 are repeated in its columns, or in IEEE float32 the
    #: only ones that are multiplied.
    width: int = TILE_SEQUENCES
    features: bool = False
    #: Whether blocks that exchange through L2 have more of the inner dimension than there is.
    ragged: bool = False
    #: Whether gates' gradients that are multiplied as TF32 are rounded to it once, where they are
    #: published through L2, and not by everyone who reads them.
    rounded: bool = True
    #: One of `POLLING`.
    polling: str = "first"
    #: Chunks of the row of tiles after `register_tiles` that are in registers too.
    register_chunks: int = 0
    #: Steps that blocks ask L2 ahead for the marks that they will write over, so that none has to
    #: come from memory when others wait for what is published there; 0 where all stay in L2.
    marks_ahead: int = 0
    #: Shared memory that weights pass through on their way to registers, so much at least; 0 where
    #: they are loaded straight into these.
    staged_bytes: int = 0

    @property
    def element_bytes(self) -> int:
        """Of a tensor's."""
        return 2 if self.numbers in ("bf16", "fp16") else 4

    @property
    def exchanged_bytes(self) -> int:
        """Of what blocks exchange and multiply."""
        return exchanged_bytes(self.numbers)

    @property
    def vector(self) -> int:
        """Of the exchanged ones, those of one 16-byte load."""
        return 16 // self.exchanged_bytes

    @property
    def threads(self) -> int:
        return self.row_warps * self.k_warps * 32

    @property
    def sequences(self) -> int:
        return self.batch_tiles * self.width

    @property
    def outer(self) -> int:
        """Rows of the product a hidden unit has."""
        return 1 if self.kernel == "backward" else GATES[self.cell]

    @property
    def inner(self) -> int:
        """Values a hidden unit exchanges at each step."""
        return GATES[self.cell] if self.kernel == "backward" else 1

    @property
    def owners(self) -> int:
        """Blocks of a cluster that share the inner dimension."""
        return self.cluster if self.grid else 1

    @property
    def direct(self) -> bool:
        """Whether sums stay in the registers of the warp that makes them."""
        return not self.grid and self.k_warps == 1

    @property
    def items(self) -> int:
        """(unit, sequence) pairs of a thread."""
        if self.direct:
            tiles = self.row_tiles * self.batch_tiles * (4 if self.outer == 1 else 1)
            return tiles if self.width == TILE_SEQUENCES else tiles // 4
        return -(-self.units * self.sequences // self.threads)

    @cached_property
    def shared_bytes(self) -> int:
        """As `memory.cuh` lays it out; the compiler checks that both reckon the same."""
        weights = self.row_tiles * self.chunks - self.in_registers
        weight_bytes = weights * 2 * self.threads * 16
        row = self.k_warps * self.chunks * CHUNK_BYTES
        row += CHUNK_BYTES if row % 128 == 0 else 0
        vectors = 0 if self.grid else self.sequences * row
        block_rows = self.row_warps * self.row_tiles * TILE_ROWS
        partial = 0 if self.direct else self.k_warps * self.sequences * (block_rows + 4) * 4
        received = 0
        if self.owners > 1:
            received = self.owners * self.sequences * self.outer * self.units * 4
        stage = 0
        if not self.grid and self.cluster > 1:
            stage = self.threads * self.inner * self.exchanged_bytes
        stream = AHEAD * self.items * self._parts * self.threads * self.element_bytes
        sums = self.partial_buffers * partial + 2 * received
        laid_out = weight_bytes + 2 * vectors + sums + stream + stage
        staged = min(self.in_registers, self.staged_bytes // self.slot_bytes) * self.slot_bytes
        return max(laid_out, staged) + 16

    @property
    def slot_bytes(self) -> int:
        """What one of each warp's tiles takes where weights are staged."""
        return 2 * self.threads * 16

    @property
    def _parts(self) -> int:
        """Values that an item reads from memory at each step."""
        if self.kernel != "backward":
            return GATES[self.cell]
        return {"lstm": 7, "gru": 6}.get(self.cell, 2)

    @property
    def _exchanges_tf32_gradients(self) -> bool:
        return self.grid and self.kernel == "backward" and self.numbers == "tf32"

    @property
    def in_registers(self) -> int:
        """Of a warp's tiles, counted chunk by chunk."""
        return self.register_tiles * self.chunks + self.register_chunks

    @property
    def weight_registers(self) -> int:
        return self.in_registers * 8

    @property
    def sums(self) -> int:
        """Registers of a thread for the sums it makes at once, with those of chains apart."""
        tiles = self.row_tiles * self.abreast
        if self.numbers == "ieee":
            return tiles * 2 * self.width
        chains = 1 if tiles >= 4 else 2
        if not self.grid and tiles == 1 and self.chunks > 1:
            chains = 4
        return tiles * chains * 4

    def serving(self, hidden: int) -> Tile:
        """The same for layers of so many units."""
        chunk = CHUNK_BYTES // self.exchanged_bytes
        whole = self.owners * self.k_warps * self.chunks * chunk
        ragged = self.grid and whole != self.inner * round_up(hidden, self.vector)
        return replace(self, ragged=ragged)

    def variant(self, arch: str) -> Variant:
        constants = {
            "CELL": CELLS.index(self.cell),
            "DTYPE": NUMBERS.index(self.numbers),
            "UNITS": self.units,
            "ROW_WARPS": self.row_warps,
            "K_WARPS": self.k_warps,
            "ROW_TILES": self.row_tiles,
            "REGISTER_TILES": self.register_tiles,
            "REGISTER_CHUNKS": self.register_chunks,
            "CHUNKS": self.chunks,
            "BATCH_TILES": self.batch_tiles,
            "GRID": int(self.grid),
            "CLUSTER": self.cluster,
            "PARTIAL_BUFFERS": self.partial_buffers,
            "AT_ONCE": self.at_once,
            "ABREAST": self.abreast,
            "WIDTH": self.width,
            "FEATURES": int(self.features),
            "RAGGED": int(self.ragged),
            "ROUNDED": int(self.rounded and self._exchanges_tf32_gradients),
            "POLLING": POLLING.index(self.polling),
            "MARKS_AHEAD": self.marks_ahead,
            "STAGED_BYTES": self.staged_bytes,
            "SHARED_BYTES": self.shared_bytes,
        }
        return Variant(f"{self.kernel}.cu", arch, tuple(constants.items()))


@dataclass(frozen=True)
class Geometry:
    """A tile and the blocks of one launch."""

    tile: Tile
    blocks: int  # along the hidden units
    groups: int  # of sequences
    directions: int
    group_batch: int

    @property
    def all_blocks(self) -> int:
        return self.blocks * self.groups * self.directions

    def covers(self, hidden: int, batch: int) -> bool:
        """Whether every unit, sequence and weight of such a layer has a place: what the kernels
        count on and do not ask."""
        tile = self.tile
        unit_rows = 4 if tile.direct and tile.outer > 1 else tile.outer
        rows = tile.row_warps * tile.row_tiles * TILE_ROWS
        inner = tile.owners * tile.k_warps * tile.chunks * CHUNK_BYTES // tile.exchanged_bytes
        return (
            self.blocks * tile.units >= hidden
            and self.blocks % tile.cluster == 0
            and (tile.grid or self.blocks == tile.cluster)
            and self.groups * self.group_batch >= batch
            and tile.sequences >= self.group_batch
            and rows >= unit_rows * tile.units * tile.owners
            and inner >= tile.inner * round_up(hidden, tile.vector)
        )
