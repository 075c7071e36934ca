"""`Exchanged`: other functions in the place of some modules' `forward`, for the time of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

from torch import nn

Forwards = Iterable[tuple[nn.Module, Callable[..., Any]]]


class Exchanged:
    """Also of several calls at once in threads: the first puts them there, the last takes them
    away."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._inside = 0
        self._before: list[tuple[nn.Module, Any]] = []

    @contextmanager
    def __call__(self, forwards: Callable[[], Forwards]) -> Iterator[None]:
        """`forwards`: modules, and what runs in their place."""
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._exchange(forwards)
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    self._exchange_back()

    def _exchange(self, forwards: Callable[[], Forwards]) -> None:
        try:
            for module, forward in forwards():
                self._before.append((module, module.__dict__.get("forward")))
                module.__dict__["forward"] = forward
        except BaseException:
            self._inside -= 1
            self._exchange_back()
            raise

    def _exchange_back(self) -> None:
        while self._before:
            module, before = self._before.pop()
            if before is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = before
