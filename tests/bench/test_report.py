from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ecornn.bench.cases import Case
from ecornn.bench.markdown import digits
from ecornn.bench.report import (
    BY_TORCH,
    HEAD,
    NOTHING_YET,
    Report,
    read_all,
    render,
    write_report,
)
from ecornn.bench.results import Row, merge, write
from ecornn.errors import InvalidInput
from support.measured import MIXED, PLAIN, mixed, plain, results, row

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "results.md"


def test_the_page_is_what_its_files_make_it() -> None:
    made = render(read_all(ROOT / "benchmarks" / "results"))
    assert PAGE.read_text(encoding="utf-8") == made, "run: ecornn bench report"


def test_every_committed_file_is_named_after_its_benchmark_and_has_no_failures() -> None:
    for name, found in read_all(ROOT / "benchmarks" / "results").items():
        assert name.startswith(found.benchmark)
        assert [row for row in found.rows if "failed" in row.metrics] == []


def test_no_files_make_a_page_that_says_so() -> None:
    assert render({}) == f"{HEAD}\n{NOTHING_YET}"


def test_times_and_ratios_come_from_the_rows() -> None:
    page = render({"cpu-imaginary.json": plain((2.5, 6.0), (2.0, 9.0))})
    assert "## Recurrent layers on the CPU: cpu-imaginary.json\n" in page
    assert "cpu Imaginary; threads 2; torch 9.9" in page
    assert "| layer | ecornn | torch.nn | torch.nn ÷ ecornn |" in page
    assert f"| {PLAIN} | 2.50 ± 4% / 6.00 ± 3% | 2.00 ± 5% / 9.00 ± 2% | 0.80× / 1.50× |" in page
    assert f"| {PLAIN} | 1.0e-07 | 1.0e-07 |" in page
    assert "| ecornn takes ≤ 1.05× the forward_us of torch.nn | 0 passed, 1 failed" in page
    assert "| ecornn takes ≤ 1.05× the train_us of torch.nn | 1 passed, 0 failed" in page
    assert "Memory" not in page


def test_every_line_of_a_table_has_as_many_cells() -> None:
    found = mixed({"ecornn lengths": (1, 2), "torch.nn packed": (3, 4), "torch.nn padded": (5, 6)})
    lines = render({"x.json": replace(found, rows=(*found.rows, *plain((1, 1), (1, 1)).rows))})
    tables: list[list[int]] = [[]]
    for line in lines.splitlines():
        if line.startswith("|"):
            tables[-1].append(line.count("|"))
        elif tables[-1]:
            tables.append([])
    assert len([t for t in tables if t]) == 6  # times, errors of both kinds; targets; missed ones
    assert all(len(set(table)) <= 1 for table in tables)


def test_memory_is_told_in_elements_of_one_state_a_step() -> None:
    unit = PLAIN.steps * PLAIN.batch * PLAIN.hidden * 4
    ours = row(PLAIN, "ecornn", 1, 1, kept_bytes=2 * unit, peak_bytes=6 * unit)
    graph = row(PLAIN, "ecornn+graph", 1, 1)
    page = render({"x.json": results(ours, graph)})
    assert f"| layer | ecornn |\n| --- | ---: |\n| {PLAIN} | 2.0 / 6.0 |" in page


def test_targets_of_memory_are_told_in_the_same_unit() -> None:
    case = Case("lstm", 1024, 64, 256, "bf16")
    memory = {"kept_bytes": 2 * case.sequence_bytes, "peak_bytes": 7 * case.sequence_bytes}
    found = results(row(case, "ecornn keep=states", 1, 1, **memory), benchmark="rnn")
    page = render({"x.json": found})
    kept, peak = "has kept_bytes ≤ 2.1 T·B·H elements", "has peak_bytes ≤ 6 T·B·H elements"
    assert f"{kept} | 1 passed, 0 failed, 0 not measured | 2.00 T·B·H |" in page
    assert f"{peak} | 0 passed, 1 failed, 0 not measured | 7.00 T·B·H |" in page


def test_a_contender_with_a_forward_pass_alone_has_a_place_in_the_tables() -> None:
    case = Case("lstm", 512, 4, 256, "bf16")
    floor = Row(case, "exchange floor+graph", {"forward_us": 1.0, "forward_us_spread": 0.1})
    page = render({"x.json": results(row(case, "ecornn+graph", 2, 6), floor, benchmark="rnn")})
    times = "| 2.00 ± 5% / 6.00 ± 3% | 1.00 ± 10% / – | 0.50× / – |"
    assert f"| {case} {times}" in page
    assert f"| {case} | 1.0e-07 | – |" in page


OURS, THEIRS = "persistent, direct, keeps gates", "aten, network, keeps none"


