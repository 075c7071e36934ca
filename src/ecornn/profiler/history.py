"""What CUDA's caching allocator did during a step, written down by torch itself, in C++.

`Recorder` has it written and reads it; `History` is what was read, as plain values, so that all
that follows from one can be tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ecornn.profiler.allocator import driver_bytes

#: More are not kept: a step has thousands, and each takes some kilobytes of the host's memory.
ENTRIES = 1_000_000
#: Named where it is missing.
_NEEDED = (
    "_cuda_record_memory_history",
    "_cuda_memorySnapshot",
    "_cuda_isHistoryEnabled",
    "_cuda_setMemoryMetadata",
    "_cuda_getMemoryMetadata",
)
#: An allocation is taken off the allocator's count when its end is asked for, even if another
#: stream still reads it: when it can be lent again does not matter here.
_LEFT_OUT = ("free_completed", "snapshot")


@dataclass(frozen=True)
class History:
    """Of one device, from its beginning to its end."""

    #: In order, as torch writes them: `action` ("alloc", "free_requested", "segment_alloc", …),
    #: `addr`, `size` in bytes as asked for, `user_metadata` and `frames`, the innermost first.
    events: Sequence[Mapping[str, Any]]
    #: By address, the bytes asked for of all that is allocated at the end.
    in_use: Mapping[int, int]
    #: At the end.
    reserved: int
    #: The allocator's own count: at the beginning, and at most.
    allocated_before: int
    peak: int
    #: Whether more was done than is written down.
    cut_off: bool = False


class Recording(Protocol):
    """Whoever writes down what an allocator does."""

    #: What is said stands beside all that this thread does from now on.
    say: Callable[[str], None]

    def start(self) -> None: ...

    def stop(self) -> History: ...

    def close(self) -> None: ...

    def driver_bytes(self) -> int | None: ...


def missing() -> str | None:
    """Why the allocator's history cannot be had, if it cannot."""
    for name in _NEEDED:
        if not hasattr(torch._C, name):
            return f"torch {torch.__version__} has no {name}"
    torch.cuda.init()  # before it, torch has no allocator to ask
    allocator = torch.cuda.memory.get_allocator_backend()
    if allocator != "native":
        return f"the allocator {allocator!r} writes down no history"
    if torch._C._cuda_isHistoryEnabled():
        return "its history is being recorded by somebody else"
    return None


def hush(say: Callable[[str], None], device: torch.device) -> None:
    """What is said stands beside what one thread does; a thread of autograd's is told to say
    nothing more by a backward pass of one number."""
    # Memory may be what the step ran out of, or the device be broken: then the thread says a number
    # that means nothing. What the step raised must not be replaced; a broken device says so again.
    with (
        suppress(RuntimeError),
        torch.inference_mode(False),
        torch.enable_grad(),
        _disable_current_modes(),
    ):
        number = torch.zeros((), device=device, requires_grad=True)
        seen = number.view_as(number)  # a node that runs nothing on the device
        assert seen.grad_fn is not None
        seen.grad_fn.register_prehook(lambda _: say(""))
        seen.backward(number.detach())


class Recorder:
    """One step's history of a device. Nobody else's may be recorded meanwhile."""

    def __init__(self, device: torch.device, *, lines: bool = True) -> None:
        """`lines`: with the lines of the program that allocate."""
        index: int | None = device.index
        self._index = torch.cuda.current_device() if index is None else index
        self._lines = lines
        self._said_before = ""
        self._allocated_before = 0
        self._recording = self._spoke = False
        self.say: Callable[[str], None] = torch._C._cuda_setMemoryMetadata

    def start(self) -> None:
        if self._recording:
            return
        self._said_before = torch._C._cuda_getMemoryMetadata()
        torch.cuda.reset_peak_memory_stats(self._index)
        self._allocated_before = self._allocated()["current"]
        self._recording = self._spoke = True
        torch.cuda.memory._record_memory_history(
            "all",
            context="alloc" if self._lines else None,
            stacks="python",
            max_entries=ENTRIES,
            clear_history=True,
            skip_actions=list(_LEFT_OUT),
        )

    def stop(self) -> History:
        peak = self._allocated()["peak"]
        told = torch.cuda.memory._snapshot()
        self._end()
        segments = [one for one in told["segments"] if one["device"] == self._index]
        events = told["device_traces"][self._index]
        return History(
            events,
            {
                block["address"]: block["requested_size"]
                for segment in segments
                for block in segment["blocks"]
                if block["state"] == "active_allocated"
            },
            sum(segment["total_size"] for segment in segments),
            self._allocated_before,
            peak,
            len(events) >= ENTRIES,
        )

    def _allocated(self) -> Mapping[str, int]:
        """Not by `torch.cuda.memory_allocated`, which sorts all statistics first."""
        told = torch.cuda.memory_stats_as_nested_dict(self._index)
        found: Mapping[str, int] = told["allocated_bytes"]["all"]
        return found

    def _end(self) -> None:
        """Write down nothing more, and forget what was."""
        if self._recording:
            self._recording = False
            torch.cuda.memory._record_memory_history(None, clear_history=True)

    def close(self) -> None:
        """Leave nothing behind: neither the history nor what was said."""
        self._end()
        if self._spoke:
            self._spoke = False
            self.say(self._said_before)
            hush(self.say, torch.device("cuda", self._index))

    def driver_bytes(self) -> int | None:
        return driver_bytes(torch.device("cuda", self._index))
