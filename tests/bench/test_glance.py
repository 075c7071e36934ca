from __future__ import annotations

import re
from pathlib import Path

import pytest

from ecornn.bench.cases import Case
from ecornn.bench.glance import BEGIN, END, LINES, anchor, glance, put_into, span
from ecornn.bench.grids import RNN
from ecornn.bench.report import read_all, render, write_report
from ecornn.bench.results import Results, Row, merge, write
from ecornn.bench.training.cases import BENCHMARK, make_case
from ecornn.errors import InvalidInput
from support.measured import plain, results, row

ROOT = Path(__file__).resolve().parents[2]
MARKED = f"# A page\n\n{BEGIN}\nold figures\n{END}\n\nWhat people wrote.\n"
MIB = 2**20


def layers(*rows: Row) -> dict[str, Results]:
    return {"rnn-imaginary.json": results(*rows, benchmark=RNN.name, gpu="Imaginary")}


def timed(case: Case, how: str, ours: float, theirs: float) -> tuple[Row, Row]:
    return row(case, "ecornn" + how, ours, ours), row(case, "torch.nn" + how, theirs, 2 * theirs)


def models(*rows: Row) -> dict[str, Results]:
    return {"echo-imaginary.json": results(*rows, benchmark=BENCHMARK, gpu="Imaginary")}


class TestSpeed:
    near, far = Case("lstm", 256, 1, 256, "bf16"), Case("lstm", 1024, 4, 256, "bf16")
    line = "LSTM, 256 to 1,024 units, 1 or 4 sequences"

    def test_a_line_goes_from_the_worst_case_to_the_best(self) -> None:
        rows = (*timed(self.far, "+graph", 2, 10), *timed(self.near, "+graph", 1, 3))
        made = glance(layers(*rows))
        assert f"| {self.line} | 3.00–5.00× / 6.00–10.0× | – | – |" in made
        assert "on Imaginary" in made
        assert made.count("\n| LSTM") == 1, "no line without a figure"

    def test_called_layers_are_told_only_where_all_is_told(self) -> None:
        rows = (*timed(self.far, "+graph", 2, 10), *timed(self.far, "", 1, 7))
        called = f"| {self.line} | 7.00× / 14.0× | – | – |"
        assert called not in glance(layers(*rows))
        assert called in glance(layers(*rows), whole=True)

    def test_rows_of_two_runs_are_not_compared(self) -> None:
        ours, theirs = timed(self.far, "+graph", 2, 10)
        old = results(theirs, benchmark=RNN.name, commit="old")
        new = results(ours, benchmark=RNN.name)
        assert glance({"rnn.json": merge(old, new)}) == ""

    def test_every_gpu_case_is_told_of_in_one_line(self) -> None:
        for case in RNN.cases:
            assert sum(case.matches(line.where) for line in LINES) == 1, case

    def test_layers_of_the_cpu_are_not_told_of(self) -> None:
        assert glance({"cpu.json": plain((1, 1), (2, 2))}, whole=True) == ""


