from __future__ import annotations

from typing import Any

import pytest

from ecornn.bench.compare import Judgement, judge
from ecornn.bench.report import render
from ecornn.bench.results import Results, Row, merge
from ecornn.bench.training.cases import NAMED, ModelCase, make_case
from ecornn.bench.training.targets import ECHO_TARGETS, SAME_TIME
from support.measured import results

NMT, RESNET = make_case("nmt-50", "step"), make_case("resnet50", "step")


def made_up(*rows: Row, **environment: Any) -> Results:
    return results(*rows, benchmark="echo", **environment)


def row(case: ModelCase, contender: str, ms: float, peak: float, **more: float | str) -> Row:
    return Row(case, contender, {"step_ms": ms, "peak_bytes": peak, **more})


def outcomes(found: Results, target: str, case: ModelCase | None) -> list[Judgement]:
    judged = [j for j in judge(found, ECHO_TARGETS) if str(j.target) == target and j.case == case]
    assert judged, "no such target"
    return judged


def outcome(found: Results, target: str, case: ModelCase | None = None) -> tuple[str, Any]:
    (judged,) = outcomes(found, target, case)
    return judged.outcome, judged.found


MEMORY = "peak_bytes of eager ÷ echo ≥ 3.13"
TIME = "step_ms of echo ÷ eager ≤ 1"


@pytest.mark.parametrize(
    ("peak", "ms", "memory", "time"),
    [(100, 10.0, "passed", "passed"), (101, 10.1, "failed", "failed")],
)
def test_nmt_is_smaller_and_no_slower(peak: float, ms: float, memory: str, time: str) -> None:
    found = made_up(row(NMT, "eager", 10.0, 313), row(NMT, "echo", ms, peak))
    assert outcome(found, MEMORY, NMT) == (memory, pytest.approx(313 / peak))
    assert outcome(found, TIME, NMT) == (time, pytest.approx(ms / 10))


def test_other_models_need_not_be_so_much_smaller() -> None:
    found = made_up(row(RESNET, "eager", 10.0, 100), row(RESNET, "echo", 10.0, 90))
    assert outcome(found, MEMORY)[0] == "not measured"


def test_ours_without_figures_misses_and_a_peer_without_does_not() -> None:
    failed = Row(NMT, "echo", {"failed": "RuntimeError: no"})
    ours = outcomes(made_up(row(NMT, "eager", 10, 313), failed), MEMORY, NMT)[0]
    assert (ours.outcome, ours.reason) == ("failed", "echo: RuntimeError: no")
    theirs = outcomes(made_up(row(NMT, "echo", 10, 100)), MEMORY, NMT)[0]
    assert (theirs.outcome, theirs.reason) == ("not measured", "eager: no row")


def test_rows_of_two_runs_are_not_compared() -> None:
    first = made_up(row(NMT, "eager", 10, 400), date="2000")
    found = merge(first, made_up(row(NMT, "echo", 10, 100), date="2001"))
    assert outcome(found, MEMORY, NMT)[0] == "not measured"


class TestAverage:
    target = "mean peak_bytes of eager ÷ echo ≥ 1.89"

    def found(self, names: list[str], ratio: float) -> Results:
        cases = [make_case(name, "step") for name in names]
        return made_up(
            *(row(case, "eager", 10, 100 * ratio) for case in cases),
            *(row(case, "echo", 10, 100) for case in cases),
        )

    @pytest.mark.parametrize(("ratio", "says"), [(1.9, "passed"), (1.88, "failed")])
    def test_it_is_over_all_models(self, ratio: float, says: str) -> None:
        found = self.found(list(NAMED), ratio)
        assert outcome(found, self.target) == (says, pytest.approx(ratio))

    def test_some_models_are_not_all(self) -> None:
        assert outcome(self.found(["nmt-50", "nmt-100"], 4.0), self.target)[0] == "not measured"

    def test_large_and_small_savings_make_a_mean(self) -> None:
        rows = [r for n in NAMED for r in self.found([n], 3.0 if "nmt" in n else 1.5).rows]
        mean = (2 * 3.0 + 5 * 1.5) / 7
        assert outcome(made_up(*rows), self.target) == ("passed", pytest.approx(mean))


