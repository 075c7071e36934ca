"""Bytes as people write them: "24GiB"."""

from __future__ import annotations

import re

from ecornn.errors import InvalidInput

UNITS = {"B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", 1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


def read_size(argument: str, text: str, expected: str) -> int:
    """The bytes that `text` says; `argument` and `expected` are for the error."""
    found = _SIZE.fullmatch(text)
    units = {unit.lower(): factor for unit, factor in UNITS.items()}
    if found is None or found[2].lower() not in units:
        raise InvalidInput(argument, repr(text), expected, f"units are {', '.join(UNITS)}")
    return int(float(found[1]) * units[found[2].lower()])


def size_text(count: int) -> str:
    """Such as "1.50 GiB"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(count) >= UNITS[unit]:
            return f"{count / UNITS[unit]:.2f} {unit}"
    return f"{count} B"