def of_torch(*rows: Row) -> list[str]:
    """What the page says of who ran them."""
    page = render({"x.json": results(*rows)})
    if BY_TORCH not in page:
        return []
    return page.split(f"{BY_TORCH}\n\n")[1].split("\n\n")[0].splitlines()


class TestPassesThatTorchRuns:
    others = (row(PLAIN, "torch.nn", 1, 1), row(MIXED, "exchange floor+graph", 1, 1, plan="aten"))

    def test_they_are_named(self) -> None:
        mine = (
            row(PLAIN, "ecornn", 1, 1, plan=OURS, forward_plan=THEIRS),
            row(PLAIN, "ecornn+graph", 1, 1, plan=THEIRS, forward_plan=THEIRS),
            row(MIXED, "ecornn packed", 1, 1, plan=THEIRS, forward_plan=OURS),
            row(MIXED, "ecornn lengths", 1, 1, plan=OURS, forward_plan=OURS),
        )
        assert of_torch(*mine, *self.others) == [
            f"- ecornn, {PLAIN}: forward",
            f"- ecornn+graph, {PLAIN}: forward / train",
            f"- ecornn packed, {MIXED}: train",
        ]

    def test_all_of_them_are_one_line_and_none_is_none(self) -> None:
        for plan, told in ((THEIRS, ["- all: forward / train"]), (OURS, [])):
            mine = [row(c, "ecornn", 1, 1, plan=plan, forward_plan=plan) for c in (PLAIN, MIXED)]
            assert of_torch(*mine, *self.others) == told

    def test_what_an_older_file_does_not_say_is_not_taken_for_ours(self) -> None:
        mine = [row(c, "ecornn", 1, 1, plan=OURS) for c in (PLAIN, MIXED)]
        (line,) = of_torch(*mine, *self.others)
        assert line.startswith("- not recorded of 2 of 2 rows")


class TestPlots:
    found = results(row(Case("lstm", 512, 16, 256, "bf16"), "ecornn", 1, 2), benchmark="rnn")
    names = ("rnn-x-over-hidden.svg", "rnn-x-over-batch.svg")

    def test_the_page_links_to_them_without_what_draws(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        write(self.found, tmp_path / "rnn-x.json")
        page = tmp_path / "page.md"
        report = write_report(tmp_path, page)
        assert report.not_drawn is not None
        assert "ecornn[plot]" in report.not_drawn
        assert page.read_text() == render({"rnn-x.json": self.found})
        assert all(f"](plots/{name})\n" in page.read_text() for name in self.names)
        assert not (tmp_path / "plots").exists()

    def test_they_are_drawn_beside_the_page(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'ecornn[plot]'")
        write(self.found, tmp_path / "rnn-x.json")
        report = write_report(tmp_path, tmp_path / "page.md")
        drawn = tuple(tmp_path / "plots" / name for name in self.names)
        assert report == Report(1, drawn, None)
        assert all(path.read_text().startswith("<?xml") for path in drawn)

    def test_other_benchmarks_need_nothing_that_draws(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        write(plain((1, 1), (1, 1)), tmp_path / "cpu.json")
        assert write_report(tmp_path, tmp_path / "page.md") == Report(1, (), None)
        assert "plots/" not in (tmp_path / "page.md").read_text()


def test_rows_without_figures_and_rows_of_earlier_runs_are_named() -> None:
    reason = "RuntimeError: a|b <c>"
    bad = results(Row(MIXED, "ecornn packed", {"failed": reason}), date="2001")
    page = render({"x.json": merge(plain((1, 1), (1, 1)), bad)})
    assert f"- ecornn packed, {MIXED}: RuntimeError: a\\|b &lt;c>" in page
    assert "Measured in an earlier run: 2 of 3 rows" in page
    assert f"- date 2000-01-01T00:00:00+00:00\n  - {PLAIN}: ecornn, torch.nn\n" in page


def test_the_page_is_written_from_a_folder(tmp_path: Path) -> None:
    write(plain((1, 1), (1, 1)), tmp_path / "b.json")
    write(plain((1, 1), (1, 1)), tmp_path / "a.json")
    assert write_report(tmp_path, tmp_path / "page.md") == Report(2, (), None)
    page = (tmp_path / "page.md").read_text()
    assert page.index("a.json") < page.index("b.json")


def test_folders_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="results"):
        write_report(tmp_path / "missing", tmp_path / "page.md")
    with pytest.raises(InvalidInput, match="out"):
        write_report(tmp_path, tmp_path / "missing" / "page.md")


@pytest.mark.parametrize(
    ("value", "text"),
    [(12345.6, "12,346"), (123.4, "123"), (12.34, "12.3"), (1.234, "1.23"), (0.01234, "0.0123")],
)
def test_figures_have_three_digits(value: float, text: str) -> None:
    assert digits(value) == text
