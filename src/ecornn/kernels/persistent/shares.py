"""The kernel that multiplies a small layer's input by its weights: where a launch takes longer than
the product, ours is the cheaper one for the host, which has less to choose from."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from functools import cache

from ecornn.kernels.jit import Variant
from ecornn.kernels.persistent.gradients import TILE
from ecornn.kernels.persistent.launch import Launcher
from ecornn.kernels.persistent.tile import NUMBERS, Geometry

#: Multiplications and additions up to which this is the better way, by the size of a value.
MOST_WORK = {2: 1.2e9, 4: 6e8}


class ShareArguments(ctypes.Structure):
    """As the structure at the top of `shares.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input", "w_ih", "shares")),
        *((name, ctypes.c_int) for name in ("rows", "gates", "inputs", "by_vectors")),
    )


#: All of its fields at once.
SHARES = struct.Struct("@3Q4i")


@dataclass(frozen=True)
class ShareTile:
    """What the kernel is compiled with."""

    numbers: str
    cluster: int = 1
    kernel: str = "shares"
    threads: int = 128
    shared_bytes: int = 0
    grid: bool = False

    def variant(self, arch: str) -> Variant:
        return Variant("shares.cu", arch, (("DTYPE", NUMBERS.index(self.numbers)),))


def is_small_product(value_bytes: int, rows: int, gates: int, inputs: int) -> bool:
    return 2.0 * rows * gates * inputs <= MOST_WORK[value_bytes]


def share_blocks(rows: int, gates: int) -> int:
    return -(-rows // TILE) * -(-gates // TILE)


@cache
def share_launcher(numbers: str, device: int) -> Launcher:
    return Launcher(Geometry(ShareTile(numbers), 1, 1, 1, 0), device)  # type: ignore[arg-type]
