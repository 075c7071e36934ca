from __future__ import annotations

import math

import pytest

from ecornn.bench.cases import Case
from ecornn.bench.compare import by_target, judge, pairs, ratio, tally, worst
from ecornn.bench.results import Results, Row
from ecornn.bench.targets import TARGETS, LayerTarget, MemoryTarget, Target
from support.measured import MIXED, PLAIN, mixed, plain, results, row

NOT_SLOWER = Target("a", "cpu", {}, "forward_us", "ecornn", "torch.nn", at_most=1.05)
TWICE = Target("b", "cpu", {}, "train_us", "ecornn", "torch.nn", at_least=2)
SMALL = MemoryTarget("m", "cpu", {}, "kept_bytes", "ecornn", at_most=2.1)


def outcomes(found: object, *targets: LayerTarget) -> list[str]:
    return [judgement.outcome for judgement in judge(found, targets)]  # type: ignore[arg-type]


def test_a_ratio_is_theirs_over_ours() -> None:
    ours, theirs = plain((2.0, 4.0), (6.0, 2.0)).rows
    assert ratio(ours, theirs, "forward_us") == 3.0
    assert ratio(ours, theirs, "train_us") == 0.5
    assert ratio(ours, theirs, "kept_bytes") is None
    assert ratio(ours, theirs, "plan") is None


def test_nothing_is_infinitely_smaller_than_something() -> None:
    nothing, something = (Row(PLAIN, "x", {"kept_bytes": n}) for n in (0, 7))
    assert ratio(nothing, something, "kept_bytes") == math.inf
    assert ratio(nothing, nothing, "kept_bytes") == 1.0


def test_rows_of_different_runs_are_not_compared() -> None:
    ours, theirs = plain((2.0, 4.0), (6.0, 2.0)).rows
    earlier = Row(theirs.case, theirs.contender, theirs.metrics, {"date": "1999"})
    assert ratio(ours, earlier, "forward_us") is None
    (judgement,) = judge(results(ours, earlier), [NOT_SLOWER])
    assert judgement.outcome == "not measured"
    assert "one run" in judgement.reason


def test_the_replayed_are_compared_with_the_replayed() -> None:
    assert pairs(["ecornn", "torch.nn", "ecornn+graph", "torch.nn+graph"]) == (
        ("ecornn", "torch.nn"),
        ("ecornn+graph", "torch.nn+graph"),
    )
    assert pairs(["ecornn lengths", "torch.nn packed", "torch.nn padded"]) == (
        ("ecornn lengths", "torch.nn packed"),
        ("ecornn lengths", "torch.nn padded"),
    )


@pytest.mark.parametrize(
    ("ours", "outcome"), [(1.0, "passed"), (1.05, "passed"), (1.06, "failed"), (9.0, "failed")]
)
def test_at_most_bounds_ours_over_theirs(ours: float, outcome: str) -> None:
    (judgement,) = judge(plain((ours, 1.0), (1.0, 1.0)), [NOT_SLOWER])
    assert judgement.outcome == outcome
    assert judgement.found == pytest.approx(ours)


@pytest.mark.parametrize(("ours", "outcome"), [(0.4, "passed"), (0.5, "passed"), (0.6, "failed")])
def test_at_least_bounds_theirs_over_ours(ours: float, outcome: str) -> None:
    (judgement,) = judge(plain((1.0, ours), (1.0, 1.0)), [TWICE])
    assert judgement.outcome == outcome
    assert judgement.found == pytest.approx(1 / ours)


def test_who_has_no_figures_misses_the_target() -> None:
    wrong = Row(PLAIN, "ecornn", {"failed": "output: not finite"})
    theirs = row(PLAIN, "torch.nn", 1.0, 1.0)
    (judgement,) = judge(results(wrong, theirs), [NOT_SLOWER])
    assert (judgement.outcome, judgement.reason) == ("failed", "ecornn: output: not finite")
    (judgement,) = judge(results(theirs), [NOT_SLOWER])
    assert (judgement.outcome, judgement.reason) == ("failed", "ecornn: no row")


def test_nobody_is_compared_with_a_peer_that_has_no_figures() -> None:
    ours = row(PLAIN, "ecornn", 1.0, 1.0)
    peer = Row(PLAIN, "torch.nn", {"not_measured": "cannot be captured"})
    assert outcomes(results(ours, peer), NOT_SLOWER) == ["not measured"]
    assert outcomes(results(ours), NOT_SLOWER) == ["not measured"]
    assert outcomes(results(ours, Row(PLAIN, "torch.nn", {})), NOT_SLOWER) == ["not measured"]


def test_a_target_without_a_case_is_not_measured_and_other_benchmarks_are_left_out() -> None:
    elsewhere = Target("c", "rnn", {}, "forward_us", "ecornn", "torch.nn", at_least=1)
    nowhere = Target("d", "cpu", {"hidden": (3,)}, "forward_us", "a", "b", at_least=1)
    assert outcomes(plain((1, 1), (1, 1)), elsewhere) == []
    assert outcomes(plain((1, 1), (1, 1)), nowhere) == ["not measured"]


def test_the_cpu_s_targets_judge_plain_and_mixed_cases() -> None:
    plain_ones = [j for j in judge(plain((1.0, 2.2), (1.0, 2.0)), TARGETS) if j.case]
    assert [(j.target.metric, j.outcome) for j in plain_ones] == [
        ("forward_us", "passed"),
        ("train_us", "failed"),
    ]
    found = mixed(
        {
            "ecornn lengths": (1.1, 2.2),
            "ecornn packed": (1.3, 2.2),
            "torch.nn packed": (5.0, 50.0),
            "torch.nn padded": (1.0, 2.0),
        }
    )
    mixed_ones = [j for j in judge(found, TARGETS) if j.case == MIXED]
    assert [(j.target.contender, j.target.metric, j.outcome) for j in mixed_ones] == [
        ("ecornn lengths", "forward_us", "passed"),
        ("ecornn lengths", "train_us", "passed"),
        ("ecornn packed", "forward_us", "failed"),
        ("ecornn packed", "train_us", "passed"),
    ]


