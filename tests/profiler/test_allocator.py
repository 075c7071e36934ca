"""The allocator's own count, emulated: rounding, scratch and library buffers fill their rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ecornn.profiler import MemoryReport, assemble, profile
from ecornn.profiler.allocator import Allocator, Told, rounded
from ecornn.profiler.collect import Collector

LIBRARY = 4096
SCRATCH = 3_000_000
LARGE_BLOCK = 700


class Emulated(Allocator):
    """Blocks of 512 bytes, a library's buffer, scratch inside some operators, one unsplit block."""

    def __init__(self, collector: Collector, scratch: dict[str, int]) -> None:
        self.collector, self.scratch = collector, scratch
        self.highest = self.peak = self.asked = 0
        self.truth: dict[int, int] = {}
        super().__init__(torch.device("cpu"), collector.ledger.bytes_alive)

    def now(self) -> tuple[int, int]:
        """What is allocated, and what was asked for."""
        alive = [one.bytes for one in self.collector.ledger.records if one.freed is None]
        return sum(map(rounded, alive)) + LIBRARY + LARGE_BLOCK, sum(alive) + LIBRARY

    def after(self, operator: str, time: int, tensors: int) -> None:
        # as the real one does on its own account, whoever asks
        self.truth[time] = self.now()[0] + self.scratch.get(operator, 0)
        self.peak = max(self.peak, self.truth[time])
        self.highest = max(self.highest, self.peak)
        super().after(operator, time, tensors)

    def ask(self) -> Told:
        self.asked += 1
        current, asked_for = self.now()
        told = Told(max(self.peak, current), current, asked_for, 2 * self.highest)
        self.peak = current
        return told

    def driver_bytes(self) -> int:
        return 12345


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[MemoryReport, Emulated]]:
    """Observes a step beside an emulated allocator."""

    def observe(
        model: nn.Module, x: Tensor, step: Callable[[], Any], scratch: dict[str, int]
    ) -> tuple[MemoryReport, Emulated]:
        found: list[Emulated] = []
        start = Collector.start

        def with_allocator(self: Collector) -> None:
            self.ledger.given(x)  # a real allocator counts it from the beginning
            self.allocator = Emulated(self, scratch)
            found.append(self.allocator)
            start(self)

        with monkeypatch.context() as patched:
            patched.setattr(Collector, "start", with_allocator)
            patched.setattr(assemble, "_in_blocks", lambda device: True)
            report = profile(step, model)
        return report, found[0]

    return observe


def test_the_rows_add_up_to_the_allocator_s_peak(emulated: Any) -> None:
    model = nn.Sequential(nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 30))
    x = torch.randn(16, 30)
    report, allocator = emulated(
        model, x, lambda: model(x).sum().backward(), {"aten.addmm": SCRATCH}
    )
    assert report.peak_bytes == allocator.highest == report.timeline.total(report.peak_time)
    # The second product is at the peak: its scratch stands under its module.
    assert report.timeline.operator[report.peak_time] == "aten.addmm"
    rows = {(row.module, row.kind): row.bytes for row in report.rows}
    assert rows["2", "no tensor"] == SCRATCH
    assert rows["", "no tensor"] == LIBRARY
    padding = sum(one.allocated_bytes - one.bytes for one in report.at_peak)
    assert rows["", "rounding"] == padding + LARGE_BLOCK
    assert rows["", "driver"] == 12345
    assert report.device_bytes == 2 * allocator.highest + 12345
    assert max(map(report.timeline.total, range(len(report.timeline)))) == report.peak_bytes


def test_few_readings_lose_no_peak_and_find_who_took_it(emulated: Any) -> None:
    """Of a step that is long beside the distance of readings; what is scratchy in its middle is
    found by its first occurrence and told at the largest."""
    layers = [one for _ in range(20) for one in (nn.Linear(30, 30), nn.Tanh(), nn.Softmax(-1))]
    model, x = nn.Sequential(*layers), torch.randn(64, 30)
    step = lambda: model(x).sum().backward()  # noqa: E731
    for scratchy in ("aten.addmm", "aten._softmax", "aten.tanh_backward"):
        report, allocator = emulated(model, x, step, {scratchy: SCRATCH})
        assert report.peak_bytes == allocator.highest == report.timeline.total(report.peak_time)
        assert max(map(report.timeline.total, range(len(report.timeline)))) == report.peak_bytes
        assert report.timeline.operator[report.peak_time] == scratchy
        assert allocator.truth[report.peak_time] == allocator.highest
        told = {time for time, name in enumerate(report.timeline.operator) if name == scratchy}
        exact = [time for time in told if report.timeline.total(time) == allocator.truth[time]]
        assert len(exact) >= len(told) - 1, "but perhaps the one that betrayed it"
        assert allocator.asked < len(report.timeline) / 2


def test_tensors_that_the_step_does_not_touch_are_found() -> None:
    model, extra = nn.Linear(2, 2), torch.zeros(12_345)
    # whatever else is alive, of whatever kind, is looked at too
    others = [
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
        torch.eye(5).to_sparse(),
        torch.eye(5).to_sparse_csr(),
    ]
    collector = Collector(model, [], torch.device("cpu"))
    collector.start()
    try:
        collector.see_others()
    finally:
        collector.stop(failed=False)
    assert all(other.numel() for other in others)  # they were alive until here
    report = assemble.assemble(collector.observation(), None)
    found = [one for one in report.held if one.bytes == extra.nbytes]
    assert [(one.kind, one.born) for one in found] == [("other", 0)]


def test_sizes_are_rounded_to_blocks() -> None:
    assert [rounded(n) for n in (1, 512, 513)] == [512, 512, 1024]
