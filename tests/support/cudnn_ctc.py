"""A stand-in for cuDNN's CTC loss on the CPU: torch's own, called with what cuDNN would be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class CudnnOnTheCpu(TorchDispatchMode):
    """Runs `aten._cudnn_ctc_loss`, and refuses what cuDNN could not take."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not aten._cudnn_ctc_loss.Tensor:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        return losses_and_gradient(*args, **(kwargs or {}))


def losses_and_gradient(
    scores: Tensor,
    labels: Tensor,
    frames: Tensor,
    lengths: Tensor,
    blank: int,
    deterministic: bool,
    zero_infinity: bool,
) -> tuple[Tensor, Tensor]:
    assert scores.dtype is torch.float32
    assert (labels.dim(), labels.dtype, labels.is_contiguous()) == (1, torch.int32, True)
    assert frames.dtype is lengths.dtype is torch.int32
    assert lengths.max() < 256
    assert bool((lengths <= frames).all())
    assert (blank, deterministic, zero_infinity) == (0, True, False)
    # its own derivative: a dispatch mode is called below autograd
    given = scores, labels[: lengths.sum()].long(), frames.tolist(), lengths.tolist()
    losses, paths = aten._ctc_loss(*given)
    return losses, aten._ctc_loss_backward(torch.ones_like(losses), *given, losses, paths, 0)