@pytest.mark.parametrize(
    ("units", "outcome"), [(0.0, "passed"), (2.1, "passed"), (2.2, "failed"), (9.0, "failed")]
)
def test_memory_is_bounded_in_elements_of_the_case_s_dtype(units: float, outcome: str) -> None:
    case = Case("lstm", hidden=100, batch=5, steps=10, dtype="bf16")
    kept = round(units * 100 * 5 * 10 * 2)
    (judgement,) = judge(results(row(case, "ecornn", 1.0, 1.0, kept_bytes=kept)), [SMALL])
    assert judgement.outcome == outcome
    assert judgement.found == pytest.approx(units)


def test_who_has_no_memory_counted_misses_the_target() -> None:
    (judgement,) = judge(results(row(PLAIN, "ecornn", 1.0, 1.0)), [SMALL])
    assert (judgement.outcome, judgement.reason) == ("failed", "ecornn: no kept_bytes")
    (judgement,) = judge(results(row(PLAIN, "torch.nn", 1.0, 1.0, kept_bytes=0)), [SMALL])
    assert (judgement.outcome, judgement.reason) == ("failed", "ecornn: no row")


def test_the_worst_memory_is_the_largest() -> None:
    unit = PLAIN.sequence_bytes
    other = Case("lstm", hidden=128, batch=2, steps=10)
    found = results(
        row(PLAIN, "ecornn", 1.0, 1.0, kept_bytes=unit),
        row(other, "ecornn", 1.0, 1.0, kept_bytes=6 * unit),
    )
    judgements = judge(found, [SMALL])
    assert [j.outcome for j in judgements] == ["passed", "failed"]
    assert worst(judgements) == 3.0


def keep_results(batch: int, kept: float, peak: float, states: float, gates: float) -> Results:
    """Memory in units of T·B·H elements, and the times of both ways to keep."""
    case = Case("lstm", 1024, batch, 256, "bf16")
    memory = {
        "kept_bytes": round(kept * case.sequence_bytes),
        "peak_bytes": round(peak * case.sequence_bytes),
    }
    return results(
        row(case, "ecornn keep=states", 1.0, states, **memory),
        row(case, "ecornn keep=gates", 1.0, gates),
        benchmark="rnn",
    )


@pytest.mark.parametrize(
    ("found", "missed"),
    [
        (keep_results(64, 2.05, 5.9, 11, 10), []),
        (keep_results(64, 2.2, 5.9, 11, 10), ["kept_bytes"]),
        (keep_results(64, 2.05, 6.1, 12, 10), ["peak_bytes", "train_us"]),
        (keep_results(16, 2.05, 5.9, 11, 10), []),
        (keep_results(16, 2.05, 9.0, 11, 10), ["peak_bytes"]),
        (keep_results(16, 2.2, 5.9, 12, 10), ["kept_bytes", "train_us"]),
    ],
)
def test_keeping_states_alone_has_targets(found: Results, missed: list[str]) -> None:
    judged = [j for j in judge(found, TARGETS) if j.target.contender == "ecornn keep=states"]
    assert [j.target.metric for j in judged if j.outcome == "failed"] == missed


@pytest.mark.parametrize(("time", "outcome"), [(1.0, "passed"), (2.0, "passed"), (2.1, "failed")])
def test_small_batches_are_bounded_by_the_exchange_floor(time: float, outcome: str) -> None:
    case = Case("lstm", 512, 4, 256, "fp16")
    floor = Row(case, "exchange floor+graph", {"forward_us": 1.0})
    target = next(t for t in TARGETS if isinstance(t, Target) and t.peer == floor.contender)
    ours = row(case, "ecornn+graph", time, 9.0)
    assert outcomes(results(ours, floor, benchmark="rnn"), target) == [outcome]
    refused = Row(case, floor.contender, {"not_measured": "ValueError: no kernel"})
    assert outcomes(results(ours, refused, benchmark="rnn"), target) == ["not measured"]


def test_judgements_are_summed_up_by_target() -> None:
    other = MIXED
    found = results(
        row(PLAIN, "ecornn", 1.0, 1.0),
        row(PLAIN, "torch.nn", 1.0, 3.0),
        row(other, "ecornn", 2.0, 1.0),
        row(other, "torch.nn", 1.0, 2.5),
    )
    judgements = judge(found, [NOT_SLOWER, TWICE])
    assert tally(judgements) == "3 passed, 1 failed, 0 not measured"
    (first, of_first), (second, of_second) = by_target(judgements)
    assert (first.name, worst(of_first)) == ("a", 2.0)
    assert (second.name, worst(of_second)) == ("b", 2.5)
    assert worst([]) is None


def test_targets_say_what_they_ask() -> None:
    assert str(NOT_SLOWER) == "ecornn takes ≤ 1.05× the forward_us of torch.nn"
    assert str(TWICE) == "ecornn is ≥ 2× as fast as torch.nn in train_us"
    assert str(SMALL) == "ecornn has kept_bytes ≤ 2.1 T·B·H elements"
    beside_peers = [t for t in TARGETS if isinstance(t, Target)]
    assert all((t.at_least is None) != (t.at_most is None) for t in beside_peers)
