"""What stays of a profile that has ended: its report alone."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch

from ecornn.profiler import MemoryReport, profile
from ecornn.profiler.history import History
from ecornn.profiler.session import Profile
from support.functions import Doubled
from support.hooks import is_untouched
from support.recorded_steps import recorded


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(x)


def histories() -> int:
    gc.collect()
    return sum(type(one) is History for one in gc.get_objects())


@pytest.mark.parametrize("history", [True, False])
def test_neither_the_model_nor_the_history_stays(
    history: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The history until the report is read, the model not even that long."""
    before = histories()
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    optimizer = torch.optim.Adam(model.parameters())
    with recorded(monkeypatch) if history else nullcontext():
        observed = profile(model=model, optimizer=optimizer)
        with observed:
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
    gone = [weakref.ref(model), weakref.ref(optimizer)]
    del model, optimizer
    assert histories() == before + history
    assert [one() for one in gone] == [None, None]
    assert observed.report.rows
    assert histories() == before, "also before the storages are asked for"
    assert any(held.kind == "feature maps" for held in observed.report.held)


def test_it_goes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when Python next looks for what holds on to itself, which costs a step that comes later:
    a history is thousands of objects."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Twice())
    gone: list[weakref.ref[Any]] = []

    def step() -> None:
        model(torch.randn(4, 8)).sum().backward()

    with recorded(monkeypatch), monkeypatch.context() as patched:
        make = Profile._make_collector

        def made(self: Profile) -> Any:
            collector: Any = make(self)
            gone.extend(map(weakref.ref, (collector, collector.graph, collector._marks)))
            return collector

        patched.setattr(Profile, "_make_collector", made)
        gc.disable()
        try:
            report = profile(step, model)
            assert [one() for one in gone] == [None] * 3
        finally:
            gc.enable()
    assert any("Doubled" in by for held in report.held for by in held.kept_by)


@pytest.mark.parametrize("history", [True, False])
def test_profiles_may_end_in_the_order_they_began(
    history: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on two threads: each is told of passes while it is there, and the engine is as before."""
    # torch's own flags for modes are not each thread's: such an order leaves them set.
    for name, value in list(vars(_python_dispatch).items()):
        if isinstance(value, bool):
            monkeypatch.setattr(_python_dispatch, name, value)
    models = [nn.Linear(4, 4), nn.Linear(4, 4)]
    began, ended = (Event(), Event()), Event()

    def first() -> MemoryReport:
        with profile(model=models[0]) as observed:
            began[0].set()
            assert began[1].wait(60)
            models[0](torch.randn(2, 4)).exp().sum().backward()
        ended.set()
        return observed.report

    def second() -> MemoryReport:
        assert began[0].wait(60)
        with profile(model=models[1]) as observed:
            began[1].set()
            assert ended.wait(60)
            models[1](torch.randn(2, 4)).exp().sum().backward()
        return observed.report

    with recorded(monkeypatch) if history else nullcontext(), ThreadPoolExecutor(2) as pool:
        reports = [one.result() for one in (pool.submit(first), pool.submit(second))]
    for model, report in zip(models, reports, strict=True):
        assert is_untouched(model)
        assert any("exp" in by for held in report.held for by in held.kept_by)
