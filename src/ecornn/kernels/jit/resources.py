"""What a compiled kernel takes of a multiprocessor, read from its machine code without a GPU."""

from __future__ import annotations

import struct
from typing import NamedTuple

from ecornn.kernels.jit.nvrtc import CompileError

# attributes of the section .nv.info, each with (symbol, value)
_REGISTERS = 0x2F
_FRAME_BYTES = 0x11
#: Form of an attribute that has a payload of its own length.
_SIZED = 4


class Resources(NamedTuple):
    registers: int  # of a thread
    #: Local memory of a thread: registers spilled, or arrays that registers cannot index.
    frame_bytes: int


def resources(cubin: bytes) -> Resources:
    """Of the largest kernel in the file."""
    found = {_REGISTERS: 0, _FRAME_BYTES: 0}
    for attribute, payload in _attributes(_section(cubin, b".nv.info")):
        if attribute in found and len(payload) == 8:
            found[attribute] = max(found[attribute], struct.unpack("<II", payload)[1])
    if not found[_REGISTERS]:
        raise CompileError("the machine code does not say how many registers it takes")
    return Resources(found[_REGISTERS], found[_FRAME_BYTES])


def _section(elf: bytes, name: bytes) -> bytes:
    if elf[:5] != b"\x7fELF\x02":
        raise CompileError("not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    strings = headers[names][4]
    for header in headers:
        start = strings + header[0]
        if elf[start : elf.index(b"\0", start)] == name:
            return elf[header[4] : header[4] + header[5]]
    raise CompileError(f"the machine code has no section {name.decode()}")


def _attributes(section: bytes) -> list[tuple[int, bytes]]:
    found, at = [], 0
    while at + 4 <= len(section):
        form, attribute, size = struct.unpack_from("<BBH", section, at)
        length = size if form == _SIZED else 0
        found.append((attribute, section[at + 4 : at + 4 + length]))
        at += 4 + length
    return found
