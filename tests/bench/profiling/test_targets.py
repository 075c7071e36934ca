"""How made-up figures are judged and shown."""

from __future__ import annotations

from typing import Any

import pytest

from ecornn.bench.compare import judge
from ecornn.bench.profiling.cases import profile_cases
from ecornn.bench.profiling.targets import OURS, PROFILER_TARGETS
from ecornn.bench.report import render
from ecornn.bench.results import Row
from support.measured import results

NMT, SPEECH, *_ = profile_cases()
GOOD: dict[str, float | str] = {
    "peak_bytes": 1000,
    "rows_bytes": 1010,
    "cpu_bytes_off": 0,
    "meta_bytes_off": 0,
    "unseen_batch": 300,
    "unseen_predicted_bytes": 1030,
    "unseen_peak_bytes": 1000,
    "predicted_largest_batch": 98,
    "predicted_running_batch": 102,
    "largest_batch": 100,
    "largest_within": 100,
    "step_ms": 10.0,
    "step_ms_spread": 0.1,
    "profile_ms": 20.0,
    "read_ms": 34.0,
    "after_ms": 10.15,
    "after_ms_spread": 0.1,
    "attention_place": 1,
    "recurrent_place": 2,
    "lines_named": 3,
    "first_rows": "feature maps of decoder.attention 60%",
    "first_lines": "attention_nmt.py:42 in forward 60%",
}


def outcomes(metrics: dict[str, Any], case: Any = NMT) -> dict[str, str]:
    found = results(Row(case, OURS, metrics), benchmark="profiler")
    return {str(j.target): j.outcome for j in judge(found, PROFILER_TARGETS) if j.case}


def test_all_is_met() -> None:
    assert set(outcomes(GOOD).values()) == {"passed"}
    assert len(outcomes(GOOD)) == len(PROFILER_TARGETS)


@pytest.mark.parametrize(
    ("changed", "target"),
    [
        ({"rows_bytes": 1011}, "rows_bytes off by ≤ 1 % of peak_bytes"),
        ({"rows_bytes": 989}, "rows_bytes off by ≤ 1 % of peak_bytes"),
        ({"meta_bytes_off": 4}, "meta_bytes_off ≤ 0"),
        (
            {"unseen_peak_bytes": 999},
            "unseen_predicted_bytes off by ≤ 3 % of unseen_peak_bytes",
        ),
        (
            {"predicted_running_batch": 97},
            "predicted_running_batch off by ≤ 2 % of largest_batch",
        ),
        (
            {"predicted_largest_batch": 103},
            "predicted_largest_batch off by ≤ 2 % of largest_within",
        ),
        ({"profile_ms": 20.1}, "profile_ms ÷ step_ms ≤ 2"),
        ({"after_ms": 10.26}, "after_ms above step_ms beyond both spreads by ≤ 0.5 %"),
        ({"attention_place": 2}, "attention_place ≤ 1"),
        ({"lines_named": 0}, "lines_named ≥ 1"),
    ],
)
def test_each_can_be_missed(changed: dict[str, float], target: str) -> None:
    found = outcomes({**GOOD, **changed})
    assert {name for name, outcome in found.items() if outcome == "failed"} == {target}


def test_what_was_not_found_is_missed_but_not_what_torch_lacks() -> None:
    lost = {name: value for name, value in GOOD.items() if name != "largest_batch"}
    found = outcomes({**lost, "failed": "killed"})
    assert found["predicted_running_batch off by ≤ 2 % of largest_batch"] == "failed"
    assert found["rows_bytes off by ≤ 1 % of peak_bytes"] == "passed"
    without = {name: value for name, value in GOOD.items() if name != "meta_bytes_off"}
    assert outcomes(without, SPEECH)["meta_bytes_off ≤ 0"] == "failed"
    told = {**without, "meta_not_measured": "no ctc_loss"}
    assert outcomes(told, SPEECH)["meta_bytes_off ≤ 0"] == "not measured"


def test_the_page_has_the_figures() -> None:
    lost = {"peak_bytes": 2000, "rows_bytes": 2000, "failed": "killed, after 9 s"}
    rows = (Row(NMT, OURS, GOOD), Row(SPEECH, OURS, lost))
    page = render({"profiler-imaginary.json": results(*rows, benchmark="profiler")})
    assert "## The memory profiler: profiler-imaginary.json\n" in page
    assert "| nmt-50 | 128 | 0.0 | 0.0 | +1.00% |" in page
    assert "| 16 | 98 | 100 | -2.0% | 102 | 100 | +2.0% |" in page
    assert "| nmt-50 | 10.0 ± 1% | – | 20.0 | 2.00× | 34.0 | 3.40× | 10.2 ± 1% | 1.015× |" in page
    assert "feature maps of decoder.attention 60%" in page
    assert "speech, B=32, in 16 GiB: killed, after 9 s" in page
    assert page.count("| speech |") == 1, "only where it has figures"


def test_a_file_from_before_reading_was_timed_is_still_shown_and_judged() -> None:
    """What was not measured has no figure."""
    before = {name: value for name, value in GOOD.items() if name != "read_ms"}
    page = render({"profiler-old.json": results(Row(NMT, OURS, before), benchmark="profiler")})
    assert "| nmt-50 | 10.0 ± 1% | – | 20.0 | 2.00× | – | – | 10.2 ± 1% | 1.015× |" in page
    assert outcomes(before) == outcomes(GOOD)
