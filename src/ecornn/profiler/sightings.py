"""What the program tells of tensors whose allocations are read later.

Nothing is known of an allocation before the step has ended. So what a tensor is for and what keeps
it is written down by the address of its storage and the number that the marks had come to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ecornn.profiler.compiled import Value
from ecornn.profiler.lives import FIRST, Lives
from ecornn.profiler.operators import COMPILED
from ecornn.profiler.places import Folders
from ecornn.profiler.roles import Entry
from ecornn.profiler.storages import PLAIN, STRIDED, Record, parts

#: After all that is recorded.
LAST = 1 << 62
HANDED = "handed"


#: A storage that was seen: a number that tells which one of those at its address, that address, and
#: the tensor's shape, None for nested ones, and dtype. Thousands are made: plain ones take a third
#: of the time of those with names.
Sighting = tuple[int, int, tuple[int, ...] | None, torch.dtype]


class Keeper(NamedTuple):
    """A node of autograd's. `values`: what compiled code tells of the storages that it keeps."""

    text: str
    of_this_step: bool
    values: dict[int, Value]


@dataclass(frozen=True)
class Seen:
    """All that was told, without the tensors: numbers and texts."""

    roles: list[tuple[Sighting, str, str, str]] = field(default_factory=list)
    kept: list[tuple[Sighting, Keeper, Value | None]] = field(default_factory=list)

    @property
    def addresses(self) -> set[int]:
        """Of all that were seen."""
        found = {address for (_, address, _, _), *_ in self.kept}
        found.update([address for (_, address, _, _), *_ in self.roles])
        return found

    def apply(self, lives: Lives) -> None:
        """To the records of the allocations."""
        told: dict[int, Record] = {}
        find = lives.find
        for (number, address, shape, dtype), role, text, module in self.roles:
            record = find(address, number)
            if record is None:
                continue  # in memory that the allocator does not count
            if not record.born:
                told.setdefault(id(record), record)
            if record.dtype is None:
                _describe(record, shape, dtype)
            if role is HANDED:
                record.was_handed_over()
            else:
                record.take_role(role, text, module)
        for (number, address, shape, dtype), by, value in self.kept:
            record = find(address, number)
            if record is not None:
                if not record.born:
                    told.setdefault(id(record), record)
                if record.dtype is None:
                    _describe(record, shape, dtype)
                _keep(record, by, value, lives.folders)
        lives.in_order(told.values())
        for record in lives.records:
            if record.born:
                break  # they come first
            if not record.role and not record.kept_by:
                record.role = "other"


class Sightings:
    def __init__(self, device: torch.device, now: Callable[[], int]) -> None:
        self._device = device
        #: Called whenever something is seen while the allocator is recorded.
        self._now = now
        self.recording = False
        self._began = False
        self._number: int | None = None
        self.elsewhere: set[torch.device] = set()
        self.seen = Seen()
        #: By when the graph was read: address and keeper.
        self._kept_at: dict[int, set[tuple[int, str]]] = {}

    def begin(self) -> None:
        self.recording = self._began = True

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """For much that is seen while nothing is done."""
        self._number = self._now() if self.recording else None
        try:
            yield
        finally:
            self._number = None

    def end(self) -> None:
        self.recording = False

    def mark(self, entries: Sequence[Entry], *, before: bool) -> None:
        """`before` or not: an allocation tells itself when it was made."""
        if not entries:
            return
        number = self._number
        if number is None:
            number = self._now() if self.recording else LAST if self._began else FIRST
        see, found = self._see, self.seen.roles
        for tensor, role, text, module in entries:
            plain = type(tensor) in PLAIN and tensor.layout is STRIDED
            for part in (tensor,) if plain else parts(tensor):
                sighting = see(part, number)
                if sighting is not None:
                    found.append((sighting, role, text, module))

    def handed(self, tensor: Tensor) -> None:
        self.mark([(tensor, HANDED, "", "")], before=True)

    def kept(self, tensors: Iterable[Tensor], number: int, by: Keeper) -> None:
        """For the backward pass of one node."""
        known, text = self._kept_at.setdefault(number, set()), by.text
        for tensor in tensors:
            plain = type(tensor) in PLAIN and tensor.layout is STRIDED
            for part in (tensor,) if plain else parts(tensor):
                seen = self._see(part, number)
                # weights and states are kept by one operator over and over
                if seen is not None and (seen[1], text) not in known:
                    known.add((seen[1], text))
                    value = by.values.get(part.untyped_storage()._cdata) if by.values else None
                    self.seen.kept.append((seen, by, value))

    def _see(self, part: Tensor, number: int) -> Sighting | None:
        """Of a tensor with a storage that can be reached and is on the device. Each question to a
        tensor takes some fifty nanoseconds, and a step has thousands of both."""
        device = part.device
        if device != self._device:
            self.elsewhere.add(device)
            return None
        try:
            # Not by the storage itself: its Python object would stay with it, and cost as much
            # again when it dies.
            address, offset, shape = part.data_ptr(), part.storage_offset(), part.shape
        except RuntimeError:
            return self._see_odd(part, number)
        if offset:  # of most it is 0
            address -= int(offset) * part.element_size()
        return (number, address, shape, part.dtype) if address else None

    def _see_odd(self, part: Tensor, number: int) -> Sighting | None:
        """Of one that has no shape, as nested ones of torch's first kind, or whose storage is out
        of reach, as of tensors in torch.func."""
        try:
            offset = int(part.storage_offset()) * part.element_size()
            address = part.data_ptr() - offset
        except RuntimeError:
            return None
        return (number, address, None, part.dtype) if address and part.is_nested else None


def _describe(record: Record, shape: tuple[int, ...] | None, dtype: torch.dtype) -> None:
    """By a tensor that fills it."""
    if shape is not None and math.prod(shape) * dtype.itemsize == record.bytes:
        record.shape, record.dtype = shape, dtype


def _keep(record: Record, by: Keeper, value: Value | None, folders: Folders) -> None:
    if by.of_this_step and not record.born and not record.role:
        record.role = "inputs"  # an operator of the step has read what it did not make
    if by.text not in record.kept_by:
        record.kept_by += (by.text,)
    if value is not None and record.born and not record.role:
        record.module, record.line_text = value.module or "", value.line_text(folders)
        record.operator = value.operator or COMPILED
