"""Compile a variant to machine code with NVRTC, which needs neither a GPU nor an installed CUDA."""

from __future__ import annotations

import importlib.util
from threading import Lock
from typing import Any

from ecornn.errors import EcornnError
from ecornn.kernels.jit.key import SOURCES, Variant

STANDARD = "c++17"
#: Imported by two threads at once, cuda-core shows one of them a package without its names.
_IMPORTING = Lock()


class CompileError(EcornnError, RuntimeError):
    """NVRTC refused a kernel; the message has its log."""


def compiler_unavailable() -> str | None:
    """Why kernels cannot be compiled here; None if they can."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
        return "cuda-core is not installed; pip install 'ecornn[cuda]'"
    return None


def compiler_version() -> str:
    from cuda.bindings import nvrtc

    error, major, minor = nvrtc.nvrtcVersion()
    if int(error) != 0:
        raise CompileError(f"NVRTC does not say its version: {error}")
    return f"nvrtc {major}.{minor}"


def build(variant: Variant) -> bytes:
    """The variant's cubin."""
    with _IMPORTING:
        from cuda.core import Program, ProgramOptions

    code = (SOURCES / variant.source).read_text()
    options = ProgramOptions(
        name=variant.source,
        arch=variant.arch,
        std=STANDARD,
        include_path=[str(SOURCES)],
        define_macro=variant.macros or None,
    )
    program: Any = Program(code, "c++", options)
    try:
        compiled = bytes(program.compile("cubin").code)
    except Exception as error:  # cuda-core's own type is not public; the log is in its text
        raise CompileError(f"{variant} does not compile:\n{error}") from error
    finally:
        program.close()
    return compiled
