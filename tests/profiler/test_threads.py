"""Backward passes on a thread of their own, as on CUDA."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch as modes
from torch.utils.checkpoint import checkpoint

from ecornn.profiler import MemoryReport, profile
from support.recorded_steps import recorded


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.b(torch.tanh(self.a(x))))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x).tanh().sum()


class Device:
    """Runs the engine as a device does: passes inside others stay on its thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._inside = False
        self._engine: Callable[..., Any] = torch.autograd._engine_run_backward

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if self._inside:
            return self._engine(*args, **kwargs)
        stack = modes._get_current_dispatch_mode_stack()
        return self._pool.submit(self._there, stack, args, kwargs).result()

    def _there(self, stack: list[Any], args: Any, kwargs: Any) -> Any:
        """With the modes of the thread that waits, as in the engine."""
        self._inside = True
        for mode in stack:
            modes._push_mode(mode)
        try:
            return self._engine(*args, **kwargs)
        finally:
            for _ in stack:
                modes._pop_mode()
            self._inside = False


@contextmanager
def device_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd, "_engine_run_backward", Device().run)
        yield


def told(report: MemoryReport) -> list[tuple[Any, ...]]:
    """Without what other tests have left."""
    held = [one for one in report.held if one.kind != "other"]
    return [(one.bytes, one.kind, one.module, one.operator, one.kept_by) for one in held]


@pytest.mark.parametrize("history", [True, False])
@pytest.mark.parametrize("steps_before", [0, 10])
def test_each_thread_numbers_its_nodes(
    steps_before: int, history: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is made again on the device's thread is told as on one thread, whichever has made more
    nodes before."""
    gc.collect()  # what other tests have left must not go in the midst of it
    model, x = Checkpointed(), torch.randn(8, 16, requires_grad=True)

    def step() -> None:
        for _ in range(2):
            model(x).backward()
        model.zero_grad()
        x.grad = None

    def observed(thread: Any) -> MemoryReport:
        with thread:
            for _ in range(steps_before):
                step()
            with recorded(monkeypatch) if history else nullcontext():
                return profile(step, model)

    with ThreadPoolExecutor(1) as pool:  # both threads count from 0: they meet the same numbers
        alone = pool.submit(observed, nullcontext()).result()
    with ThreadPoolExecutor(1) as pool:
        threaded = pool.submit(observed, device_thread()).result()
    kept = {one for held in alone.held for one in held.kept_by}
    assert ("blocks.1: tanh" if history else "blocks.1: aten.tanh") in kept
    assert told(threaded) == told(alone)
    assert threaded.timeline.module == alone.timeline.module


def test_a_pass_may_be_started_on_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which has called modules in backward passes alone."""
    model, x = Checkpointed(), torch.randn(8, 16, requires_grad=True)
    with ThreadPoolExecutor(1) as pool, recorded(monkeypatch):

        def step() -> None:
            pool.submit(model(x).backward).result()

        _ = [x + 1 for _ in range(1000)]  # the other thread's numbers are smaller
        step()
        found = profile(lambda: [step(), step()], model)
    kept = {one for held in found.held for one in held.kept_by}
    assert {"head: addmm", "blocks.0.b: addmm"} <= kept
