"""What stays of a profile that has ended: its report alone."""

from __future__ import annotations

import gc
import warnings
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
from support.recorded_steps import Emulated, recorded


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


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("fails", ["", "start", "step", "stop"])
def test_garbage_is_collected_in_the_step_alone(
    on: bool, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the program has it, whatever goes wrong."""
    seen: list[tuple[str, bool]] = []

    def watched(name: str, call: Any = lambda _: None) -> Any:
        def run(*given: Any) -> Any:
            seen.append((name, gc.isenabled()))
            if name == fails:
                raise ValueError(name)
            return call(*given)

        return run

    for name in ("start", "stop"):
        monkeypatch.setattr(Emulated, name, watched(name, getattr(Emulated, name)))
    model, step = nn.Linear(8, 8), watched("step")
    was_on = gc.isenabled()
    gc.enable() if on else gc.disable()
    try:
        with (
            recorded(monkeypatch),
            pytest.raises(ValueError, match=fails) if fails else nullcontext(),
        ):
            profile(lambda: step(model(torch.randn(4, 8)).sum().backward()), model)
        assert gc.isenabled() == on
    finally:
        gc.enable() if was_on else gc.disable()
    names = ["start", "step", "stop"][: 1 if fails == "start" else None]
    assert seen == [(name, on and name == "step") for name in names]
    assert is_untouched(model)


@pytest.mark.parametrize("history", [True, False])
def test_hooks_of_the_program_stay_and_see_what_they_always_see(
    history: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8)
    calls: list[str] = []
    layer = model[0]
    layer.register_forward_pre_hook(lambda *_: calls.append("before"))
    layer.register_forward_hook(lambda *_: calls.append("after"), always_call=True)

    def step() -> None:
        later = layer.register_forward_pre_hook(
            lambda _, args, kwargs: calls.append("later"), with_kwargs=True
        )
        result = layer(x)
        result.grad_fn.register_prehook(lambda _: calls.append("node"))
        result.register_hook(lambda _: calls.append("result"))
        result.sum().backward()
        later.remove()

    step()
    alone = calls.copy()
    calls.clear()
    with recorded(monkeypatch) if history else nullcontext():
        profile(step, model)
    assert calls == alone
    calls.clear()
    step()
    assert calls == alone
    assert (len(layer._forward_pre_hooks), len(layer._forward_hooks)) == (1, 1)
    assert not layer._forward_pre_hooks_with_kwargs


@pytest.mark.parametrize("history", [True, False])
def test_a_scripted_part_is_told_under_its_caller(
    history: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes no hook: torch refuses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit as a whole
        scripted = torch.jit.script(nn.Linear(8, 8))
    model = nn.Sequential(nn.Sequential(scripted, nn.Tanh()), nn.Linear(8, 8))
    with recorded(monkeypatch) if history else nullcontext():
        report = profile(lambda: model(torch.randn(4, 8)).sum().backward(), model)
    weights = {held.why.partition(";")[0] for held in report.held if held.kind == "weights"}
    assert "the parameter 0.0.weight" in weights
    made = {held.module for held in report.held if held.kind in ("feature maps", "workspace")}
    assert "0" in made
    assert "0.0" not in made
    assert is_untouched(model[1])
