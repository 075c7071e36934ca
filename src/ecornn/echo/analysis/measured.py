"""Measured times of operators, kept on disk: one file a device and torch version.

A time is that of a call in an eager loop on tensors that were just used: on a GPU it contains the
launch where that is what takes longest, and what fits its caches is read from there.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ecornn.echo.graph import Operation
from ecornn.echo.work import Call, TensorLike
from ecornn.kernels.jit.store import UnsafeCache, check_owner, write_whole

#: What may be run a second time, and so may be measured.
MEASURABLE = ("cheap", "product")
FORM = 1  # of the file
ROUNDS, CALLS = 5, 10
CPU_LIMIT = 1 << 30  # bytes of arguments and results


class Measured:
    """Looks times up; measures those that are missing. Files that cannot be used are left alone
    and named in `trouble`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tables: dict[torch.device, dict[str, float]] = {}
        self._changed: set[torch.device] = set()
        self.trouble: list[str] = []

    def look_up(self, operation: Operation) -> float | str:
        """Seconds, or why there are none."""
        call, device = operation.work.call, operation.work.device
        if operation.kind not in MEASURABLE:
            return f"never run again: {operation.kind}"
        if call is None or device is None:
            return "not a call on tensors"
        if device.type not in ("cpu", "cuda"):
            return f"measured on the CPU and on CUDA, not on {device.type}"
        if device not in self._tables:
            self._tables[device] = self._read(device)
        table = self._tables[device]
        if call.key not in table:
            found = measure(call, device)
            if isinstance(found, str):
                return found
            table[call.key] = found
            self._changed.add(device)
        return table[call.key]

    def save(self) -> None:
        """What others wrote in the meantime stays, unless it is the same call."""
        for device in self._changed:
            told = {"form": FORM, "device": name_of(device), "torch": str(torch.__version__)}
            told["seconds"] = {**self._read(device), **self._tables[device]}
            try:
                write_whole(self._path(device), json.dumps(told).encode())
            except (OSError, UnsafeCache) as error:
                self.trouble.append(f"measured times are not kept: {error}")
        self._changed.clear()

    def _path(self, device: torch.device) -> Path:
        which = f"{name_of(device)}\n{torch.__version__}"
        return self._folder / f"{hashlib.sha256(which.encode()).hexdigest()[:32]}.json"

    def _read(self, device: torch.device) -> dict[str, float]:
        path = self._path(device)
        try:
            check_owner(path.parent)
            return _checked(json.loads(path.read_bytes()), device)
        except FileNotFoundError:
            return {}
        except (OSError, UnsafeCache, ValueError) as error:
            reason = f"{path} is not used: {error}"
            if reason not in self.trouble:
                self.trouble.append(reason)
            return {}


def _checked(content: Any, device: torch.device) -> dict[str, float]:
    expected = (FORM, name_of(device), str(torch.__version__))
    if not isinstance(content, dict) or not isinstance(content.get("seconds"), dict):
        raise ValueError("not a table of times")
    if tuple(content.get(key) for key in ("form", "device", "torch")) != expected:
        raise ValueError("a table of another form, device or torch")
    seconds: dict[str, Any] = content["seconds"]
    for value in seconds.values():
        if not isinstance(value, float) or not math.isfinite(value) or value <= 0:
            raise ValueError(f"{value!r} is no time")
    return seconds


def name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    # times on a CPU depend on how many threads share the work
    return f"CPU with {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"


def measure(call: Call, device: torch.device) -> float | str:
    """The median of some rounds in seconds a call, or why it cannot be had."""
    if device.type == "cuda":
        if not torch.cuda.is_available():
            return "the GPU that it is meant for is not here"
        if torch.cuda.is_current_stream_capturing():
            return "a CUDA graph is being captured"
    needed = sum(tensor.bytes for tensor in call.tensors())
    limit = torch.cuda.mem_get_info(device)[0] // 4 if device.type == "cuda" else CPU_LIMIT
    if needed > limit:
        return f"its arguments take {needed:,} bytes; at most {limit:,} are used to measure"
    # a plan is made while tensors are fake; these calls must be real
    with _disable_current_modes(), torch.no_grad():
        try:
            args = _made(call.args)
            kwargs = {name: _made(value) for name, value in call.kwargs}
            clock = _on_gpu if device.type == "cuda" else _on_cpu
            return clock(lambda: call.target(*args, **kwargs))
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            return f"could not be run on made-up tensors: {str(error).splitlines()[0]}"


def _on_cpu(run: Callable[[], Any]) -> float:
    run()
    rounds: list[float] = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            run()
        rounds.append((time.perf_counter() - start) / CALLS)
    return statistics.median(rounds)


def _on_gpu(run: Callable[[], Any]) -> float:
    run()
    run()
    rounds: list[float] = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(CALLS):
            run()
        end.record()
        end.synchronize()
        rounds.append(start.elapsed_time(end) / 1e3 / CALLS)
    return statistics.median(rounds)


def _made(value: Any) -> Any:
    if isinstance(value, TensorLike):
        return _tensor(value)
    if isinstance(value, tuple):
        return [_made(of) for of in value]
    return value


def _tensor(like: TensorLike) -> Tensor:
    """Numbers between a half and one, far from what some operators are slow at; integers are
    zero, an index that everything has. The generator is not touched."""
    length = 1 + sum((n - 1) * s for n, s in zip(like.shape, like.strides, strict=True) if n)
    memory = torch.zeros(max(length, 1), dtype=like.dtype, device=like.device)
    if like.dtype.is_floating_point or like.dtype.is_complex:
        ramp = torch.linspace(0.5, 1.0, len(memory), device=like.device)
        memory.copy_(ramp)
    return memory.as_strided(like.shape, like.strides)
