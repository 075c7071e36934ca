"""The kernel that stores a float32 matrix column by column."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

from torch import Tensor

from ecornn.kernels.jit import Variant
from ecornn.kernels.persistent.launch import Launcher
from ecornn.kernels.persistent.tile import Geometry

#: Rows and columns of a block's tile; as in `transposed.cu`.
SIDE = 64


class TransposeArguments(ctypes.Structure):
    """As the structure in `transposed.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("values", "found")),
        *((name, ctypes.c_longlong) for name in ("values_row", "found_row")),
        *((name, ctypes.c_int) for name in ("rows", "columns")),
    )


@dataclass(frozen=True)
class TransposeTile:
    """What the kernel is compiled with."""

    cluster: int = 1
    kernel: str = "transposed"
    threads: int = 256
    shared_bytes: int = 0
    grid: bool = False

    def variant(self, arch: str) -> Variant:
        return Variant("transposed.cu", arch)


def transpose_blocks(rows: int, columns: int) -> int:
    return -(-rows // SIDE) * -(-columns // SIDE)


def transpose_arguments(values: Tensor, found: Tensor) -> TransposeArguments:
    """Of a matrix, and of the memory of its columns. The values of a row of either lie together."""
    places = (values.data_ptr(), found.data_ptr())
    return TransposeArguments(*places, values.stride(0), found.stride(0), *values.shape)


@cache
def transpose_launcher(device: int) -> Launcher:
    return Launcher(Geometry(TransposeTile(), 1, 1, 1, 0), device)  # type: ignore[arg-type]
