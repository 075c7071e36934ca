"""Fewer questions at each launch of compiled code.

Each launch of a kernel goes through its tuner, which asks whether it has been tuned, is to be
written down, interpreted or debugged; and each call checks the sizes of what it was given and of
what operators returned. After some calls the answers are known: sizes that are no symbols cannot
change, since torch's guards have compared those of the inputs. Then the tuners' choices are called
directly. A profiler still has its records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import profiler

#: Calls that ask everything.
CAREFUL_CALLS = 2
CHECKS = ("assert_size_stride", "assert_alignment")


def with_direct_launches(compiled: Any, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """Around what inductor has compiled for such `inputs`."""
    calls = 0
    fixed = all(isinstance(value, torch.Tensor) for value in inputs)

    def run(arguments: list[Any]) -> Any:
        nonlocal calls
        if calls <= CAREFUL_CALLS:
            if calls == CAREFUL_CALLS:
                launch_directly(compiled, checked=fixed)
            calls += 1
        return compiled(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def launch_directly(compiled: Any, *, checked: bool) -> int:
    """How many kernels are; 0 where this torch keeps its code elsewhere."""
    call = getattr(getattr(compiled, "compiled_fn_runner", None), "call", None)
    names = getattr(call, "__globals__", None)
    if names is None:
        return 0
    direct = {name: launch for name, value in names.items() if (launch := _direct(value))}
    names.update(direct)
    if checked:
        names.update((name, _known) for name in CHECKS if name in names)
    return len(direct)


class _Launch:
    """In the place of a tuner that has chosen."""

    __slots__ = ("run",)

    def __init__(self, tuner: Any, launcher: Callable[..., Any]) -> None:
        def run(*args: Any, **named: Any) -> Any:
            # beside the stream nothing is named, but for kernels that were written by hand
            if profiler._is_profiler_enabled or len(named) != 1:
                return tuner.run(*args, **named)
            return launcher(*args, **named)

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