class TestModels:
    case, batch = make_case("nmt-50", "step"), make_case("nmt-50", "batch")

    def of_steps(self) -> tuple[Row, ...]:
        figures = {
            "eager": (3000, 10.0),
            "torch.compile": (2000, 8.0),
            "echo": (1000, 6.0),
            "echo memory=min": (500, 12.0),
            "eager+graph": (3000, 4.0),
            "echo+graph": (1000, 3.0),
        }
        return tuple(
            Row(self.case, name, {"peak_bytes": mib * MIB, "step_ms": ms})
            for name, (mib, ms) in figures.items()
        )

    def test_a_model_has_a_line(self) -> None:
        line = "| 3,000 | 2,000 | 1,000 | 3.00× | 500 | 6.00× | 0.60× / 0.75× | 0.75× |"
        named = "| LSTM translator with attention, 50 words, batch 128 "
        assert named + line in glance(models(*self.of_steps()))

    def test_a_contender_that_was_not_measured_leaves_a_place_empty(self) -> None:
        rows = (one for one in self.of_steps() if one.contender in ("eager", "echo"))
        assert "| 3,000 | – | 1,000 | 3.00× | – | – | 0.60× / – | – |" in glance(models(*rows))

    @pytest.mark.parametrize(
        ("eager", "echo", "told"),
        [
            (False, False, "| 100 | – | 1,300 | 13.00× | – | – | 1.50× |"),
            (False, True, "| 100 | – | ≥ 1,300 | ≥ 13.00× | – | – | 1.50× |"),
            (True, False, "| ≥ 100 | – | 1,300 | – | – | – | 1.50× |"),
        ],
    )
    def test_the_largest_batch_has_a_line(self, eager: bool, echo: bool, told: str) -> None:
        """Nobody is larger than what may be larger itself."""
        sizes = {"eager": (100, 50.0, eager), "echo": (1300, 75.0, echo)}
        rows = (
            Row(
                self.batch,
                name,
                {"largest_batch": size, "samples_per_s": speed}
                | ({"search_stopped": 1} if stopped else {}),
            )
            for name, (size, speed, stopped) in sizes.items()
        )
        made = glance(models(*self.of_steps(), *rows))
        assert f"| LSTM translator with attention, 50 words {told}" in made
        assert "**The largest batch that trains in 16 GiB**, on Imaginary" in made


class TestThePage:
    def test_what_is_made_stands_between_the_marks_and_the_rest_stays(self) -> None:
        made = put_into(MARKED, "new\n", "x")
        assert made == MARKED.replace("old figures", "\nnew\n")
        assert put_into(made, "new\n", "x") == made

    @pytest.mark.parametrize("page", ["none", BEGIN, END, f"{END}\n{BEGIN}\n"])
    def test_a_page_without_the_place_is_refused_and_nothing_is_written(
        self, page: str, tmp_path: Path
    ) -> None:
        readme, out = tmp_path / "README.md", tmp_path / "results.md"
        readme.write_text(page)
        write(plain((1, 1), (1, 1)), tmp_path / "cpu.json")
        with pytest.raises(InvalidInput, match="figures stand"):
            write_report(tmp_path, out, readme)
        assert readme.read_text() == page
        assert not out.exists()

    def test_a_page_that_is_not_there_is_refused(self, tmp_path: Path) -> None:
        write(plain((1, 1), (1, 1)), tmp_path / "cpu.json")
        with pytest.raises(InvalidInput, match="readme"):
            write_report(tmp_path, tmp_path / "results.md", tmp_path / "README.md")

    def test_the_readme_is_what_the_files_make_it(self) -> None:
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        made = glance(read_all(ROOT / "benchmarks" / "results"))
        assert put_into(text, made, "README.md") == text, "run: ecornn bench report"

    def test_targets_are_counted_with_links_to_their_sections(self) -> None:
        page = render({"cpu-imaginary.json": plain((2.5, 6.0), (2.0, 9.0))})
        title = "Recurrent layers on the CPU: cpu-imaginary.json"
        assert f"- [{title}](#{anchor(title)}): 1 passed, 1 failed, " in page
        assert f"## {title}\n" in page

    def test_links_within_the_page_lead_to_its_headings(self) -> None:
        page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
        headings = {anchor(found) for found in re.findall(r"^#+ (.+)$", page, re.M)}
        links = re.findall(r"\]\(#([^)]+)\)", page)
        assert links
        assert set(links) <= headings


@pytest.mark.parametrize(
    ("found", "told"),
    [([1.0], "1.00×"), ([1.001, 1.002], "1.00×"), ([12.34, 9.99], "9.99–12.3×")],
)
def test_a_span_has_its_ends(found: list[float], told: str) -> None:
    assert span(found) == told
