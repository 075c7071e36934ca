"""CUDA kernels from source: `key` names a variant, `nvrtc` compiles it, `store` keeps it."""

from ecornn.kernels.jit.key import Variant, cache_key
from ecornn.kernels.jit.nvrtc import CompileError, build, compiler_unavailable
from ecornn.kernels.jit.store import cached

__all__ = ["CompileError", "Variant", "build", "cache_key", "cached", "compiler_unavailable"]
