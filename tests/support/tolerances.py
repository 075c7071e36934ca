"""One table of tolerances for every comparison with a float64 reference.

A value passes when ‖out − ref‖ / ‖ref‖ is within the bound, and nothing is NaN. The bounds are a
few times what rounding costs: one unit of roundoff for what is computed once, growing with the
square root of the number of steps for what runs through the recurrence.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Relative error of a single step.
ONE_STEP = {
    torch.float64: 1e-13,
    torch.float32: 2e-6,
    torch.bfloat16: 1e-2,
    torch.float16: 2e-3,
}

#: cuDNN's float32 kernels approximate tanh and the sigmoid: without TF32, an LSTM of six units was
#: 5.7e-6 off after seven steps on an H200, beyond the table's bound for kernels that do not.
ONE_STEP_OF_CUDNN = ONE_STEP | {torch.float32: 1e-5}


#: Each derivative sums over one more dimension and loses a little more.
BY_ORDER = (1, 2, 10)


def tolerance(dtype: torch.dtype, steps: int = 1, *, cudnn: bool = False, order: int = 0) -> float:
    """The bound for a value, or for its derivative of the given order."""
    one_step = (ONE_STEP_OF_CUDNN if cudnn else ONE_STEP)[dtype]
    return one_step * math.sqrt(max(1, steps)) * BY_ORDER[order]


def relative_error(out: Tensor, ref: Tensor) -> float:
    out, ref = out.detach().double().cpu(), ref.detach().double().cpu()
    assert out.shape == ref.shape, f"{tuple(out.shape)} against {tuple(ref.shape)}"
    scale = ref.norm().item()
    error = (out - ref).norm().item()
    return error / scale if scale > 0 else error


def assert_matches(out: Tensor, ref: Tensor, bound: float, what: str = "value") -> None:
    """`out` is within `bound` of the float64 `ref`, as a whole; NaN and infinity never pass."""
    error = relative_error(out, ref)
    assert error <= bound, f"{what}: relative error {error:.2e}, allowed {bound:.2e}"
