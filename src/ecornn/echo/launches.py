"""Fewer questions at each launch, for compiled code that is called many times in a step.

Each launch of a kernel goes through its tuner, which asks whether it has been tuned, is to be
written down, interpreted or debugged; and each call checks the sizes of what it was given and of
what operators returned. After some calls the answers are known: sizes that are no symbols cannot
change, since torch's guards have compared those of the inputs. Then the tuners' choices are called
directly. A profiler still has its records. What hooks of the caller kept for the backward pass may
come back with other strides, in the course of a training too: then sizes are checked as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import profiler

#: Calls that ask everything.
CAREFUL_CALLS = 2
CHECKS = ("assert_size_stride", "assert_alignment")


class Checks:
    """Of both passes of a graph: whether sizes are checked at each call."""

    def __init__(self) -> None:
        self._needed = False
        self._before: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def drop(self, names: dict[str, Any]) -> None:
        if self._needed:
            return
        before = {name: names[name] for name in CHECKS if name in names}
        self._before.append((names, before))
        names.update(dict.fromkeys(before, _known))

    def put_back(self) -> None:
        """For good."""
        self._needed = True
        for names, before in self._before:
            names.update(before)
        self._before.clear()


def with_direct_launches(
    compiled: Any, inputs: Sequence[Any], checks: Checks
) -> Callable[[list[Any]], Any]:
    """Around what inductor has compiled for such `inputs`."""
    calls = 0
    fixed = all(isinstance(value, torch.Tensor) for value in inputs)

    def run(arguments: list[Any]) -> Any:
        nonlocal calls
        if hooks_on_saved_tensors():
            checks.put_back()
        if calls <= CAREFUL_CALLS:
            if calls == CAREFUL_CALLS:
                launch_directly(compiled, checks if fixed else None)
            calls += 1
        return compiled(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def hooks_on_saved_tensors() -> bool:
    """Yes, where this torch does not say."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(True) is not None


def launch_directly(compiled: Any, checks: Checks | None) -> int:
    """How many kernels are; 0 where this torch keeps its code elsewhere. `checks`: can be left."""
    call = getattr(getattr(compiled, "compiled_fn_runner", None), "call", None)
    names = getattr(call, "__globals__", None)
    if names is None:
        return 0
    direct = {name: launch for name, value in names.items() if (launch := _direct(value))}
    names.update(direct)
    if checks is not None:
        checks.drop(names)
    return len(direct)


class _Launch:
    """In the place of a tuner that has chosen."""

    __slots__ = ("run",)

    def __init__(self, tuner: Any, launcher: Callable[..., Any]) -> None:
        def run(*args: Any, stream: int) -> Any:
            if profiler._is_profiler_enabled:
                return tuner.run(*args, stream=stream)
            return launcher(*args, stream=stream)

        self.run = run


def _direct(value: Any) -> _Launch | None:
    launchers = getattr(value, "launchers", None)
    if type(value).__name__ != "CachingAutotuner" or not launchers or len(launchers) != 1:
        return None
    asked = ("triton_interpret", "dump_launch_params", "dump_launch_tensors")
    if any(getattr(value, name, True) for name in asked):
        return None
    launcher, meta = launchers[0], getattr(value, "inductor_meta", None) or {}
    if getattr(launcher, "store_cubin", True) or meta.get("coordinate_descent_tuning", False):
        return None
    return _Launch(value, launcher)


def _known(*_: Any) -> None:
    """What two calls have checked."""
