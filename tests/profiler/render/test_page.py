"""The page as text: escaped, small, alone, and with tables that need no script."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest

from ecornn.profiler.render import compare, to_html
from ecornn.profiler.render.storages import lines_of_storages
from support.memory_reports import made_by_hand
from support.random_reports import HOSTILE, random_report

OURS = {
    *("html", "head", "meta", "title", "style", "script", "body", "h1", "h2", "p", "br", "div"),
    *("span", "svg", "rect", "form", "label", "input", "select", "option", "output"),
    *("table", "thead", "tbody", "tfoot", "tr", "th", "td"),
}


class Page(HTMLParser):
    """Tags with their attributes, the cells of each table, and the data for the script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.numbers: dict[str, list[list[int]]] = {}
        self._table, self._in, self.data = "", "", ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append((tag, given))
        self._in = "data" if given.get("id") == "data" else tag
        if tag == "table":
            self._table = given.get("id") or ""
            self.tables[self._table], self.numbers[self._table] = [], []
        elif tag == "tr":
            self.tables[self._table].append([])
            self.numbers[self._table].append([])
        elif tag in ("td", "th"):
            self.tables[self._table][-1].append("")
            if "data-v" in given:
                self.numbers[self._table][-1].append(int(given["data-v"] or ""))

    def handle_data(self, data: str) -> None:
        if self._in in ("td", "th"):
            self.tables[self._table][-1][-1] += data
        elif self._in == "data":
            self.data += data
            self._in = ""


@pytest.mark.parametrize("names", [("encoder", "decoder"), HOSTILE])
def test_only_our_own_tags_are_in_the_page(names: tuple[str, ...]) -> None:
    report, other = random_report(1, names=names), random_report(2, names=names)
    for text in (to_html(report), compare(report, other, (names[0], names[1])).to_html()):
        page = Page(text)
        tags = {tag for tag, _ in page.tags}
        assert tags <= OURS
        assert sum(tag == "script" for tag, _ in page.tags) == 2
        for tag, given in page.tags:
            assert not any(name.startswith("on") for name in given), (tag, given)
            assert not {"src", "href", "style", "action"} & set(given), (tag, given)
        (policy,) = [
            given["content"] or ""
            for _, given in page.tags
            if given.get("http-equiv") == "Content-Security-Policy"
        ]
        assert policy.startswith("default-src 'none'; script-src 'sha256-")
        assert "unsafe" not in policy


@pytest.mark.parametrize("seed", range(6))
def test_the_tables_hold_every_row_and_add_up(seed: int) -> None:
    report = random_report(seed, names=HOSTILE[2:5])
    page = Page(to_html(report))
    heads, *rows, peak, device = page.tables["rows"]
    assert heads == ["module", "kind", "size", "tensors"]
    assert len(rows) == len(report.rows)
    sizes = [numbers[0] for numbers in page.numbers["rows"][1:-2]]
    assert sorted(sizes) == sorted(row.bytes for row in report.rows)
    assert sum(sizes) == report.device_bytes == page.numbers["rows"][-1][0]
    assert page.numbers["rows"][-2][0] == report.peak_bytes
    assert (peak[0], device[0]) == ("the peak", "of the device")
    of_outside = {"(no module)" if not row.module else row.module for row in report.rows}
    assert {row[0] for row in rows} == of_outside

    lines = lines_of_storages(report)
    _, *storages = page.tables["storages"]
    assert [tuple(row[1:]) for row in storages] == [line[1:] for line in lines]
    assert [numbers[0] for numbers in page.numbers["storages"][1:]] == [line[0] for line in lines]


def test_the_script_s_data_is_the_report_s() -> None:
    report = random_report(4, names=HOSTILE)
    data = json.loads(Page(to_html(report)).data)
    (points,) = data["timelines"]
    assert points["times"] == list(range(len(report.timeline)))
    for place, time in enumerate(points["times"]):
        assert sum(kind[place] for kind in points["values"]) == report.timeline.total(time)

    def total(node: list[list]) -> int:
        return sum(node[1]) + sum(map(total, node[2]))

    assert total(data["tree"]) == report.peak_bytes


def test_a_difference_adds_up() -> None:
    before, after = made_by_hand(), random_report(7)
    numbers = Page(compare(before, after).to_html()).numbers["changes"]
    _, *rows, sums = numbers
    assert [sum(column) for column in zip(*rows, strict=True)] == sums
    assert sums == [before.peak_bytes, after.peak_bytes, after.peak_bytes - before.peak_bytes]


def test_ten_thousand_tensors_make_a_small_page() -> None:
    report = random_report(2, storages=10_000, modules=300, operators=20_000)
    text = to_html(report)
    assert len(text.encode()) < 1_000_000
    numbers = [row[0] for row in Page(text).numbers["storages"] if row]
    assert sum(numbers) == sum(held.bytes for held in report.held)
