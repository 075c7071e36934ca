"""Choose a backend: ask each in the registry's order, remember why the others refused."""

from __future__ import annotations

from dataclasses import replace

from ecornn.backends.protocol import Backend, Rejection
from ecornn.backends.registry import BACKENDS, by_name
from ecornn.errors import NoBackend
from ecornn.planner.plan import ExecutionPlan
from ecornn.spec import RnnSpec

AUTO = "auto"


def plan(spec: RnnSpec) -> ExecutionPlan:
    """The plan for a request; raises `NoBackend` when all refuse, or the one that was named."""
    rejections: list[Rejection] = []
    for backend in BACKENDS:
        refusal = _refusal(backend, spec)
        if refusal is None:
            return ExecutionPlan(
                spec,
                backend.name,
                "auto" if _left_open(backend, spec) else backend.keeps(spec),
                _scope(backend, spec),
                _reason(spec, rejections),
                tuple(rejections),
            )
        rejections.append(Rejection(backend.name, refusal))
    listed = "\n  ".join(str(rejection) for rejection in rejections)
    raise NoBackend(
        f"no backend can serve this request; change what they name, or let backend='auto' choose\n"
        f"  {listed}"
    )


def _refusal(backend: Backend, spec: RnnSpec) -> str | None:
    if spec.backend not in (AUTO, backend.name):
        return f"backend={spec.backend!r} was asked for"
    return backend.unavailable() or backend.refuse(spec)


def _reason(spec: RnnSpec, rejections: list[Rejection]) -> str:
    if spec.backend != AUTO:
        return "it was asked for by name"
    if not rejections:
        return "first in order, and it can do all that is asked"
    return "first in order that can do all that is asked"


def _left_open(backend: Backend, spec: RnnSpec) -> bool:
    """Whether a compiler may choose what is kept: nothing was asked, and the backend can do
    either. A layer that is not traced is called by nobody who could."""
    if spec.keep != AUTO or not spec.traced:
        return False
    modes = ("states", "gates")
    return all(backend.keeps(replace(spec, keep=mode)) == mode for mode in modes)


def keeps_gates_unasked(backend: str, cell: str) -> bool:
    """Whether a backend keeps gates of which there are few, where the choice is free."""
    roomy = RnnSpec(cell, 0, 0, needs_grad=True, roomy=True)
    return by_name(backend).keeps(roomy) == "gates"


def _scope(backend: Backend, spec: RnnSpec) -> str:
    if spec.forward_mode:
        return "inline"
    if backend.name == "persistent" and not spec.traced:
        return "direct"
    if backend.name != "aten" or spec.traced:
        return "operator"
    # ends, resets, cuDNN's limit on the number of steps and one mask a sequence all need the layers
    # apart
    apart = spec.lengths or spec.resets or spec.long or spec.variational
    return "layer" if apart else "network"
