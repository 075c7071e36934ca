"""The kernel that makes the cross entropy of rows of scores, and their gradient in their place."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from ecornn.kernels.jit import Variant
from ecornn.kernels.loading import launcher_beside
from ecornn.kernels.persistent.device import too_old, unavailable
from ecornn.kernels.persistent.tile import NUMBERS
from ecornn.kernels.reference.row_losses import Rows
from ecornn.kernels.reference.row_losses import row_losses as by_torch

#: In which numbers the kernel reads scores; it computes in float32.
READ_AS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "tf32"}
VECTOR_BYTES = 16
#: Classes and rows are counted in 32 bits, and so is what a thread goes beyond them.
MOST = 2**31 - 2**16


class RowLossArguments(ctypes.Structure):
    """As the structure in `row_losses.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("scores", "target", "losses")),
        *((name, ctypes.c_int) for name in ("rows", "width", "classes")),
        *((name, ctypes.c_float) for name in ("smoothing", "factor")),
    )


@dataclass(frozen=True)
class RowLossTile:
    """What the kernel is compiled with."""

    numbers: str
    cluster: int = 1
    kernel: str = "row_losses"
    threads: int = 1024
    shared_bytes: int = 32 * 4
    grid: bool = False

    def variant(self, arch: str) -> Variant:
        return Variant("row_losses.cu", arch, (("DTYPE", NUMBERS.index(self.numbers)),))


def is_served(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether scores like these are left to the kernel, as far as that is known before it is
    loaded."""
    if device.type != "cuda" or dtype not in READ_AS:
        return False
    return unavailable() is None and too_old() is None


def row_losses(scores_RW: Tensor, target_R: Tensor, losses_R: Tensor, rows: Rows) -> None:
    """As the reference, which does it where the kernel does not serve."""
    launch = None
    if reads(scores_RW, target_R, losses_R):
        tile = RowLossTile(READ_AS[scores_RW.dtype])
        launch = launcher_beside(scores_RW, tile, "the kernel of an output layer's losses")
    if launch is None:
        by_torch(scores_RW, target_R, losses_R, rows)
        return
    places = (tensor.data_ptr() for tensor in (scores_RW, target_R, losses_R))
    with torch.cuda.device(scores_RW.device):
        launch(RowLossArguments(*places, *scores_RW.shape, *rows), len(scores_RW))


def reads(scores_RW: Tensor, target_R: Tensor, losses_R: Tensor) -> bool:
    """Whether memory and numbers are as the kernel reads them."""
    (count, width), size = scores_RW.shape, scores_RW.element_size()
    return (
        scores_RW.dtype in READ_AS
        and losses_R.dtype == torch.float32
        and all([t.is_contiguous() for t in (scores_RW, target_R, losses_R)])  # noqa: C419
        and scores_RW.data_ptr() % VECTOR_BYTES == 0
        and width * size % VECTOR_BYTES == 0
        and 0 < count < MOST
        and width < MOST
    )
