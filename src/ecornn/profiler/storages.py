"""Every storage of a step, from its birth to its death, watched without holding it.

A storage's Python object lives exactly as long as the storage, so a weak reference to it tells
when its memory is given up. Tensors are never referred to, and no lifetime changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}

STRIDED = torch.strided
#: A storage that has two roles is counted under the first.
ROLES = ("weights", "optimizer state", "gradients", "inputs", "other", "")
_RANK = {role: rank for rank, role in enumerate(ROLES)}
#: Of these a tensor is itself what has the storage, unless it is sparse.
PLAIN = frozenset((Tensor, torch.nn.Parameter))


def parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors that have a storage: itself, or those a sparse tensor or subclass is made of."""
    if type(tensor) in PLAIN and tensor.layout is torch.strided:
        return (tensor,)
    # looking into a sparse tensor calls operators, which are not the step's
    with _disable_current_modes():
        return tuple(_inner(tensor))


def within_reach(tensor: Tensor) -> bool:
    """False for the wrappers of torch.func, whose tensors only the dispatcher sees."""
    try:
        found = parts(tensor)
        return not found or found[0].untyped_storage() is not None
    except NotImplementedError:
        return False


def _inner(tensor: Tensor) -> Iterator[Tensor]:
    if is_lazy(tensor):
        return  # it has no storage until the model is first called
    if hasattr(tensor, "__tensor_flatten__"):
        inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        for one in inner:
            if isinstance(one, Tensor):  # a DTensor also names its mesh
                yield from parts(one)
    elif tensor.layout is torch.strided:
        yield tensor
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in _COMPRESSED:
        yield from (getattr(tensor, name)() for name in _COMPRESSED[tensor.layout])
        yield tensor.values()


@dataclass(slots=True)
class Record:
    """What will become a `Held`."""

    bytes: int
    #: Empty and None where only the allocator has seen it.
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    module: str
    operator: str
    line: tuple[Any, int] | None
    born: int
    freed: int | None = None
    #: Where the line is known by its text alone.
    line_text: str = ""
    #: Weights, gradients, optimizer state or inputs, once that is known.
    role: str = ""
    role_text: str = ""
    kept_by: tuple[str, ...] = ()

    def take_role(self, role: str, text: str, module: str) -> None:
        # Tied weights stand under their first name.
        if _RANK[role] < _RANK[self.role] or not self.role_text:
            self.role, self.role_text, self.module = role, text, module

    def was_handed_over(self) -> None:
        if not self.role and not self.module:
            self.role, self.role_text = "inputs", "handed to the model"


class _Watch(weakref.ref[Any]):
    __slots__ = ("key", "record")
    key: int
    record: Record


class Ledger:
    """The storages of one device. `clock` is the time of the operator that runs, or ran last."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.clock = 0
        self.bytes_alive = 0
        self.records: list[Record] = []
        #: By address, which is that of one storage as long as it lives.
        self._alive: dict[int, _Watch] = {}
        #: Devices of the tensors that are not counted.
        self.elsewhere: set[str] = set()
        self._on_death = self._died  # bound once, not for every storage

    def knows(self, tensor: Tensor) -> bool:
        """A plain tensor that was seen before, as most are."""
        plain = type(tensor) in PLAIN and tensor.layout is STRIDED
        return plain and tensor.untyped_storage()._cdata in self._alive

    def knows_as_it_is(self, tensor: Tensor) -> bool:
        """The same, and it has not been resized since."""
        if type(tensor) not in PLAIN or tensor.layout is not STRIDED:
            return False
        storage = tensor.untyped_storage()
        watch = self._alive.get(storage._cdata)
        return watch is not None and watch.record.bytes == storage.nbytes()

    def find(self, tensor: Tensor) -> Record | None:
        """Of a tensor with a storage."""
        watch = self._alive.get(tensor.untyped_storage()._cdata)
        return None if watch is None else watch.record

    def records_of(self, tensor: Tensor) -> Iterator[Record]:
        for part in parts(tensor):
            record = self.find(part) if part.device == self.device else None
            if record is not None:
                yield record

    def given(self, tensor: Tensor, role: str = "inputs", text: str = "", module: str = "") -> None:
        """A tensor that an operator reads, or the program has: if unknown, it was there before."""
        if self.knows(tensor):
            return
        for part in parts(tensor):
            if part.device != self.device:
                self.elsewhere.add(str(part.device))
            elif (storage := part.untyped_storage())._cdata not in self._alive:
                record = self._open(part, storage, module, "", None, born=0)
                if record is not None:
                    record.role, record.role_text = role, text

    def mark(self, entries: Iterable[tuple[Tensor, str, str, str]], *, before: bool) -> None:
        """What tensors are for: each with its role, that as a text, and its module. `before`: if
        nobody has seen it yet, it was there before the step."""
        for tensor, role, text, module in entries:
            if within_reach(tensor):
                self._mark(tensor, role, text, module, before=before)

    def _mark(self, tensor: Tensor, role: str, text: str, module: str, *, before: bool) -> None:
        if before:
            self.given(tensor, role, text, module)
        else:
            self.made(tensor, module, "", None)
        for record in self.records_of(tensor):
            record.take_role(role, text, module)

    def handed(self, tensor: Tensor) -> None:
        for record in self.records_of(tensor) if within_reach(tensor) else ():
            record.was_handed_over()

    def made(
        self, tensor: Tensor, module: str, operator: str, line: tuple[Any, int] | None
    ) -> list[Record]:
        """A tensor that an operator has returned. The records of those storages that are new."""
        new = []
        for part in parts(tensor):
            record = self.made_plain(part, module, operator, line)
            if record is not None:
                new.append(record)
        return new

    def made_plain(
        self, tensor: Tensor, module: str, operator: str, line: tuple[Any, int] | None
    ) -> Record | None:
        """The same of a tensor that has a storage of its own; runs for every result."""
        storage = tensor.untyped_storage()
        watch = self._alive.get(storage._cdata)
        if watch is not None:
            if watch.record.bytes == storage.nbytes():
                return None
            self._died(watch)  # resized: for the report another one
        if tensor.device != self.device:
            self.elsewhere.add(str(tensor.device))
            return None
        return self._open(tensor, storage, module, operator, line, self.clock)

    def _open(
        self,
        tensor: Tensor,
        storage: Any,
        module: str,
        operator: str,
        line: tuple[Any, int] | None,
        born: int,
    ) -> Record | None:
        count = storage.nbytes()
        if not count:
            return None  # holds nothing; comes again once something is written to it
        # nested tensors of torch's first kind have no shape
        shape = () if tensor.is_nested else tensor.shape
        record = Record(count, shape, tensor.dtype, module, operator, line, born)
        watch = _Watch(storage, self._on_death)
        watch.record = record
        watch.key = key = storage._cdata
        self._alive[key] = watch
        self.records.append(record)
        self.bytes_alive += count
        return record

    def _died(self, watch: _Watch) -> None:
        record = watch.record
        record.freed = self.clock + 1
        self.bytes_alive -= record.bytes
        if self._alive.get(watch.key) is watch:
            del self._alive[watch.key]

    def close(self) -> None:
        """What is alive now stays so in the report."""
        self._alive.clear()
