"""Fewer questions at each launch of compiled code.

Each launch of a kernel goes through its tuner, which asks whether it has been tuned, is to be
written down, interpreted or debugged. After some calls the answers are known, and the tuners'
choices are called directly. A profiler still has its records. Newer versions of torch (2.13, not
2.11) do so themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import profiler

#: Calls that ask everything.
CAREFUL_CALLS = 2


def with_direct_launches(compiled: Any) -> Callable[[list[Any]], Any]:
    """Around what inductor has compiled."""
    calls = 0

    def run(arguments: list[Any]) -> Any:
        nonlocal calls
        if calls <= CAREFUL_CALLS:
            if calls == CAREFUL_CALLS:
                launch_directly(compiled)
            calls += 1
        return compiled(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def launch_directly(compiled: Any) -> int:
    """How many kernels are; 0 where this torch keeps its code elsewhere."""
    call = getattr(getattr(compiled, "compiled_fn_runner", None), "call", None)
    names = getattr(call, "__globals__", None)
    if names is None:
        return 0
    direct = {name: launch for name, value in names.items() if (launch := _direct(value))}
    names.update(direct)
    return len(direct)


class _Launch:
    """In the place of a tuner that has chosen."""

    __slots__ = ("run",)

    def __init__(self, tuner: Any, launcher: Callable[..., Any]) -> None:
        def run(*args: Any, stream: Any, **named: Any) -> Any:
            # beside the stream nothing is named, but for kernels that were written by hand
            if named or profiler._is_profiler_enabled:
                return tuner.run(*args, stream=stream, **named)
            return launcher(*args, stream=stream)

        self.run = run


def _without_questions(launcher: Callable[..., Any]) -> None:
    """What a launcher of torch's calls asks at each launch for which GPU it was made and whether
    its kernel takes scratch memory. Where neither is so, it is what does the launch: on one machine
    0.55 µs of Python a launch instead of 1.27, with the questions of `_Launch` that were asked
    before."""
    names: dict[str, Any] = getattr(launcher, "__globals__", {})
    kernel: Any = getattr(names.get("runner"), "__self__", None)
    if type(kernel).__name__ != "StaticallyLaunchedCudaKernel" or torch.version.hip is not None:
        return
    asked = ("function", "num_warps", "shared", "arg_tys", "has_global_scratch")
    if not all(hasattr(kernel, name) for name in (*asked, "has_profile_scratch", "C_impl")):
        return
    if kernel.function is None or kernel.has_global_scratch or kernel.has_profile_scratch:
        return
    launch, function, types = kernel.C_impl._launch_kernel, kernel.function, kernel.arg_tys
    warps, shared = kernel.num_warps, kernel.shared

    def run(x: int, y: int, z: int, stream: int, *args: Any) -> None:
        launch(function, x, y, z, warps, shared, types, args, stream)

    names["runner"] = run


def _direct(value: Any) -> _Launch | None:
    launchers = getattr(value, "launchers", None)
    if type(value).__name__ != "CachingAutotuner" or not launchers or len(launchers) != 1:
        return None
    if hasattr(value, "_cached_launcher"):
        return None  # torch's own way of the same
    asked = ("triton_interpret", "dump_launch_params", "dump_launch_tensors")
    if any(getattr(value, name, True) for name in asked):
        return None
    launcher, meta = launchers[0], getattr(value, "inductor_meta", None) or {}
    if getattr(launcher, "store_cubin", True) or meta.get("coordinate_descent_tuning", False):
        return None
    _without_questions(launcher)
    return _Launch(value, launcher)
