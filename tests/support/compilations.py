"""What the compiler says of a kernel: what it said before, where neither has changed since.

Compiling every variant for every architecture takes a third of the time that the suite has, and
gives the same code as long as sources, constants, flags and compiler are the same. The compiler's
file, such as `kernels/compiled-by-nvrtc-13.4.92.txt`, has what was said under a key that covers all
of these. A variant that is not there is compiled; so is one in twenty of the others, another each
day, and must be said to take what it took; and of every source one for each architecture in every
run (`test_compiles.py`). `make compilations` compiles all, and writes the file.
"""

from __future__ import annotations

import os
from datetime import date
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ecornn.kernels.jit import Variant, build, cache_key
from ecornn.kernels.jit.nvrtc import STANDARD, compiler_version
from ecornn.kernels.jit.resources import Resources, resources

FOLDER = Path(__file__).parents[1] / "kernels"
#: Of the variants that are known, one is compiled all the same.
ONE_OF = 20


class Recording:
    """Whether all are compiled and written down, as `make compilations` does."""

    on = False


@cache
def said_of(variant: Variant) -> Resources:
    key = key_of(variant)
    before = None if Recording.on else known().get(key)
    if before is not None and int(key, 16) % ONE_OF != date.today().toordinal() % ONE_OF:
        return before
    found = compile_now(variant)
    if Recording.on:
        write_down(key, found)
    assert before in (None, found), f"{variant}: said to take {before}; run: make compilations"
    return found


def key_of(variant: Variant) -> str:
    return cache_key(variant, (STANDARD,), compiler())[:20]


@cache
def compiler() -> str:
    """To the last digit, where a package brought it."""
    try:
        return f"nvrtc {version('nvidia-cuda-nvrtc')}"
    except PackageNotFoundError:
        return compiler_version()


def file() -> Path:
    return FOLDER / f"compiled-by-{compiler().replace(' ', '-')}.txt"


@cache
def known() -> dict[str, Resources]:
    if not file().exists():
        return {}
    lines = (line.split() for line in file().read_text().splitlines())
    return {key: Resources(int(registers), int(frame)) for key, registers, frame in lines}


def compile_now(variant: Variant) -> Resources:
    code = build(variant)
    assert Path(variant.source).stem.encode() in code  # its kernel
    return resources(code)


def write_down(key: str, found: Resources) -> None:
    """At once, in one piece: several processes do."""
    line = f"{key} {found.registers} {found.frame_bytes}\n".encode()
    opened = os.open(file(), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(opened, line)
    finally:
        os.close(opened)
