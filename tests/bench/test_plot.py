from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ecornn.bench import draw
from ecornn.bench.cases import Case
from ecornn.bench.plot import CONTENDERS, Plot, plots_of
from ecornn.bench.results import Results, Row
from support.measured import plain, results, row

FLOOR = "exchange floor+graph"
CALLED_AND_REPLAYED = ("ecornn", "torch.nn", "ecornn+graph", "torch.nn+graph")


def lstm(hidden: int, batch: int) -> Case:
    return Case("lstm", hidden, batch, 256, "bf16")


def measured(*cases: Case) -> Results:
    """Times that name their case: H + B forward, ten times that for both passes."""
    rows = []
    for case in cases:
        time = case.hidden + case.batch
        rows += [row(case, name, time, 10 * time) for name in CALLED_AND_REPLAYED]
        if case.batch <= 4:
            rows.append(Row(case, FLOOR, {"forward_us": time / 2, "forward_us_spread": 0.1}))
    return results(*rows, benchmark="rnn", gpu="Imaginary GPU")


ALL = measured(*(lstm(hidden, batch) for hidden in (1024, 256, 512) for batch in (1, 4, 16, 64)))


def titles(plot: Plot) -> list[list[str]]:
    return [[panel.title for panel in panels] for panels in plot.rows]


def test_one_plot_is_over_the_hidden_size_and_one_over_the_batch() -> None:
    over_hidden, over_batch = plots_of(ALL)
    assert (over_hidden.name, over_hidden.axis) == ("over-hidden", "H")
    assert titles(over_hidden) == [
        ["B = 4, forward", "B = 16, forward", "B = 64, forward"],
        [f"B = {batch}, forward and backward" for batch in (4, 16, 64)],
    ]
    assert (over_batch.name, over_batch.axis) == ("over-batch", "B")
    assert titles(over_batch) == [
        ["H = 512, forward", "H = 1024, forward"],
        ["H = 512, forward and backward", "H = 1024, forward and backward"],
    ]
    assert "Imaginary GPU" in over_hidden.title
    assert "bf16" in over_hidden.title


def test_lines_hold_the_rows_times_in_the_order_of_the_sizes() -> None:
    over_hidden, over_batch = plots_of(ALL)
    forward, train = (panels[0] for panels in over_hidden.rows)
    assert [line.contender for line in forward.lines] == list(CONTENDERS)
    assert forward.lines[0].points == ((256, 260), (512, 516), (1024, 1028))
    assert train.lines[0].points == ((256, 2600), (512, 5160), (1024, 10280))
    assert over_batch.rows[0][0].lines[0].points == ((1, 513), (4, 516), (16, 528), (64, 576))


def test_the_floor_is_drawn_where_it_was_measured() -> None:
    over_hidden, over_batch = plots_of(ALL)
    drawn = [[FLOOR in {line.contender for line in p.lines} for p in r] for r in over_hidden.rows]
    assert drawn == [[True, False, False], [False, False, False]]
    assert over_batch.rows[0][0].lines[-1].points == ((1, 256.5), (4, 258))


def test_other_layers_and_rows_without_figures_are_left_out() -> None:
    others = (
        Case("gru", 512, 4, 256, "bf16"),
        Case("lstm", 512, 4, 256, "fp16"),
        Case("lstm", 512, 4, 256, "bf16", layers=2),
        Case("lstm", 512, 4, 256, "bf16", lengths=True),
        Case("lstm", 512, 4, 256, "bf16", initial=True),
        Case("lstm", 512, 4, 100, "bf16"),
    )
    assert plots_of(measured(*others)) == ()
    one = results(
        row(lstm(512, 16), "ecornn", 1, 2),
        Row(lstm(512, 16), "torch.nn", {"failed": "output: not finite"}),
        benchmark="rnn",
    )
    (over_hidden, _) = plots_of(one)
    assert titles(over_hidden) == [["B = 16, forward"], ["B = 16, forward and backward"]]
    assert [line.contender for line in over_hidden.rows[0][0].lines] == ["ecornn"]


def test_other_benchmarks_and_empty_files_have_no_plots() -> None:
    assert plots_of(plain((1, 1), (1, 1))) == ()
    assert plots_of(measured()) == ()


def test_every_contender_has_a_style_of_its_own() -> None:
    assert set(draw.STYLES) == set(CONTENDERS)
    assert len(set(draw.STYLES.values())) == len(CONTENDERS)


def test_it_is_said_what_drawing_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert draw.missing() == "matplotlib is not installed; pip install 'ecornn[plot]'"


class TestDrawing:
    @pytest.fixture(autouse=True)
    def _needs_matplotlib(self) -> None:
        pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'ecornn[plot]'")

    def test_a_plot_shows_its_panels_lines_and_sizes(self, tmp_path: Path) -> None:
        plot, _ = plots_of(ALL)
        draw.draw(plot, tmp_path / "a.svg")
        root = ElementTree.parse(tmp_path / "a.svg").getroot()
        texts = {"".join(node.itertext()) for node in root.iter() if node.tag.endswith("}text")}
        panels = {panel.title for panels in plot.rows for panel in panels}
        assert texts >= {plot.title, "H", "256", "512", "1024", *panels, *CONTENDERS}

    def test_the_same_plot_is_the_same_file(self, tmp_path: Path) -> None:
        import matplotlib

        _, plot = plots_of(ALL)
        draw.draw(plot, tmp_path / "a.svg")
        with matplotlib.rc_context({"lines.linewidth": 7, "svg.hashsalt": "else"}):
            draw.draw(plot, tmp_path / "b.svg")
            assert matplotlib.rcParams["lines.linewidth"] == 7, "the user's settings are kept"
        text = (tmp_path / "a.svg").read_text()
        assert text == (tmp_path / "b.svg").read_text()
        assert "dc:date" not in text
        assert matplotlib.__version__ not in text

    def test_a_plot_of_one_figure_is_drawn(self, tmp_path: Path) -> None:
        one = results(row(lstm(512, 16), "ecornn", 1, 2), benchmark="rnn")
        for plot in plots_of(one):
            draw.draw(plot, tmp_path / f"{plot.name}.svg")
            assert "ecornn" in (tmp_path / f"{plot.name}.svg").read_text()
