"""The page in a real browser: its script runs, sorts and filters; nothing else runs, and nothing
leaves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ecornn.profiler.model import MemoryReport, Row
from ecornn.profiler.render import compare, write, write_difference
from ecornn.profiler.render.storages import lines_of_storages
from ecornn.sizes import size_text
from support.browser import NAMES, Browser, executable
from support.memory_reports import made_by_hand
from support.random_reports import HOSTILE, random_report

pytestmark = pytest.mark.skipif(
    executable() is None, reason=f"needs a browser; none of {', '.join(NAMES)} is installed"
)

COLUMN = "[...document.querySelectorAll('#storages tbody tr:not([hidden])')]"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    started = Browser(tmp_path_factory.mktemp("browser"))
    yield started
    started.close()


def opened(browser: Browser, report: MemoryReport, tmp_path: Path, scripts: bool = True) -> None:
    path = tmp_path / "report.html"
    write(report, path)
    browser.open(path.as_uri(), scripts=scripts)
    assert browser.requests() == [path.as_uri()]
    assert browser.complaints() == []
    assert browser.evaluate("document.documentElement.dataset.ready") == (
        "yes" if scripts else None
    )


def click(browser: Browser, selector: str, number: int = 0) -> None:
    browser.evaluate(
        f"document.querySelectorAll({selector!r})[{number}]"
        ".dispatchEvent(new MouseEvent('click', {bubbles: true}))"
    )


def test_requests_errors_and_scripts_would_be_noticed(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text("<img src='file:///none.png'><script>console.error('no'); nothing()</script>")
    browser.open(page.as_uri())
    assert browser.requests() == [page.as_uri(), "file:///none.png"]
    told = str(browser.complaints())
    assert "ERR_FILE_NOT_FOUND" in told
    assert "'no'" in told
    assert "nothing is not defined" in told


def test_it_sorts_by_every_column(browser: Browser, tmp_path: Path) -> None:
    report = random_report(3)
    opened(browser, report, tmp_path)
    click(browser, "input[name=peak]")  # all lines, not those at the peak alone
    browser.evaluate("document.querySelector('form').dispatchEvent(new Event('input'))")
    lines = lines_of_storages(report)
    for column in range(9):
        values = []
        for _ in range(2):
            click(browser, "#storages th button", column)
            what = "dataset.v" if column == 0 else "textContent"
            values.append(browser.evaluate(f"{COLUMN}.map(row => row.cells[{column}].{what})"))
        if column == 0:
            assert [int(value) for value in values[0]] == sorted(
                (line[0] for line in lines), reverse=True
            )
        if column == 2:
            assert values[0] == sorted(line[2] for line in lines)
        assert sorted(values[0]) == sorted(str(line[column]) for line in lines)
        assert values[0] == values[1][::-1] or len(set(values[0])) < len(values[0])
        assert values[0] != values[1]
        state = browser.evaluate("[...document.querySelectorAll('#storages [aria-sort]')].length")
        assert state == 1


def test_it_filters_and_tells_the_sum(browser: Browser, tmp_path: Path) -> None:
    report = random_report(6)
    opened(browser, report, tmp_path)
    lines = lines_of_storages(report)

    def told(words: str, kind: str, peak: bool) -> tuple[int, str]:
        form = "document.querySelector('form').elements"
        browser.evaluate(
            f"{form}.words.value = {words!r}; {form}.kind.value = {kind!r};"
            f"{form}.peak.checked = {str(peak).lower()};"
            "document.querySelector('form').dispatchEvent(new Event('input'))"
        )
        count = browser.evaluate(f"{COLUMN}.length")
        return count, browser.evaluate("document.querySelector('output').textContent")

    for words, kind, peak in (
        ("", "", True),
        ("", "", False),
        ("ENCODER", "", False),
        ("encoder mul", "feature maps", False),
        ("proj", "weights", True),
        ("not there", "", False),
    ):
        fits = [
            line
            for line in lines
            if all(word in " ".join(map(str, line[1:])).lower() for word in words.lower().split())
            and kind in ("", line[2])
            and (not peak or line[7] == "yes")
        ]
        size = sum(line[0] for line in fits)
        assert told(words, kind, peak) == (
            len(fits),
            f"{len(fits)} of {len(lines)} rows, {size_text(size)} ({size:,} bytes)",
        )


def test_hostile_names_are_shown_and_do_nothing(browser: Browser, tmp_path: Path) -> None:
    report = random_report(1, names=HOSTILE, modules=30)
    opened(browser, report, tmp_path)
    for _ in range(3):  # down the treemap, as far as it goes
        click(browser, "#treemap g[role=button], #treemap button")
    assert browser.evaluate("typeof window.hacked") == "undefined"
    assert browser.evaluate("document.querySelectorAll('script').length") == 2
    assert browser.evaluate("document.querySelectorAll('img, b, svg svg').length") == 0
    modules = browser.evaluate("[...document.querySelectorAll('#rows tbody td:first-child')]"
                               ".map(cell => cell.textContent)")  # fmt: skip
    assert any("</script><script>window.hacked=1</script>" in module for module in modules)
    assert browser.complaints() == []


def test_pictures_are_drawn_and_answer(browser: Browser, tmp_path: Path) -> None:
    report = made_by_hand()
    inside = Row("decoder.embedding", "weights", 2000, 1)
    opened(browser, replace(report, rows=(*report.rows, inside)), tmp_path)
    assert browser.evaluate("document.querySelectorAll('#timeline-0 path').length") == 8
    moment = "document.getElementById('moment-0').textContent"
    assert browser.evaluate(moment).startswith(
        f"the peak: operator 3, aten.mul in decoder.attention: {size_text(report.peak_bytes)}:"
    )
    # At a fifth and a bit, the first operator runs.
    place = browser.evaluate(
        "(box => [box.left + 0.25 * box.width, box.top + 20])"
        "(document.querySelector('#timeline-0 svg').getBoundingClientRect())"
    )
    browser.ask("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])
    total = size_text(report.timeline.total(1))
    assert browser.evaluate(moment).startswith(f"operator 1, aten.addmm in encoder: {total}: feat")

    texts = "[...document.querySelectorAll('#treemap svg text')].map(text => text.textContent)"
    assert {"encoder", "decoder"} <= set(browser.evaluate(texts))
    areas = browser.evaluate(
        "[...document.querySelectorAll('#treemap .edge')]"
        ".map(edge => edge.getAttribute('width') * edge.getAttribute('height'))"
    )
    assert sum(areas) == pytest.approx(1000 * 420)
    sizes = {6348: "decoder", 6000: "encoder", 512: "inputs", 404: "rounding"}
    assert areas == pytest.approx([1000 * 420 * size / sum(sizes) for size in sizes])
    sides = browser.evaluate(
        "[...document.querySelectorAll('#treemap .edge')]"
        ".map(edge => edge.getAttribute('width') / edge.getAttribute('height'))"
    )
    assert all(1 / 2 < ratio < 2 for ratio in sides[:2])  # as square as they can be
    click(browser, "#treemap g[role=button]")
    assert browser.evaluate("document.querySelector('#treemap p').textContent") == (
        f"the model › decoder {size_text(6348)}"
    )
    click(browser, "#treemap button")
    assert {"encoder", "decoder"} <= set(browser.evaluate(texts))


def test_without_scripts_the_tables_are_there(browser: Browser, tmp_path: Path) -> None:
    report = random_report(5)
    opened(browser, report, tmp_path, scripts=False)
    assert browser.evaluate("document.querySelector('form').checkVisibility()") is False
    shown = browser.evaluate(f"{COLUMN}.filter(row => row.checkVisibility()).length")
    assert shown == len(lines_of_storages(report))


def test_a_difference_draws_both_at_one_scale(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "difference.html"
    found = compare(made_by_hand(), random_report(8), (HOSTILE[0], HOSTILE[1]))
    write_difference(found, path)
    browser.open(path.as_uri())
    assert browser.requests() == [path.as_uri()]
    assert browser.complaints() == []
    assert browser.evaluate("typeof window.hacked") == "undefined"
    scales = browser.evaluate(
        "[0, 1].map(i => [...document.querySelectorAll(`#timeline-${i} text`)].pop().textContent)"
    )
    assert scales[0] == scales[1]
    click(browser, "#changes th button", 4)
    values = browser.evaluate(
        "[...document.querySelectorAll('#changes tbody tr')].map(row => +row.cells[4].dataset.v)"
    )
    assert values == sorted((change.difference for change in found.changes), reverse=True)


def test_ten_thousand_tensors_can_be_used(browser: Browser, tmp_path: Path) -> None:
    opened(browser, random_report(2, 10_000, 300, 20_000), tmp_path)
    click(browser, "#storages th button", 0)
    click(browser, "#storages th button", 0)
    sizes = browser.evaluate(f"{COLUMN}.map(row => +row.cells[0].dataset.v)")
    assert sizes == sorted(sizes)
