"""Joint graphs of small functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_export_joint_simple


def joint_of(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    def as_tuple(*values: Tensor) -> tuple[Tensor, ...]:
        found = function(*values)
        return found if isinstance(found, tuple) else (found,)

    joint: fx.GraphModule = aot_export_joint_simple(as_tuple, inputs, trace_joint=True)
    return joint


def leaf(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, requires_grad=True)
