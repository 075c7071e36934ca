"""Text, files, pictures and differences: every byte once, sums that are the report's, no surprises
from names."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ecornn.errors import InvalidInput
from ecornn.profiler.model import COUNTED, TENSORS, MemoryReport, Row, Timeline
from ecornn.profiler.render import as_text, compare, to_csv, to_trace, write, write_difference
from ecornn.profiler.render.storages import lines_of_storages
from ecornn.profiler.render.timeline import times_to_draw
from ecornn.profiler.render.tree import lines_of, tree_of
from ecornn.sizes import size_text
from support.memory_reports import made_by_hand
from support.random_reports import HOSTILE, random_report

SEEDS = range(4)
EMPTY = MemoryReport("meta", 0, (), (), Timeline((), (), (), {}))


def small_report() -> MemoryReport:
    """Rows under a KiB, which are printed to the byte, in a tree of modules."""
    modules = ("", "a", "a.b", "a.b.c", "a.b.d", "e.f", "e.f.g", "h")
    rows = [
        Row(module, kind, 1 + 7 * i + 3 * k, 1)
        for i, module in enumerate(modules)
        for k, kind in enumerate(COUNTED[:4])
    ]
    return replace(EMPTY, rows=tuple(rows))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("depth", "at_most"), [(None, None), (1, None), (2, 3), (None, 4)])
def test_the_lines_of_the_tree_add_up(seed: int, depth: int | None, at_most: int | None) -> None:
    report = random_report(seed)
    rows = [row for row in report.rows if row.kind in COUNTED]
    lines = lines_of(tree_of(rows), depth, at_most)
    parts = [line for line in lines if not line.whole]
    assert sum(line.bytes for line in parts) == report.peak_bytes
    for kind, count in report.by_kind().items():
        if kind in COUNTED:
            assert sum(line.by_kind.get(kind, 0) for line in parts) == count
    for i, line in enumerate(lines):  # a sum is that of the lines below it
        if line.whole:
            below = []
            for other in lines[i + 1 :]:
                if other.depth <= line.depth:
                    break
                below.append(other)
            assert line.bytes == sum(other.bytes for other in below if not other.whole)
    if depth is not None:
        assert all(line.depth < depth for line in lines)
    if depth is None and at_most is None:  # every row once
        own = [tuple(line.by_kind.items()) for line in parts]
        assert sorted(count for pairs in own for _, count in pairs) == sorted(
            row.bytes for row in rows
        )


@pytest.mark.parametrize(("width", "columns"), [(120, 5), (64, 3), (40, 1)])
def test_the_printed_table_adds_up_to_the_byte(width: int, columns: int) -> None:
    report = small_report()
    _, table = as_text(report, width).split("\nmodule ")
    heads, _, *lines = [line for line in table.splitlines() if line.strip()]
    assert ("other kinds" in heads) == (columns == 3)
    figures = {line: [int(n) for n in re.findall(r"(\d+) B", line)] for line in lines}
    assert {len(found) for found in figures.values()} == {columns}
    for line, (whole, *kinds) in figures.items():
        assert whole == sum(kinds) or columns == 1, line
    assert lines[-1].startswith("sum ")
    assert figures[lines[-1]][0] == report.peak_bytes
    tops = [figures[line] for line in lines[:-1] if not line.startswith(" ")]
    assert [sum(column) for column in zip(*tops, strict=True)] == figures[lines[-1]]
    assert tops == sorted(tops, reverse=True)  # the largest first


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 250])
def test_text_keeps_to_the_width_of_the_terminal(width: int) -> None:
    report = random_report(3)
    text = as_text(report, width)
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    assert f"peak: {size_text(report.peak_bytes)}" in words
    assert f"operator {report.peak_time} of" in words
    for kind in report.by_kind():  # told even where the table has no room for it
        assert kind in words


@pytest.mark.parametrize("seed", SEEDS)
def test_names_cannot_move_the_cursor(seed: int) -> None:
    report = random_report(seed, names=HOSTILE)
    other = random_report(seed + 1, names=HOSTILE)
    for text in (as_text(report), str(compare(report, other, HOSTILE[:2]))):
        assert all(character.isprintable() for character in text.replace("\n", ""))
    assert "[bold]markup[/bold]" in as_text(random_report(0, names=HOSTILE[8:9]))


def test_a_report_of_nothing_and_of_a_step_that_raised() -> None:
    assert "peak: 0 B" in as_text(EMPTY)
    assert "the step raised" in as_text(replace(made_by_hand(), error="ValueError: no"))
    assert "ValueError: no" in as_text(replace(made_by_hand(), error="ValueError: no"))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_lines_of_storages_add_up(seed: int) -> None:
    report = random_report(seed, storages=200)
    for at_most in (5, 2000):
        lines = lines_of_storages(report, at_most)
        assert len(lines) <= at_most + 2 * len(TENSORS)
        assert sum(line[0] for line in lines) == sum(held.bytes for held in report.held)
        at_peak = sum(line[0] for line in lines if line[7] == "yes")
        assert at_peak == sum(held.bytes for held in report.at_peak)


def test_alike_tensors_are_one_line() -> None:
    report = made_by_hand()
    again = tuple(replace(report.held[2], id=10 + i) for i in range(50))
    lines = lines_of_storages(replace(report, held=report.held + again))
    (line,) = [line for line in lines if line[4] == "aten.addmm"]
    assert line[:4] == (51 * 4000, "encoder", "feature maps", "51 of 10×100 float32")


@pytest.mark.parametrize("seed", SEEDS)
def test_csv_has_every_storage_and_adds_up_to_the_device(seed: int) -> None:
    report = random_report(seed, names=HOSTILE[:-1])
    lines = list(csv.DictReader(io.StringIO(to_csv(report), newline="")))
    assert sum(int(line["bytes"]) for line in lines if line["at_peak"] == "1") == (
        report.device_bytes
    )
    told = [(line["module"], line["operator"], line["why"]) for line in lines]
    assert told[: len(report.held)] == [(one.module, one.operator, one.why) for one in report.held]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_trace_follows_the_trace_event_format(seed: int) -> None:
    report = random_report(seed, names=HOSTILE)
    trace = json.loads(to_trace(report))
    needed = {"X": {"dur"}, "C": {"args"}, "M": {"args"}, "i": {"s"}}
    for event in trace["traceEvents"]:
        assert {"name", "ph", "ts", "pid", "tid"} | needed[event["ph"]] <= set(event)
        assert isinstance(event["name"], str)
        assert all(isinstance(event[name], int) for name in ("ts", "pid", "tid"))
    counters = [event for event in trace["traceEvents"] if event["ph"] == "C"]
    assert [event["ts"] for event in counters] == list(range(len(report.timeline)))
    for event in counters:
        assert sum(event["args"].values()) == report.timeline.total(event["ts"])
    (peak,) = [event for event in trace["traceEvents"] if event["ph"] == "i"]
    assert sum(counters[peak["ts"]]["args"].values()) == report.peak_bytes
    passes = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["tid"] == 1]
    assert sum(event["dur"] for event in passes) == len(report.timeline)


def test_a_long_timeline_keeps_its_peaks() -> None:
    report = random_report(5, operators=900)
    times = times_to_draw(report, buckets=50)
    assert len(times) <= 103
    assert times == sorted(set(times))
    assert {0, report.peak_time, len(report.timeline) - 1} <= set(times)
    total = report.timeline.total
    for bucket in range(50):  # the highest of each bucket is drawn
        bounds = range(bucket * 18, bucket * 18 + 18)
        assert max(map(total, bounds)) == max(total(time) for time in times if time in bounds)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_difference_has_every_row_of_both_once(seed: int) -> None:
    before, after = random_report(seed), random_report(seed + 100)
    found = compare(before, after, ("eager", "echo"))
    keys = [(change.module, change.kind) for change in found.changes]
    rows = {(row.module, row.kind) for report in (before, after) for row in report.rows}
    assert len(keys) == len(set(keys))
    assert set(keys) == {row for row in rows if row[1] in COUNTED}
    assert sum(change.before for change in found.changes) == before.peak_bytes == found.sum.before
    assert sum(change.after for change in found.changes) == after.peak_bytes == found.sum.after
    sizes = [abs(change.difference) for change in found.changes]
    assert sizes == sorted(sizes, reverse=True)
    for width in (40, 80, 140):
        assert max(map(len, found.as_text(width).splitlines())) <= width


def test_a_compiled_model_is_compared_with_the_model() -> None:
    report = made_by_hand()
    rows = tuple(
        replace(row, module=f"_orig_mod.{row.module}" if row.module else "") for row in report.rows
    )
    found = compare(report, replace(report, rows=rows))
    assert all(change.difference == 0 for change in found.changes)
    assert "others" in str(found)
    assert compare(report, EMPTY).sum.difference == -report.peak_bytes


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_pictures_are_drawn_alike_each_time(tmp_path: Path, suffix: str) -> None:
    report = random_report(2, names=(*HOSTILE, "a$b", "$x^{$"), modules=30, storages=200)
    paths = [tmp_path / f"{i}{suffix}" for i in range(2)]
    for path in paths:
        write(report, path)
    first, second = [path.read_bytes() for path in paths]
    assert first.startswith({".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix])
    assert first == second


def test_a_report_of_nothing_can_be_drawn(tmp_path: Path) -> None:
    write(EMPTY, tmp_path / "empty.png")
    write(EMPTY, tmp_path / "empty.html")


def test_the_suffix_says_what_is_written(tmp_path: Path) -> None:
    report = made_by_hand()
    for name in ("a.json", "a.trace.json", "a.csv", "a.html"):
        write(report, tmp_path / name)
    assert MemoryReport.from_json((tmp_path / "a.json").read_text()) == report
    assert "traceEvents" in json.loads((tmp_path / "a.trace.json").read_text())
    assert (tmp_path / "a.csv").read_text() == to_csv(report)
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")
    with pytest.raises(InvalidInput, match=r"\.trace\.json, \.json, \.csv, \.html"):
        write(report, tmp_path / "a.xml")
    with pytest.raises(InvalidInput, match="a folder that exists"):
        write(report, tmp_path / "none" / "a.csv")
    with pytest.raises(InvalidInput, match=r"ends in \.html"):
        write_difference(compare(report, report), tmp_path / "a.csv")


def test_a_report_shows_itself(tmp_path: Path) -> None:
    report = made_by_hand()
    assert str(report) == as_text(report)
    assert repr(report) == "MemoryReport(11,264 bytes on cuda:0, 7 storages)"
    report.write(str(tmp_path / "a.html"))
    assert (tmp_path / "a.html").read_text() == report.to_html()


def test_half_a_surrogate_pair_can_be_written(tmp_path: Path) -> None:
    report = random_report(0, names=HOSTILE[-1:])
    for name in ("a.json", "a.trace.json", "a.csv", "a.html"):
        write(report, tmp_path / name)
        (tmp_path / name).read_text(encoding="utf-8")
