"""The report as a value: its sums, and the way to JSON and back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from threading import Barrier
from time import sleep

import pytest

from ecornn.errors import InvalidInput
from ecornn.profiler.model import COUNTED, TENSORS, Held, MemoryReport, Part, rows_of
from support.memory_reports import made_by_hand


def test_the_rows_add_up() -> None:
    report = made_by_hand()
    assert report.peak_bytes == report.timeline.total(report.peak_time) == 11264
    assert report.peak_bytes == max(map(report.timeline.total, range(len(report.timeline))))
    assert report.device_bytes == report.peak_bytes + 8192 + 65536
    of_tensors = [row for row in report.rows if row.kind in TENSORS]
    assert of_tensors == rows_of(report.held, report.peak_time)
    for time in range(len(report.timeline)):
        for kind in TENSORS:
            alive = sum(one.bytes for one in report.at(time) if one.kind == kind)
            assert alive == report.timeline.bytes.get(kind, [0] * 6)[time], (time, kind)
        rounding = sum(one.allocated_bytes - one.bytes for one in report.at(time))
        assert rounding == report.timeline.bytes["rounding"][time]
    assert set(report.timeline.bytes) <= set(COUNTED)


def test_bytes_by_kind_and_by_module() -> None:
    report = made_by_hand()
    assert report.by_kind()["feature maps"] == 6000
    assert report.by_module() == {
        "encoder": 6000, "decoder.attention": 2300, "": 512
    }  # fmt: skip
    assert report.by_module(depth=1)["decoder"] == 2300


def test_json_and_back() -> None:
    report = made_by_hand()
    assert MemoryReport.from_json(report.to_json()) == report
    with pytest.raises(InvalidInput, match="profile the step again"):
        MemoryReport.from_json("{}")


def test_storages_are_made_once_though_several_threads_ask() -> None:
    report, readers = made_by_hand(), 4
    together, made = Barrier(readers), []

    def make() -> Part:
        made.append(1)
        sleep(0.05)
        return Part({"held": report.held})

    others = {one.name: getattr(report, one.name) for one in fields(report) if one.name != "held"}
    later = MemoryReport.made_later(make, **others)

    def read(_: int) -> tuple[Held, ...]:
        together.wait(60)
        return later.held

    with ThreadPoolExecutor(readers) as pool:
        assert list(pool.map(read, range(readers))) == [report.held] * readers
    assert made == [1]
    with pytest.raises(AttributeError, match="has no attribute 'hold'"):
        _ = later.hold
