"""CUDA kernels from source: `key` names a variant, `nvrtc` compiles it, `store` keeps it."""

from __future__ import annotations

from ecornn.kernels.jit.key import Variant, cache_key
from ecornn.kernels.jit.nvrtc import (
    STANDARD,
    CompileError,
    build,
    compiler_unavailable,
    compiler_version,
)
from ecornn.kernels.jit.store import cached
from ecornn.settings import settings

__all__ = [
    "CompileError",
    "Variant",
    "build",
    "cache_key",
    "cached",
    "compiled",
    "compiler_unavailable",
]


def compiled(variant: Variant) -> bytes:
    """The variant's machine code, from the store or built now."""
    key = cache_key(variant, (STANDARD,), compiler_version())
    return cached(settings().cache / "kernels", key, lambda: build(variant))
