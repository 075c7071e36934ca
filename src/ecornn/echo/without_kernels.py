"""Code that inductor generates to be looked at, without the kernels that it would call.

Inductor ends a compilation by loading the Python that it has written, which compiles its kernels.
Of code that never runs that load is left out, as torch's own `get_code` leaves it out, and so is
what inductor starts ahead of it in its compile processes. What inductor's cache then keeps is the
Python and no kernel: whoever is given it loads it, in this process or another one, and compiles
them. Kernels that are timed to choose among them are compiled and run as ever.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

from torch import fx
from torch._inductor.codecache import PyCodeCache
from torch._inductor.codegen import triton as triton_codegen
from torch._inductor.virtualized import V

LOAD = "load_by_key_path"
#: What the load takes, of which constants come with a graph's code and with no kernel's.
TAKEN = ["key", "path", "linemap", "attrs"]


@contextmanager
def without_kernels(module: fx.GraphModule) -> Iterator[None]:
    """What this thread compiles of `module` has no kernels, and raises where it is called."""
    with _replaced:
        before, _here.module = _wanted(), module
        try:
            yield
        finally:
            _here.module = before


#: `module`: the one whose code this thread looks at.
_here = threading.local()


def _wanted() -> fx.GraphModule | None:
    found: fx.GraphModule | None = getattr(_here, "module", None)
    return found


def _is_looked_at() -> bool:
    """Whether what is loaded now is code of that one. Others are compiled within its compilation,
    to be timed. Where code comes out of inductor's cache, there is no graph."""
    module = _wanted()
    return module is not None and getattr(V.graph, "module", module) is module


class NotLoaded:
    """In the place of the module that a graph's code makes. Of what inductor asks for at compile
    time it has what runs later, or never; for anything else the code is loaded after all."""

    def __init__(self, key: str, path: str, load: Callable[[], Any]) -> None:
        self.key, self.__file__, self._load = key, path, cache(load)
        self.call: Callable[..., Any] = _never_called
        self.recursively_apply_fns: Callable[..., Any] = _applied_to_nothing
        self.runner = SimpleNamespace(
            call=_never_called, partitions=[], recursively_apply_fns=_applied_to_nothing
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._load(), name)


def _never_called(*_: Any) -> Any:
    raise AssertionError("this code was compiled to be looked at, and has no kernels")


def _applied_to_nothing(_: Any) -> None:
    """CUDA graphs are made of the parts of code when they first run."""


class _StartsNothing:
    """In the place of what starts to compile a kernel as soon as its code is written."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def use_process_pool(self) -> bool:
        return _wanted() is None and bool(self._real.use_process_pool())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _Replaced:
    """Functions of inductor's, replaced for all threads while one looks at code; for the others
    they do as before. Where they are not those that are known, nothing is replaced, and kernels are
    compiled."""

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0
        self._originals: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            load = vars(PyCodeCache).get(LOAD)
            if self._users > 1 or not _loads(load):
                return
            self._set(PyCodeCache, LOAD, load, _loading_by(load))
            starts = getattr(triton_codegen, "async_compile", None)
            if hasattr(starts, "use_process_pool"):
                self._set(triton_codegen, "async_compile", starts, _StartsNothing(starts))

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            while self._users == 0 and self._originals:
                setattr(*self._originals.pop())

    def _set(self, owner: Any, name: str, original: Any, ours: Any) -> None:
        self._originals.append((owner, name, original))
        setattr(owner, name, ours)


_replaced = _Replaced()


def _loads(load: Any) -> bool:
    if not isinstance(load, classmethod):
        return False
    return list(inspect.signature(load.__func__).parameters)[1 : 1 + len(TAKEN)] == TAKEN


def _loading_by(original: Any) -> Any:
    def load(
        cls: type[PyCodeCache],
        /,
        key: str,
        path: str,
        linemap: Any = None,
        attrs: Any = None,
        **settings: Any,
    ) -> Any:
        really = partial(original.__get__(None, cls), key, path, linemap, attrs, **settings)
        if attrs is None or not _is_looked_at():
            return really()
        return NotLoaded(key, path, really)

    return classmethod(load)