class TestOptionsOfTorch:
    target = "peak_bytes of ours, as quick as budget=0.5, ÷ budget=0.5 ≤ 1"

    def judged(self, *ours: tuple[float, float]) -> tuple[str, Any]:
        names = ("echo", "echo memory=min", "echo memory=0.5")
        rows = [row(NMT, name, *figures) for name, figures in zip(names, ours, strict=False)]
        return outcome(made_up(row(NMT, "budget=0.5", 10, 100), *rows), self.target, NMT)

    def test_one_of_ours_is_as_quick_and_as_small(self) -> None:
        assert self.judged((9, 150), (10, 80)) == ("passed", 0.8)
        assert self.judged((9, 100), (20, 10)) == ("passed", 1.0)
        assert self.judged((9, 150), (20, 10), (10, 70)) == ("passed", 0.7)

    def test_a_small_one_that_is_slow_does_not_count(self) -> None:
        assert self.judged((9, 150), (11, 10)) == ("failed", 1.5)

    def test_times_that_cannot_be_told_apart_are_the_same(self) -> None:
        assert self.judged((10 * (1 + SAME_TIME), 90)) == ("passed", 0.9)

    def test_none_of_ours_is_quick_enough(self) -> None:
        assert self.judged((11, 10), (12, 5)) == ("failed", None)

    def merged(self, *then: Row) -> Judgement:
        """Rows of an earlier run beside the option's and `echo`'s of this one."""
        now = (row(NMT, "budget=0.5", 10, 100), row(NMT, "echo", 9, 150))
        found = merge(made_up(*then, date="2000"), made_up(*now, date="2001"))
        return outcomes(found, self.target, NMT)[0]

    def test_a_row_of_ours_of_another_run_is_left_out(self) -> None:
        judged = self.merged(row(NMT, "echo memory=min", 9, 10))
        assert (judged.outcome, judged.found) == ("failed", 1.5)
        assert self.merged(Row(NMT, "echo memory=min", {"failed": "then"})).found == 1.5

    def test_ours_of_other_runs_alone_are_not_compared(self) -> None:
        then = made_up(row(NMT, "echo", 9, 10), row(NMT, "echo memory=min", 9, 5), date="2000")
        found = merge(then, made_up(row(NMT, "budget=0.5", 10, 100), date="2001"))
        judged = outcomes(found, self.target, NMT)[0]
        assert judged.outcome == "not measured"
        assert judged.reason == "budget=0.5: not measured in one run with any of ours"

    def test_ours_without_any_row_has_missed(self) -> None:
        assert self.judged() == ("failed", None)

    def test_an_option_that_was_not_measured_beats_nobody(self) -> None:
        found = made_up(Row(NMT, "budget=0.5", {"not_measured": "killed"}), row(NMT, "echo", 1, 1))
        assert outcome(found, self.target, NMT)[0] == "not measured"


@pytest.mark.parametrize(("predicted", "says"), [(96, "passed"), (104, "passed"), (94, "failed")])
def test_the_peak_is_foretold(predicted: int, says: str) -> None:
    found = made_up(row(RESNET, "echo", 10, 100, predicted_peak_bytes=predicted))
    target = "predicted_peak_bytes of echo off by ≤ 0.05 of peak_bytes"
    assert outcome(found, target, RESNET)[0] == says


def test_a_peak_that_was_not_foretold_misses() -> None:
    found = made_up(row(RESNET, "echo", 10, 100))
    target = "predicted_peak_bytes of echo off by ≤ 0.05 of peak_bytes"
    assert outcome(found, target, RESNET)[0] == "failed"


def test_a_graph_must_have_been_captured() -> None:
    target = "step_ms of echo+graph is there"
    assert outcome(made_up(row(NMT, "echo+graph", 1, 1)), target, NMT)[0] == "passed"
    refused = Row(NMT, "echo+graph", {"not_measured": "not captured"})
    assert outcome(made_up(refused), target, NMT)[0] == "failed"


