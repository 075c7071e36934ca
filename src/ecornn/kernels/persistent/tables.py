"""The tables of tiles that were the fastest of those that were measured: the package's, and this
machine's own. An entry is a request, the tile and blocks that served it, and what a step took."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from ecornn.kernels.persistent.tile import Tile
from ecornn.settings import settings

#: Tiles that were the fastest of many on an H200, one for each request that was measured.
TUNED = Path(__file__).with_name("tuned.json")

#: Numbers that cost the same: what is measured for one of them holds for the other.
HALF = ("bf16", "fp16", "half")

_TILE_NAMES = frozenset(field.name for field in fields(Tile))


def key_of(ask: dict[str, Any]) -> tuple[Any, ...]:
    """Of a request's values."""
    # lengths or resets change nothing that a tile depends on
    numbers = "half" if ask["numbers"] in HALF else ask["numbers"]
    return (*(ask[name] for name in ("kernel", "cell", "hidden", "batch", "directions")), numbers)


@cache
def table() -> dict[tuple[Any, ...], dict[str, Any]]:
    """What was measured for the package, and on top of it what was measured on this machine, but
    for tiles that kernels of another version had."""
    own = read_entries(own_table())
    older = [entry for entry in own if not entry["tile"].keys() <= _TILE_NAMES]
    if older:
        again = dict.fromkeys(_command(entry["request"]) for entry in older)
        warnings.warn(
            f"tiles in {own_table()} are of another version's kernels and are not used; measure "
            f"these sizes anew: {'; '.join(again)}",
            stacklevel=2,
        )
    used = (entry for entry in own if entry not in older)
    return {key_of(entry["request"]): entry for entry in [*read_entries(TUNED), *used]}


def _command(ask: dict[str, Any]) -> str:
    """What measures a size, forwards and backwards."""
    size = f"--hidden {ask['hidden']} --batch {ask['batch']}"
    both = " --bidirectional" if ask["directions"] == 2 else ""
    return f"ecornn tune {size} --cell {ask['cell']} --numbers {ask['numbers']}{both}"


def own_table() -> Path:
    return settings().cache / "tuned.json"


def read_entries(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return found


def remember(entries: list[dict[str, Any]]) -> Path:
    """Add entries to this machine's own table, in place of older ones for the same requests."""
    path = own_table()
    entries = [*_of_more_precise(entries), *entries]
    kept = {key_of(e["request"]): e for e in [*read_entries(path), *entries]}
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".tuned-")
    with os.fdopen(handle, "w") as file:
        file.write(as_text(kept.values()))
    Path(name).replace(path)
    table.cache_clear()
    return path


def _of_more_precise(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What an entry for TF32 was for more precise numbers (`choose.py`), where another one comes in
    its place that is not: for these it stays what was measured the fastest."""
    found = []
    for entry in entries:
        request = entry["request"]
        before = table().get(key_of(request))
        if request["numbers"] != "tf32" or before is None:
            continue
        if before["tile"].get("numbers") != "ieee" or entry["tile"].get("numbers") == "ieee":
            continue
        for numbers in ("tf32x3", "ieee"):
            own = {**request, "numbers": numbers}
            if key_of(own) not in table():
                found.append({**before, "request": own})
    return found


def as_text(entries: Iterable[dict[str, Any]]) -> str:
    """A table's form: one entry a line, so that a change is seen."""
    return "[\n" + ",\n".join(json.dumps(e) for e in entries) + "\n]\n"
