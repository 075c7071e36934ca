"""When torch hands a CTC loss to cuDNN, and what that makes: facts for tensors without numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Lengths = Tensor | Sequence[int]

#: A text of as many labels is not cuDNN's.
TOO_LONG = 256


def cudnn_may_take(
    log_probs: Tensor, targets: Tensor, frames: Lengths, texts: Lengths, blank: int = 0
) -> bool:
    """Would torch hand such a loss to cuDNN? As `aten._use_cudnn_ctc_loss` asks, but for the
    numbers in tensors: of lengths on the device none may be 256 labels or more, or more than its
    frames, and torch reads them to know."""
    if not (torch.backends.cudnn.is_available() and torch.backends.cudnn.enabled and blank == 0):
        return False
    if not (log_probs.is_cuda and log_probs.dim() == 3 and log_probs.dtype is torch.float32):
        return False
    if not (targets.dim() == 1 and targets.dtype is torch.int32 and targets.is_contiguous()):
        return False
    if isinstance(frames, Tensor) and isinstance(texts, Tensor):
        return frames.dtype is torch.int32 and texts.dtype is torch.int32
    pairs = list(zip(frames, texts, strict=False))
    whole = all(frame == log_probs.shape[0] for frame, _ in pairs)
    short = all(text < TOO_LONG and text <= frame for frame, text in pairs)
    return targets.device.type == "cpu" and whole and short


def made_by_cudnn(log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """The losses, and the gradient of their sum, which the backward pass only scales."""
    gradient = torch.empty_like(log_probs, memory_format=torch.contiguous_format)
    return log_probs.new_empty(log_probs.shape[1]), gradient
