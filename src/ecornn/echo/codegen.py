"""What makes code of a graph: inductor, or nobody, where operators run one by one."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from torch import Tensor


def choose_codegen(asked: str | None, inputs: Sequence[Any]) -> tuple[str, str]:
    """(code generation, why)"""
    if asked is not None:
        return asked, "asked for"
    if not _on_cuda(inputs):
        return "eager", "the graph has no input on CUDA"
    if importlib.util.find_spec("triton") is None:
        return "eager", "Triton is not installed"
    return "inductor", "the graph runs on CUDA and Triton is installed"


def _on_cuda(inputs: Sequence[Any]) -> bool:
    return any(isinstance(x, Tensor) and x.device.type == "cuda" for x in inputs)


def start_compilers(inputs: Sequence[Any]) -> None:
    """torch's processes that compile kernels for CUDA, as its own backend starts them: until they
    are there, kernels are compiled one after the other."""
    if not _on_cuda(inputs):
        return
    from torch._inductor import async_compile

    start = getattr(async_compile, "maybe_warm_pool", None)
    if start is not None:
        start()
