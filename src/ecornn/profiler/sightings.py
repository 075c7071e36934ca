"""What the program tells of tensors whose allocations are read later.

Nothing is known of an allocation before the step has ended. So what a tensor is for and what keeps
it is written down by the address of its storage and the number that the marks had come to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ecornn.profiler.compiled import Value
from ecornn.profiler.lives import FIRST, Lives
from ecornn.profiler.operators import COMPILED
from ecornn.profiler.storages import Record, parts

#: After all that is recorded.
LAST = 1 << 62
HANDED = "handed"


class Sighting(NamedTuple):
    """A storage that was seen. `number`: which one of those at its address."""

    number: int
    address: int
    #: Of the tensor; None for nested ones.
    shape: tuple[int, ...] | None
    dtype: torch.dtype


class Keeper(NamedTuple):
    """A node of autograd's. `values`: what compiled code tells of the storages that it keeps."""

    text: str
    of_this_step: bool
    values: dict[int, Value]


class Sightings:
    def __init__(self, device: torch.device, now: Callable[[], int]) -> None:
        self._device = device
        #: Called whenever something is seen while the allocator is recorded.
        self._now = now
        self.recording = False
        self._began = False
        self._number: int | None = None
        self.elsewhere: set[torch.device] = set()
        self._roles: list[tuple[Sighting, str, str, str]] = []
        self._kept: list[tuple[Sighting, Keeper, Value | None]] = []
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

    def mark(self, tensor: Tensor, role: str, text: str, module: str, *, before: bool) -> None:
        """`before` or not: an allocation tells itself when it was made."""
        self._marked(tensor, role, text, module)

    def handed(self, tensor: Tensor) -> None:
        self._marked(tensor, HANDED, "", "")

    def kept(self, tensors: Iterable[Tensor], number: int, by: Keeper) -> None:
        """For the backward pass of one node."""
        known, text = self._kept_at.setdefault(number, set()), by.text
        for tensor in tensors:
            for part in parts(tensor):
                key = (address_of(part), text)
                # weights and states are kept by one operator over and over
                if key not in known:
                    known.add(key)
                    seen = self._seen(part, number)
                    if seen is not None:
                        value = by.values.get(part.untyped_storage()._cdata) if by.values else None
                        self._kept.append((seen, by, value))

    def _marked(self, tensor: Tensor, role: str, text: str, module: str) -> None:
        number = self._number
        if number is None:
            number = self._now() if self.recording else LAST if self._began else FIRST
        for part in parts(tensor):
            seen = self._seen(part, number)
            if seen is not None:
                self._roles.append((seen, role, text, module))

    def _seen(self, part: Tensor, number: int) -> Sighting | None:
        """Of a tensor with a storage that can be reached and is on the device."""
        if part.device != self._device:
            self.elsewhere.add(part.device)
            return None
        address = address_of(part)
        if not address:
            return None
        shape: tuple[int, ...] | None = None if part.is_nested else part.shape
        return Sighting(number, address, shape, part.dtype)

    @property
    def addresses(self) -> set[int]:
        seen = [one[0] for one in self._roles] + [one[0] for one in self._kept]
        return {one.address for one in seen}

    def apply(self, lives: Lives) -> None:
        """To the records of the allocations."""
        told: dict[int, Record] = {}
        for seen, role, text, module in self._roles:
            record = lives.find(seen.address, seen.number)
            if record is None:
                continue  # in memory that the allocator does not count
            told.setdefault(id(record), record)
            _describe(record, seen)
            if role is HANDED:
                record.was_handed_over()
            else:
                record.take_role(role, text, module)
        for seen, by, value in self._kept:
            record = lives.find(seen.address, seen.number)
            if record is not None:
                told.setdefault(id(record), record)
                _describe(record, seen)
                _keep(record, by, value)
        lives.in_order(record for record in told.values() if not record.born)
        for record in lives.records:
            if record.born:
                break  # they come first
            if not record.role and not record.kept_by:
                record.role = "other"


def address_of(part: Tensor) -> int:
    """Of its storage; 0 if that is empty, or out of reach as of tensors in torch.func. Not by the
    storage itself: its Python object would stay with it, and cost as much again when it dies."""
    try:
        return part.data_ptr() - int(part.storage_offset()) * part.element_size()
    except RuntimeError:
        return 0


def _describe(record: Record, seen: Sighting) -> None:
    """By a tensor that fills it."""
    if record.dtype is not None or seen.shape is None:
        return
    if math.prod(seen.shape) * seen.dtype.itemsize == record.bytes:
        record.shape, record.dtype = seen.shape, seen.dtype


def _keep(record: Record, by: Keeper, value: Value | None) -> None:
    if by.of_this_step and not record.born and not record.role:
        record.role = "inputs"  # an operator of the step has read what it did not make
    if by.text not in record.kept_by:
        record.kept_by += (by.text,)
    if value is not None and record.born and not record.role:
        record.module, record.line_text = value.module or "", value.line_text
        record.operator = value.operator or COMPILED
