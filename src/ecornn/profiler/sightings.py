"""What the program tells of tensors whose allocations are read later.

Nothing is known of an allocation before the step has ended. So what a tensor is for and what keeps
it is written down by the address of its storage and the number that the marks had come to.
"""

from __future__ import annotations

from collections.abc import Callable
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
    #: Of a tensor that fills it; else () and None.
    shape: tuple[int, ...]
    dtype: torch.dtype | None


class Sightings:
    def __init__(self, device: torch.device, now: Callable[[], int]) -> None:
        self._device = device
        #: Called whenever something is seen while the allocator is recorded.
        self._now = now
        self.recording = False
        self._began = False
        self.elsewhere: set[str] = set()
        self._roles: list[tuple[Sighting, str, str, str]] = []
        self._kept: list[tuple[Sighting, str, bool, Value | None]] = []

    def begin(self) -> None:
        self.recording = self._began = True

    def end(self) -> None:
        self.recording = False

    @property
    def number(self) -> int:
        if self.recording:
            return self._now()
        return LAST if self._began else FIRST

    def mark(self, tensor: Tensor, role: str, text: str, module: str, *, before: bool) -> None:
        """`before` or not: an allocation tells itself when it was made."""
        number = self.number
        for seen in self._seen(tensor, number):
            self._roles.append((seen, role, text, module))

    def handed(self, tensor: Tensor) -> None:
        number = self.number
        for seen in self._seen(tensor, number):
            self._roles.append((seen, HANDED, "", ""))

    def kept(
        self, tensor: Tensor, number: int, by: str, *, of_this_step: bool, values: dict[int, Value]
    ) -> None:
        """For a backward pass; `values`: what compiled code tells of the storages that it keeps."""
        for part in parts(tensor):
            value = values.get(part.untyped_storage()._cdata) if values else None
            for seen in self._seen(part, number):
                self._kept.append((seen, by, of_this_step, value))

    def _seen(self, tensor: Tensor, number: int) -> list[Sighting]:
        found = []
        for part in parts(tensor):
            if part.device != self._device:
                self.elsewhere.add(str(part.device))
                continue
            storage = part.untyped_storage()
            address = storage.data_ptr()
            if address:
                whole = not part.is_nested and part.nbytes == storage.nbytes()
                what = (part.shape, part.dtype) if whole else ((), None)
                found.append(Sighting(number, address, *what))
        return found

    def apply(self, lives: Lives) -> None:
        """To the records of the allocations."""
        for seen, role, text, module in self._roles:
            record = lives.find(seen.address, seen.number)
            if record is None:
                continue  # in memory that the allocator does not count
            _describe(record, seen)
            if role is HANDED:
                record.was_handed_over()
            else:
                record.take_role(role, text, module)
        for seen, by, of_this_step, value in self._kept:
            record = lives.find(seen.address, seen.number)
            if record is not None:
                _describe(record, seen)
                _keep(record, by, of_this_step=of_this_step, value=value)
        for record in lives.records:
            if record.born:
                break  # they come first
            if not record.role and not record.kept_by:
                record.role = "other"


def _describe(record: Record, seen: Sighting) -> None:
    if record.dtype is None:
        record.shape, record.dtype = seen.shape, seen.dtype


def _keep(record: Record, by: str, *, of_this_step: bool, value: Value | None) -> None:
    if of_this_step and not record.born and not record.role:
        record.role = "inputs"  # an operator of the step has read what it did not make
    if by not in record.kept_by:
        record.kept_by.append(by)
    if value is not None and record.born and not record.role:
        record.module, record.line_text = value.module or "", value.line_text
        record.operator = value.operator or COMPILED
