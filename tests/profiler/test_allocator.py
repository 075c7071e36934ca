"""The allocator's own count, emulated: rounding, scratch and library buffers fill their rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ecornn.profiler import assemble, profile
from ecornn.profiler.allocator import Allocator, Reading, rounded
from ecornn.profiler.collect import Collector
from ecornn.profiler.session import Profile

LIBRARY = 4096
SCRATCH = {"aten.addmm": 100_000}
LARGE_BLOCK = 700


class Emulated(Allocator):
    """Blocks of 512 bytes, a library's buffer, scratch inside some operators, one unsplit block."""

    def __init__(self, collector: Collector) -> None:
        self.collector, self.highest, self.before = collector, 0, 0
        self.readings: list[Reading] = []
        self.read(0)

    def read(self, time: int) -> None:
        ledger = self.collector.ledger
        alive = [record.bytes for record in ledger.records if record.freed is None]
        current = sum(map(rounded, alive)) + LIBRARY + LARGE_BLOCK
        operator = self.collector.times[time - 1][0] if time else ""
        peak = max(self.before, current + SCRATCH.get(operator, 0))
        self.highest, self.before = max(self.highest, peak), current
        rounding = current - sum(alive) - LIBRARY
        self.readings.append(Reading(time, peak, current, rounding, 2 * self.highest))

    def driver_bytes(self) -> int:
        return 12345


def test_the_rows_add_up_to_the_allocator_s_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 30))
    x = torch.randn(16, 30)
    found: list[Emulated] = []
    start = Collector.start

    def with_allocator(self: Collector) -> None:
        self.ledger.given(x)  # a real allocator counts it from the beginning
        self.allocator = Emulated(self)
        found.append(self.allocator)
        start(self)

    monkeypatch.setattr(Collector, "start", with_allocator)
    monkeypatch.setattr(assemble, "_in_blocks", lambda device: True)
    with profile(model=model) as observed:
        model(x).sum().backward()
    assert isinstance(observed, Profile)
    report = observed.report
    assert report.peak_bytes == found[0].highest == report.timeline.total(report.peak_time)
    # The second product is at the peak: its scratch stands under its module.
    assert report.timeline.operator[report.peak_time] == "aten.addmm"
    rows = {(row.module, row.kind): row.bytes for row in report.rows}
    assert rows["2", "no tensor"] == SCRATCH["aten.addmm"]
    assert rows["", "no tensor"] == LIBRARY
    padding = sum(one.allocated_bytes - one.bytes for one in report.at_peak)
    assert rows["", "rounding"] == padding + LARGE_BLOCK
    assert rows["", "driver"] == 12345
    assert report.device_bytes == 2 * found[0].highest + 12345
    highest = max(map(report.timeline.total, range(len(report.timeline))))
    assert highest == report.peak_bytes


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
    report = assemble.assemble(collector, None)
    found = [one for one in report.held if one.bytes == extra.nbytes]
    assert [(one.kind, one.born) for one in found] == [("other", 0)]


def test_sizes_are_rounded_to_blocks() -> None:
    assert [rounded(n) for n in (1, 512, 513)] == [512, 512, 1024]
