"""The kernel that makes the gradient of cross entropy from the scores, in one pass over them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ecornn.kernels.jit import Variant
from ecornn.kernels.loading import launcher_beside
from ecornn.kernels.persistent.launch import Launcher


class CrossEntropyArguments(ctypes.Structure):
    """As the structure in `cross_entropy.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("scores", "grads", "target")),
        *((name, ctypes.c_void_p) for name in ("largest", "log_sum", "slope")),
        ("rows", ctypes.c_int),
        ("classes", ctypes.c_int),
    )


@dataclass(frozen=True)
class CrossEntropyTile:
    """What the kernel is compiled with."""

    cluster: int = 1
    kernel: str = "cross_entropy"
    threads: int = 256
    shared_bytes: int = 0
    grid: bool = False

    def variant(self, arch: str) -> Variant:
        return Variant("cross_entropy.cu", arch)


def cross_entropy_launcher(scores_NV: Tensor) -> Launcher | None:
    """For scores like these; None where torch's operators have to do. A forward pass asks, so that
    its backward pass finds it loaded."""
    if not scores_NV.is_cuda or not serves(scores_NV):
        return None
    return launcher_beside(scores_NV, CrossEntropyTile(), "the kernel of cross entropy")


def serves(scores_NV: Tensor) -> bool:
    """Of a log-softmax in other numbers, which is rounded to them, nobody can tell the sum."""
    rows, classes = scores_NV.shape
    small = rows < 2**31 and classes < 2**31 - 4 * CrossEntropyTile.threads
    return scores_NV.dtype is torch.float32 and scores_NV.is_contiguous() and rows > 0 and small


class RowSums(NamedTuple):
    """Of each row: its largest score, the logarithm of the sum of the exponentials of what each is
    below that, and what arrives at the log-softmax of its target."""

    largest_N: Tensor
    log_sum_N: Tensor
    slope_N: Tensor


def cross_entropy_gradient(
    launcher: Launcher, scores_NV: Tensor, target_N: Tensor, rows: RowSums, out_NV: Tensor
) -> None:
    """All contiguous. `out_NV` may be the scores."""
    tensors = (scores_NV, out_NV, target_N, *rows)
    places = (tensor.data_ptr() for tensor in tensors)
    with torch.cuda.device(scores_NV.device):
        launcher(CrossEntropyArguments(*places, *scores_NV.shape), scores_NV.shape[0])