def test_set_up_is_bounded_at_fifty_words_alone() -> None:
    target = "setup_s of echo ≤ 20"
    found = made_up(row(NMT, "echo", 1, 1, setup_s=21))
    assert outcome(found, target, NMT) == ("failed", 21)
    longer = made_up(row(make_case("nmt-100", "step"), "echo", 1, 1, setup_s=21))
    assert outcome(longer, target)[0] == "not measured"


def test_the_largest_batch_grows_and_is_faster() -> None:
    case = make_case("nmt-50", "batch")
    rows = [
        Row(case, "eager", {"largest_batch": 100, "samples_per_s": 1000.0}),
        Row(case, "echo", {"largest_batch": 300, "samples_per_s": 1300.0}),
    ]
    found = made_up(*rows)
    assert outcome(found, "largest_batch of echo ÷ eager ≥ 3", case) == ("passed", 3)
    assert outcome(found, "samples_per_s of echo ÷ eager ≥ 1.35", case) == ("failed", 1.3)


@pytest.mark.parametrize(
    ("metrics", "says"),
    [
        ({"bitwise": 1}, "passed"),
        ({"bitwise": 0, "eager_repeats": 1}, "failed"),
        ({"bitwise": 0, "eager_repeats": 0}, "not measured"),
    ],
)
def test_bits_are_owed_where_eager_repeats_its_own(metrics: dict[str, float], says: str) -> None:
    case = make_case("speech", "check")
    found = made_up(Row(case, "echo codegen=eager", {"error": 0.0, **metrics}))
    assert outcome(found, "bitwise of echo codegen=eager ≥ 1", case)[0] == says


def test_tiny_models_meet_no_targets() -> None:
    tiny = make_case("nmt-50", "step", tiny=True)
    found = made_up(row(tiny, "eager", 1, 100), row(tiny, "echo", 1, 1))
    assert {j.outcome for j in judge(found, ECHO_TARGETS)} == {"not measured"}


class TestPage:
    def test_a_case_is_a_table_without_empty_columns(self) -> None:
        eager = row(NMT, "eager", 20.0, 400 * 2**20, step_ms_spread=1.0, samples_per_s=6400.0)
        ours = row(NMT, "echo", 10.0, 100 * 2**20, predicted_peak_bytes=101 * 2**20)
        page = render({"echo-x.json": made_up(eager, ours)})
        assert f"{NMT}: a training step" in page
        heads = "| contender | ms | time ÷ eager | peak MiB | eager ÷ peak | foretold MiB |"
        assert f"{heads} samples/s |" in page
        assert "| eager | 20.0 ± 5% | 1.00× | 400 | 1.00× | – | 6,400 |" in page
        assert "| echo | 10.0 | 0.50× | 100 | 4.00× | 101 (+1.0%) | – |" in page
        assert "set-up s" not in page
        assert f"| NMT: memory | {MEMORY} | 1 passed, 0 failed, 0 not measured | 4.00× |" in page

    def test_the_replayed_are_set_beside_the_replayed(self) -> None:
        rows = [row(NMT, n, ms, 1) for n, ms in (("eager", 20), ("eager+graph", 5))]
        page = render({"x.json": made_up(*rows, row(NMT, "echo+graph", 10, 1))})
        assert "| echo+graph | 10.0 | 2.00× |" in page

    def test_batches_and_checks_have_their_own_columns(self) -> None:
        batch, check = make_case("nmt-50", "batch"), make_case("gpt2", "check")
        page = render(
            {
                "x.json": made_up(
                    Row(batch, "eager", {"largest_batch": 640, "samples_per_s": 7000.0}),
                    Row(batch, "echo", {"largest_batch": 1920, "samples_per_s": 10500.0}),
                    Row(check, "echo", {"error": 1e-6, "state_error": 0.0, "bitwise": 0}),
                    Row(check, "budget=0.5", {"error": 1.2, "wrong": "loss: relative error 1"}),
                    Row(check, "aggressive", {"not_measured": "killed"}),
                )
            }
        )
        assert "| echo | 1,920 | 3.00× | 10,500 | 1.50× |" in page
        assert "| echo | 1.0e-06 | 0.0e+00 | 0 |" in page
        assert f"- budget=0.5, {check}: loss: relative error 1" in page
        assert f"- aggressive, {check}: killed" in page
