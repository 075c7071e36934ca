"""The persistent forward kernel compiles for every architecture it is meant for, without a GPU."""

from __future__ import annotations

import pytest

from ecornn.kernels.jit import Variant, build, compiler_unavailable

pytestmark = pytest.mark.skipif(
    compiler_unavailable() is not None, reason=str(compiler_unavailable())
)

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120")
CELLS = ("lstm", "gru", "tanh", "relu")


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("cell", range(4), ids=CELLS)
@pytest.mark.parametrize("dtype", range(2), ids=["bf16", "fp16"])
def test_compiles(arch: str, cell: int, dtype: int) -> None:
    constants = {
        "CELL": cell,
        "DTYPE": dtype,
        "UNITS": 16,
        "CHUNKS": 2,
        "BATCH_TILES": 1,
        "WARPS": 8,
    }
    code = build(Variant("persistent_forward.cu", arch, tuple(constants.items())))
    assert code[:4] == b"\x7fELF"
    assert b"persistent_forward" in code
