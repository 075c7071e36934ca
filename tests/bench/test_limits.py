"""What misses its target is not passed over: it has its reason, and no reason is left over."""

from __future__ import annotations

from pathlib import Path

import pytest

from ecornn.bench.compare import Judgement, judge
from ecornn.bench.limits import LIMITS, Limit, why_missed
from ecornn.bench.profiling.targets import PROFILER_TARGETS
from ecornn.bench.report import read_all, render
from ecornn.bench.targets import TARGETS
from ecornn.bench.training.targets import ECHO_TARGETS
from support.measured import plain

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
EVERY = (*TARGETS, *ECHO_TARGETS, *PROFILER_TARGETS)


def missed() -> list[Judgement]:
    """Those that were measured: of the others the page says that there is no row."""
    found = [one for results in read_all(RESULTS).values() for one in judge(results, EVERY)]
    return [one for one in found if one.outcome == "failed" and not one.reason.endswith(": no row")]


def test_every_figure_that_misses_its_target_has_its_reason() -> None:
    unknown = [(str(one.case), str(one.target)) for one in missed() if why_missed(one) is None]
    assert unknown == []


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.why[:40])
def test_no_reason_outlives_its_cases(limit: Limit) -> None:
    told = [one for one in missed() if why_missed(one) == limit.why]
    assert told, "nothing is missed for this reason any more: take it out"


def test_the_page_tells_it_or_says_that_it_is_not_known() -> None:
    page = render({"cpu-imaginary.json": plain((2.5, 6.0), (2.0, 9.0))})
    assert "Missed, and why" in page
    assert (
        "| ecornn takes ≤ 1.05× the forward_us of torch.nn | 1.25× |\n\nWhy: not known.\n" in page
    )
    assert "Missed" not in render({"cpu-imaginary.json": plain((1.0, 1.0), (1.0, 1.0))})
