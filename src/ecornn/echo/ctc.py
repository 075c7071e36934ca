"""What the operators of the CTC loss make, told without numbers; torch cannot tell it. With each,
the bytes that it takes and gives back meanwhile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ecornn.ctc import Lengths, cudnn_may_take, made_by_cudnn
from ecornn.echo.cudnn import room_of_ctc
from ecornn.echo.graph import NotUnderstood


def use_cudnn_ctc_loss(*args: Any, **kwargs: Any) -> tuple[bool, int]:
    return cudnn_may_take(*args, **kwargs), 0


def use_cudnn_ctc_loss_for_sure(
    log_probs: Tensor, targets: Tensor, frames: Lengths, *rest: Any, **kwargs: Any
) -> tuple[bool, int]:
    """Where bytes are foretold: torch's own loss keeps others than cuDNN's."""
    found = cudnn_may_take(log_probs, targets, frames, *rest, **kwargs)
    if found and isinstance(frames, Tensor):
        raise NotUnderstood("whether cuDNN computes a CTC loss depends on how long its texts are")
    return found, 0


def use_miopen_ctc_loss(*_: Any, **__: Any) -> tuple[bool, int]:
    """Of another maker's GPUs; asked by torch 2.13."""
    if torch.version.hip is not None:
        raise NotUnderstood("what MIOpen's CTC loss makes is not known")
    return False, 0


def cudnn_ctc_loss(log_probs: Tensor, *_: Any, **__: Any) -> tuple[tuple[Tensor, Tensor], int]:
    return made_by_cudnn(log_probs), 0


def cudnn_ctc_loss_with_room(
    log_probs: Tensor,
    targets: Tensor,
    frames: Lengths,
    texts: Lengths,
    blank: int,
    deterministic: bool,
    zero_infinity: bool,
) -> tuple[tuple[Tensor, Tensor], int]:
    """Its workspace is measured on the GPU."""
    if not isinstance(frames, Tensor):
        raise NotUnderstood("what cuDNN's CTC loss takes for lengths on the host is not known")
    return made_by_cudnn(log_probs), room_of_ctc(log_probs, deterministic)


def ctc_loss(
    log_probs: Tensor, targets: Tensor, *_: Any, **__: Any
) -> tuple[tuple[Tensor, Tensor], int]:
    """The table of paths is as wide as the longest text, and no text is longer than its row."""
    if targets.dim() != 2 or log_probs.dim() != 3:
        raise NotUnderstood("a CTC loss whose longest text is not known without numbers")
    frames, batch, _classes = log_probs.shape
    paths = log_probs.new_empty(batch, frames, 2 * targets.shape[1] + 1)
    return (log_probs.new_empty(batch), paths), 0


def ctc_loss_backward(grad: Tensor, log_probs: Tensor, *rest: Any) -> tuple[Tensor, int]:
    """A second table of paths is there for a while; on a GPU a third one as well (measured, torch
    2.11)."""
    paths = rest[4]
    return torch.empty_like(log_probs), paths.nbytes * (2 if log_probs.is_cuda else 1)
