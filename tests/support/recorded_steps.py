"""CUDA's memory history, emulated on the CPU: what the caching allocator would write down."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ecornn.profiler import assemble
from ecornn.profiler.allocator import rounded
from ecornn.profiler.history import History
from ecornn.profiler.kept import running_node, tensors_alive
from ecornn.profiler.light import LightCollector
from ecornn.profiler.operators import tensors_in
from ecornn.profiler.session import Profile
from ecornn.profiler.storages import parts

#: What blocks that are not split add to the allocator's count, and what the device has beyond it.
UNSPLIT, RESERVED, DRIVER = 700, 1 << 30, 12345
BETWEEN = ("torch/utils/_python_dispatch", "torch/_dynamo/", "torch/_compile", "torch/_ops")
CPU = torch.device("cpu")


class Emulated(TorchDispatchMode):
    """Storages stand for allocations, their addresses for addresses of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = [""]
        self.recording = False
        self._events: list[dict[str, Any]] = []
        self._alive: dict[int, tuple[Any, int, int]] = {}
        self._lent: set[int] = set()
        self._now = self._most = self._before = 0

    def say(self, text: str) -> None:
        self.said[0] = text

    def start(self) -> None:
        if self.recording:
            return
        self.recording = True
        for tensor in tensors_alive():
            self._open(tensor)
        self._events.clear()
        self._before = self._most = self._now
        self.__enter__()

    def stop(self) -> History:
        self.close()
        in_use = {address: size for _, address, size in self._alive.values()}
        return History(self._events, in_use, RESERVED, self._before + UNSPLIT, self._most + UNSPLIT)

    def close(self) -> None:
        if self.recording:
            self.recording = False
            self.said[0] = ""
            self.__exit__(None, None, None)

    def driver_bytes(self) -> int:
        return DRIVER

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in((result,)):
            self._open(tensor)
        return result

    def _open(self, tensor: torch.Tensor) -> None:
        for part in parts(tensor):
            storage = part.untyped_storage()
            size, key = storage.nbytes(), storage._cdata
            simulated = isinstance(part, FakeTensor)
            if part.device != CPU or not size or key in self._alive or simulated:
                continue
            address = storage.data_ptr()
            if address in self._lent:
                continue  # another storage's memory
            self._lent.add(address)
            self._alive[key] = (weakref.ref(storage, partial(self._died, key)), address, size)
            self._write("alloc", address, size)

    def _died(self, key: int, _: Any) -> None:
        found = self._alive.pop(key, None)
        if found is not None:
            self._lent.discard(found[1])
        if found is not None and self.recording:
            self._write("free_requested", *found[1:])

    def _write(self, action: str, address: int, size: int) -> None:
        self._now += rounded(size) if action == "alloc" else -rounded(size)
        self._most = max(self._most, self._now)
        told = {"action": action, "addr": address, "size": size, "user_metadata": self.said[0]}
        self._events.append({**told, "frames": _frames() if action == "alloc" else []})


def _frames() -> list[dict[str, Any]]:
    """Autograd runs on a thread of its own on a device, where there are none."""
    found: list[dict[str, Any]] = []
    frame = sys._getframe(1) if running_node() is None else None
    while frame is not None:
        code = frame.f_code
        # what stands between an operator and a mode is not there on a device
        if code.co_filename != __file__ and not any(one in code.co_filename for one in BETWEEN):
            told = {"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name}
            found.append(told)
        frame = frame.f_back
    return found


@contextmanager
def recorded(
    monkeypatch: pytest.MonkeyPatch, *, keep: bool = False
) -> Iterator[list[LightCollector]]:
    """Within it, profiles on the CPU are made from an emulated history. The collectors made, which
    hold on to their models, if these are to be kept."""
    made: list[LightCollector] = []

    def make(self: Profile) -> LightCollector:
        collector = LightCollector(self._model, self._optimizers, CPU, Emulated())
        made.extend([collector] * keep)
        return collector

    with monkeypatch.context() as patched:
        patched.setattr(Profile, "_make_collector", make)
        patched.setattr(assemble, "_in_blocks", lambda device: True)
        yield made


Step = Callable[[], Any]
