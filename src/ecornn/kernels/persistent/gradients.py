"""The kernel that makes all gradients of a small layer from those of its gates, in one launch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch

from ecornn.kernels.jit import Variant
from ecornn.kernels.persistent.launch import Launcher
from ecornn.kernels.persistent.tile import CELLS, NUMBERS, Geometry
from ecornn.spec import GATES

#: Rows and columns of a block's tile; as in `tiles.cuh`.
TILE = 64
#: Blocks that share the inner dimension where there are clusters.
SPLIT = 8
#: Multiplications and additions up to which one launch is the better way, by the size of a value:
#: beyond, torch's own products are so much faster that their launches do not count. In float32 at
#: 3.2e9, a called training step took 0.94 ms instead of 1.47, a replayed one 3 % more.
MOST_WORK = {2: 7e9, 4: 4e9}
#: With more, its blocks are too many for what each has to do.
MOST_UNITS = 256


class GradientArguments(ctypes.Structure):
    """As the structure at the top of `gradients.cu`."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("d_gates", "input", "output", "h0", "w_ih"),
                *("d_input", "d_w_ih", "d_w_hh", "d_b_ih", "d_b_hh"),
            )
        ),
        *(
            (name, ctypes.c_int)
            for name in (
                *("rows", "batch", "hidden", "inputs", "output_row", "reverse", "by_vectors"),
            )
        ),
    )


@dataclass(frozen=True)
class GradientTile:
    """What the kernel is compiled with."""

    cell: str
    numbers: str
    cluster: int
    kernel: str = "gradients"
    threads: int = 128
    shared_bytes: int = 0
    grid: bool = False

    def variant(self, arch: str) -> Variant:
        constants = {
            "CELL": CELLS.index(self.cell),
            "DTYPE": NUMBERS.index(self.numbers),
            "CLUSTER": self.cluster,
        }
        return Variant("gradients.cu", arch, tuple(constants.items()))


def is_small(
    cell: str, dtype: torch.dtype, rows: int, hidden: int, inputs: int, *, split: int
) -> bool:
    """Whether one launch is the better way where `split` blocks share the inner dimension. Fewer
    than were measured have as much less to do."""
    work = 2.0 * rows * GATES[cell] * hidden * (2 * inputs + hidden)
    most = MOST_WORK[dtype.itemsize] * split / SPLIT
    return max(hidden, inputs) <= MOST_UNITS and work <= most


@cache
def split_on(device: torch.device) -> int:
    """Blocks that share the inner dimension: on a GPU whose kernels are compiled for clusters."""
    if device.type != "cuda":
        return SPLIT
    return SPLIT if torch.cuda.get_device_capability(device)[0] == 9 else 1


def blocks(
    cell: str, rows: int, hidden: int, inputs: int, cluster: int, *, needs_input: bool
) -> int:
    """Of a launch: first those of the weights, then those of the input, a multiple of a cluster."""

    def tiles(size: int) -> int:
        return -(-size // TILE)

    of_weights = tiles(GATES[cell] * hidden) * (tiles(inputs) + tiles(hidden)) * cluster
    of_input = tiles(rows) * tiles(inputs) if needs_input else 0
    return of_weights + -(-of_input // cluster) * cluster


@cache
def gradient_launcher(cell: str, numbers: str, device: int) -> Launcher:
    tile = GradientTile(cell, numbers, split_on(torch.device("cuda", device)))
    return Launcher(Geometry(tile, tile.cluster, 1, 1, 0), device)  # type: ignore[arg-type]
