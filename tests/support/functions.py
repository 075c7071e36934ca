"""A custom autograd function for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Doubled(torch.autograd.Function):
    """Keeps its input, which it would not need."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2
