"""A report that nobody has read yet: what it holds, and what reading it gives."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from threading import Barrier
from types import CellType, FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ecornn.profiler import MemoryReport, UnreadableReport, assemble, profile, taken
from ecornn.profiler.history import History
from ecornn.profiler.lives import Mark
from ecornn.profiler.sightings import Keeper, Seen
from ecornn.profiler.taken import Taken
from support.functions import Doubled
from support.recorded_steps import DRIVER, Emulated, recorded

#: What a report may be made of: values, and how to make more of them.
PLAIN = (
    *(MemoryReport, Taken, History, Seen, Keeper, Mark),
    *(dict, list, tuple, str, int, float, type(None)),
    *(torch.device, torch.dtype, FunctionType, CellType),
)
LATER = ("peak_time", "rows", "held", "timeline", "notes", "what_if")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Doubled.apply(self.inner(x))
        return y


@pytest.fixture(autouse=True)
def _from_history(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with recorded(monkeypatch):
        yield


def unread(seen: Callable[[Any], None] = lambda _: None) -> MemoryReport:
    """`seen` is told what must not stay."""
    model, x = Layer(), torch.randn(4, 16)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        loss = model(x).sum()
        seen(loss)
        loss.backward()
        optimizer.step()

    for one in (model, optimizer, x, *model.parameters()):
        seen(one)
    report = profile(step, model, optimizer)
    assert not any(name in vars(report) for name in LATER)
    return report


def reached(start: Any) -> Iterator[Any]:
    """All that something holds on to; of functions what they enclose."""
    waiting, seen = [start], set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, type):
            continue
        seen.add(id(one))
        yield one
        inner = one.__closure__ or () if isinstance(one, FunctionType) else gc.get_referents(one)
        waiting += inner


def test_it_holds_nothing_but_values() -> None:
    watched: list[weakref.ref[Any]] = []
    gc.disable()  # and lets go of the rest at once
    try:
        report = unread(lambda one: watched.append(weakref.ref(one)))
        assert len(watched) > 4
        assert [one() for one in watched if one() is not None] == []
    finally:
        gc.enable()
    strange = {type(one) for one in reached(report) if not isinstance(one, PLAIN)}
    assert strange == set()
    assert any(isinstance(one, History) for one in reached(report))
    assert report.rows
    assert not any(isinstance(one, History) for one in reached(report)), "read, and given up"


def test_it_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, lives = [], taken.Lives
    monkeypatch.setattr(taken, "Lives", lambda *given: made.append(1) or lives(*given))
    report = unread()
    assert (report.device, report.error, report.unit) == ("cpu", None, "allocation")
    assert set(report.environment) == {"device", "torch", "python"}
    assert made == [], "these are known without reading"
    first = [getattr(report, name) for name in LATER]
    assert all(getattr(report, name) is one for name, one in zip(LATER, first, strict=True))
    assert made == [1]
    assert report.peak_bytes == report.timeline.total(report.peak_time) > 0


def test_several_threads_read_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    report, readers = unread(), 4
    made, lives, together = [], taken.Lives, Barrier(readers)
    monkeypatch.setattr(taken, "Lives", lambda *given: made.append(1) or lives(*given))

    def read(number: int) -> tuple[Any, ...]:
        together.wait(60)
        names = LATER[number:] + LATER[:number]  # each begins with another field
        found = {name: getattr(report, name) for name in names}
        return tuple(found[name] for name in LATER)

    with ThreadPoolExecutor(readers) as pool:
        first, *others = pool.map(read, range(readers))
    assert all(a is b for other in others for a, b in zip(first, other, strict=True))
    assert made == [1]


@pytest.mark.parametrize(
    "again",
    [
        lambda report: pickle.loads(pickle.dumps(report)),
        copy.copy,
        copy.deepcopy,
        lambda report: replace(report, unit=report.unit),
        lambda report: MemoryReport.from_json(report.to_json()),
    ],
    ids=["pickled", "copied", "copied deeply", "replaced", "JSON"],
)
def test_what_is_made_of_it_is_complete(again: Callable[[MemoryReport], MemoryReport]) -> None:
    report = unread()
    other = again(report)
    assert all(one.name in vars(other) for one in fields(MemoryReport))
    assert other == report
    assert {held.kind for held in other.held} >= {"weights", "feature maps", "gradients"}


def test_two_that_are_unread_are_compared_by_what_they_say() -> None:
    one, other = unread(), unread()
    assert replace(one, held=(), rows=(), timeline=other.timeline, peak_time=0) == replace(
        other, held=(), rows=(), peak_time=0
    )
    assert one != replace(other, error="ValueError: no")
    assert repr(unread()).startswith("MemoryReport(")


def test_of_a_step_that_raised() -> None:
    """What it raised is not held either: its frames have the model."""
    gone: list[weakref.ref[Any]] = []

    class Unusual(Exception):
        pass

    def broken() -> MemoryReport:
        model = Layer()

        def step() -> None:
            result, error = model(torch.randn(4, 16)).exp(), Unusual("inside")
            gone.extend(map(weakref.ref, (model, result, error)))
            raise error

        with pytest.raises(Unusual) as raised:
            profile(step, model)
        report: MemoryReport = raised.value.memory_report  # type: ignore[attr-defined]
        return report

    report = broken()
    gc.collect()
    assert [one() for one in gone] == [None] * 3
    assert report.error == "Unusual: inside"
    assert "rows" not in vars(report)
    assert any("exp" in by for held in report.held for by in held.kept_by)


def test_it_tells_of_the_step_and_not_of_the_time_of_reading(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = unread()
    line = next(held.line for held in expected.held if "tanh" in str(held.kept_by))
    report = unread()
    version = torch.__version__
    with monkeypatch.context() as later:
        later.setattr(torch, "__version__", "another")
        later.setattr(assemble.platform, "python_version", lambda: "another")
        later.setattr(assemble, "_in_blocks", lambda _: False)
        later.setattr(Emulated, "driver_bytes", lambda _: DRIVER + 1)
        later.setattr("sys.path", [])
        later.chdir(tmp_path)
        told = next(held.line for held in report.held if "tanh" in str(held.kept_by))
    assert report.environment["torch"] == version
    assert report.environment == expected.environment
    assert (report.by_kind()["driver"], report.notes) == (DRIVER, ())
    assert report.by_kind()["rounding"] == expected.by_kind()["rounding"]
    assert told == line
    assert "test_unread.py:" in line
    assert not Path(line).is_absolute()


def test_what_goes_wrong_in_reading_is_said_there(monkeypatch: pytest.MonkeyPatch) -> None:
    report = unread()

    def wrong(*_: Any) -> None:
        raise AttributeError("no such event")

    with monkeypatch.context() as patched:
        patched.setattr(taken, "Lives", wrong)
        for _ in range(2):
            with pytest.raises(UnreadableReport, match="AttributeError: no such event"):
                _ = report.peak_bytes
        assert report.device == "cpu", "the rest is there"
    assert report.peak_bytes > 0, "nothing is lost by it"
    with pytest.raises(AttributeError, match="has no attribute 'hold'"):
        _ = report.hold
