"""A kernel variant, and the key that covers everything its machine code depends on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent.parent / "cuda"


@dataclass(frozen=True)
class Variant:
    """One source file with its compile-time constants, for one architecture."""

    source: str  # a file name in kernels/cuda
    arch: str  # such as "sm_90a"
    constants: tuple[tuple[str, int], ...] = ()

    @property
    def macros(self) -> list[tuple[str, str]]:
        return [(name, str(value)) for name, value in self.constants]

    def __str__(self) -> str:
        values = ", ".join(f"{name}={value}" for name, value in self.constants)
        return f"{self.source} for {self.arch} ({values})"


@cache
def sources_digest() -> str:
    """Of every source and header: an included file changes the code of those that include it."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.glob("*.cu*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def cache_key(variant: Variant, flags: tuple[str, ...], compiler: str) -> str:
    parts = [
        variant.source,
        variant.arch,
        sorted(variant.constants),
        list(flags),
        compiler,
        sources_digest(),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
