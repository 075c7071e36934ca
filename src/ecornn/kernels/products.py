"""Products in wider numbers than those that are multiplied."""

from __future__ import annotations

import torch
from torch import Tensor


def product_in(
    dtype: torch.dtype, left: Tensor, right: Tensor, before: Tensor | None = None
) -> Tensor:
    """`left @ right`, added to what was there before: by the product itself, with no second matrix
    and no kernel that adds the two. `dtype` is theirs or, on CUDA, float32."""
    if left.dtype == dtype:
        return left @ right if before is None else before.addmm_(left, right)
    if before is None:
        return torch.mm(left, right, out_dtype=dtype)
    return torch.addmm(before, left, right, out_dtype=dtype, out=before)
