"""Compiled kernels on disk: owner-only, written whole or not at all, checked before they are used.

Many processes may build the same variant at once; each writes a file of its own and renames it
into place, so that a reader sees a whole file or none.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from ecornn.errors import EcornnError

#: A file is this, the SHA-256 of what follows, and the machine code.
MAGIC = b"ecornn-cubin-1\n"
DIGEST_BYTES = 32


class UnsafeCache(EcornnError, RuntimeError):
    """The cache folder could be written by others, so what is in it must not be used."""


def cached(folder: Path, key: str, make: Callable[[], bytes]) -> bytes:
    """The code stored under `key`, or what `make` gives, stored. A damaged file is made anew."""
    path = folder / f"{key}.cubin"
    found = _read(path)
    if found is None:
        found = make()
        write_whole(path, MAGIC + hashlib.sha256(found).digest() + found)
    return found


def _read(path: Path) -> bytes | None:
    try:
        check_owner(path.parent)
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    start = len(MAGIC) + DIGEST_BYTES
    code = content[start:]
    if content[:start] != MAGIC + hashlib.sha256(code).digest():
        return None
    return code


def write_whole(path: Path, content: bytes) -> None:
    """Renamed into place when it is whole, in a folder that only its owner can write."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_owner(path.parent)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".building-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def check_owner(folder: Path) -> None:
    if not hasattr(os, "getuid"):
        return
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise UnsafeCache(
            f"{folder} belongs to another user or can be written by others; "
            f"make it yours alone (chmod 700), or set ECORNN_CACHE to a folder that is"
        )
