"""Amounts of memory as people write them."""

from __future__ import annotations

import re

UNITS = {"B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", 1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


def read_size(text: str) -> int | None:
    """Bytes of a text such as "6GiB", or None if it is not one."""
    found = _SIZE.fullmatch(text)
    units = {unit.lower(): factor for unit, factor in UNITS.items()}
    if found is None or found[2].lower() not in units:
        return None
    return int(float(found[1]) * units[found[2].lower()])


def size_text(count: int) -> str:
    """Such as "1.50 GiB"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(count) >= UNITS[unit]:
            return f"{count / UNITS[unit]:.2f} {unit}"
    return f"{count} B"
