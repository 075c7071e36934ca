"""GPUs that kernels are compiled for."""

from __future__ import annotations

import pytest

from ecornn.kernels.jit import compiler_unavailable
from ecornn.kernels.persistent.choose import Chip

needs_compiler = pytest.mark.skipif(
    compiler_unavailable() is not None, reason=str(compiler_unavailable())
)

HOPPER = Chip(132, 232448, ((2, 66), (4, 30), (8, 15), (16, 7)))
#: Multiprocessors and shared memory of an A100, an A10, an L4, an H200, a B200, an RTX 5090.
CHIPS = {
    "sm_80": Chip(108, 166912),
    "sm_86": Chip(72, 101376),
    "sm_89": Chip(58, 101376),
    "sm_90a": HOPPER,
    "sm_100a": Chip(148, 232448),
    "sm_120": Chip(170, 101376),
}
KERNELS = ("forward", "backward")
