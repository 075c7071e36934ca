"""Every backend there is, in the order the planner asks them."""

from __future__ import annotations

from ecornn.backends.aten import Aten
from ecornn.backends.persistent import Persistent
from ecornn.backends.protocol import Backend
from ecornn.backends.reference import Reference

BACKENDS: tuple[Backend, ...] = (Persistent(), Aten(), Reference())


def by_name(name: str) -> Backend:
    for backend in BACKENDS:
        if backend.name == name:
            return backend
    known = ", ".join(backend.name for backend in BACKENDS)
    raise KeyError(f"no backend is called {name!r}; there are {known}")
