"""A step that raises: the report so far, the same error, and nothing left behind."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ecornn.errors import InvalidInput
from ecornn.profiler import MemoryReport, collect, profile
from ecornn.profiler.allocator import driver_bytes
from ecornn.profiler.history import hush
from ecornn.profiler.observation import driver_notes
from ecornn.profiler.session import NotObserved
from support.hooks import is_untouched
from support.recorded_steps import Emulated, recorded


class Breaks(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x.register_hook(self.backwards)
        if self.how == "raises":
            raise KeyError("inside")
        if self.how == "too large":
            x = x + torch.empty(2**62, dtype=torch.int8).sum()
        return x.exp().sum()

    def backwards(self, gradient: Tensor) -> None:
        if self.how == "raises backwards":
            raise KeyError("inside")


class BrokenOptimizer(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        raise KeyError("after")


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("raises", KeyError),
        ("raises backwards", KeyError),
        ("too large", RuntimeError),
        ("optimizer", KeyError),
    ],
)
def test_the_report_so_far_comes_with_the_error(how: str, error: type[Exception]) -> None:
    model, x = Breaks(how), torch.randn(4, 8)
    optimizer = (BrokenOptimizer if how == "optimizer" else torch.optim.SGD)(
        model.parameters(), 0.1
    )

    def step() -> None:
        model(x).backward()
        optimizer.step()

    with pytest.raises(error) as raised:
        profile(step, model, optimizer)
    report = raised.value.memory_report  # type: ignore[attr-defined]
    assert isinstance(report, MemoryReport)
    assert report.error is not None
    assert report.error.startswith(error.__name__)
    assert report.peak_bytes == report.timeline.total(report.peak_time)
    kept = [held for held in report.held if held.kind == "feature maps"]
    assert kept[0].module == "first.1"
    assert kept[0].kept_by[0] == "first.1: aten.tanh"
    assert is_untouched(model)


def test_hooks_are_there_meanwhile_and_gone_afterwards() -> None:
    """The check itself can fail."""
    model = Breaks("does not")
    observed = profile(model=model)
    assert is_untouched(model)
    with observed:
        assert not is_untouched(model)
        model(torch.randn(4, 8)).backward()
    assert is_untouched(model)
    assert observed.report.error is None


def test_a_profile_that_cannot_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Breaks("does not")

    def refuse(*_: Any) -> None:
        raise KeyError("no")

    monkeypatch.setattr(collect, "Starts", refuse)
    with pytest.raises(KeyError, match="no"):
        profile(lambda: None, model)
    assert is_untouched(model)


def test_tensors_that_were_overwritten_are_still_noticed() -> None:
    model = nn.Linear(4, 4)

    def step() -> None:
        y = model(torch.randn(2, 4)).exp()
        loss = (y * y).sum()
        y.add_(1)
        loss.backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        profile(step, model)
    assert is_untouched(model)


def test_a_profile_is_used_once_and_read_afterwards() -> None:
    model = nn.Linear(2, 2)
    observed = profile(model=model)
    with pytest.raises(NotObserved, match="read it after"):
        _ = observed.report
    with observed:
        model(torch.randn(1, 2))
    with pytest.raises(NotObserved, match="make another one"), observed:
        pass


def test_what_cannot_be_profiled_is_refused() -> None:
    with pytest.raises(InvalidInput, match="a function without arguments"):
        profile(3, nn.Linear(1, 1))  # type: ignore[call-overload]
    with pytest.raises(InvalidInput, match=r"a torch\.nn\.Module"):
        profile(lambda: None, None)  # type: ignore[call-overload]
    with pytest.raises(InvalidInput, match=r"a torch\.optim\.Optimizer"):
        profile(lambda: None, nn.Linear(1, 1), 3)  # type: ignore[call-overload]
    with pytest.raises(InvalidInput, match="found when it takes a step"):
        profile(lambda: None, nn.Linear(1, 1), [object()])  # type: ignore[list-item]


async def awaits() -> None: ...


async def yields() -> AsyncIterator[None]:
    yield


@pytest.mark.parametrize("step", [awaits, yields])
def test_a_step_of_which_nothing_would_run_is_refused(step: Any) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(InvalidInput, match=r"asynchronous function, .*asyncio\.run"):
        profile(step, model)
    assert is_untouched(model)


@dataclass(frozen=True)
class Closed(Exception):
    """Takes no attributes."""

    why: str


def test_an_error_that_takes_no_attributes_goes_on() -> None:
    def step() -> None:
        raise Closed("inside")

    observed = profile(model=nn.Linear(2, 2))
    with pytest.raises(Closed, match="inside"), observed:
        step()
    assert observed.report.error == "Closed: inside"


def test_a_broken_device_replaces_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is asked of it after an error raises that once more."""
    asked: list[str] = []

    def broken(what: Any) -> Any:
        asked.append(what)
        raise RuntimeError("CUDA error: device-side assert triggered")

    hush(broken, torch.device("cpu"))
    assert asked == [""]
    monkeypatch.setattr(torch.cuda, "mem_get_info", broken)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    monkeypatch.setattr(Emulated, "driver_bytes", lambda _: driver_bytes(torch.device("cuda")))

    def step() -> None:
        model(torch.randn(2, 4)).sum().backward()
        raise KeyError("the program's own")

    with recorded(monkeypatch), pytest.raises(KeyError, match="the program's own") as raised:
        profile(step, model)
    assert len(asked) == 2
    report = raised.value.memory_report  # type: ignore[attr-defined]
    assert report.notes == driver_notes(None)
    assert "driver" not in report.by_kind()


def test_a_graph_from_before_the_step_is_kept_since_then() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    y = model(torch.randn(4, 8)).exp()
    report = profile(lambda: (y * y).sum().backward(), model)
    kept = [(one.kept_by, one.kind) for one in report.held if one.kept_by and one.born == 0]
    assert kept[-3:] == [
        (("ExpBackward0", "aten.mul"), "inputs"),  # the step reads it
        (("AddmmBackward0",), "feature maps"),
        (("TanhBackward0",), "feature maps"),
    ]


def test_a_forward_pass_alone_shows_what_waits_for_a_backward_pass() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    with profile(model=model) as observed:
        y = model(torch.randn(4, 8))
    kept = [one for one in observed.report.held if one.kind == "feature maps"]
    assert [(one.operator, one.freed) for one in kept] == [("aten.tanh", None)]
    y.sum().backward()
