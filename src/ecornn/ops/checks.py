"""Checks of values, which only the operator's own run can make."""

from __future__ import annotations

import torch
from torch import Tensor

from ecornn.errors import InvalidInput


def check_lengths_within(lengths_B: Tensor | None, steps: int) -> None:
    """Refuse lengths outside 0…steps. Skipped while a CUDA graph is being captured, where the
    values cannot be read; there a length beyond the end counts as the end."""
    if lengths_B is None or lengths_B.numel() == 0:
        return
    if lengths_B.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    # one copy and no kernel: the least a GPU can be waited for
    values = lengths_B.flatten().tolist()
    least, most = min(values), max(values)
    if least < 0:
        raise InvalidInput(
            "lengths", f"a length of {least}", f"0 to {steps}", "count the steps of each sequence"
        )
    if most > steps:
        raise InvalidInput(
            "lengths",
            f"a length of {most}",
            f"at most the input's {steps} steps",
            "pad the input to the longest sequence",
        )
