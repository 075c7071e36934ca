from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ecornn.bench import timing
from ecornn.bench.timing import CpuClock, Effort, summarize, time_in_turns, uncertainty

EFFORT = Effort(sample_s=1.0, rounds=4, fewest_rounds=2, budget_s=100.0, warm_up_s=0.0, checks=1)


class FakeClock:
    """Calls cost what they say, in seconds; every measurement is written down."""

    def __init__(self) -> None:
        self.measured: list[tuple[str, int]] = []

    def measure(self, call: Callable[[], object], repeats: int) -> float:
        name, seconds = call()  # type: ignore[misc]
        self.measured.append((name, repeats))
        return float(seconds * repeats)


def calls(**seconds: float) -> dict[str, Callable[[], object]]:
    return {name: lambda name=name, s=s: (name, s) for name, s in seconds.items()}


def test_contenders_take_turns_and_each_round_starts_with_another() -> None:
    clock = FakeClock()
    time_in_turns(calls(a=1.0, b=1.0), clock, EFFORT)
    warm_up, rounds = clock.measured[:4], clock.measured[4:]
    assert [name for name, _ in warm_up] == ["a", "a", "b", "b"]
    assert [name for name, _ in rounds] == ["a", "b", "b", "a", "a", "b", "b", "a"]


def test_a_sample_is_long_enough_and_a_time_is_that_of_one_call() -> None:
    clock = FakeClock()
    found = time_in_turns(calls(short=0.01, long=2.0), clock, EFFORT)
    assert dict(clock.measured[4:]) == {"short": 100, "long": 1}
    assert found["short"].median_s == pytest.approx(0.01)
    assert found["long"].median_s == pytest.approx(2.0)
    assert found["short"].spread_s == pytest.approx(0.0)


def test_a_sample_of_long_calls_has_several_where_they_are_asked_for() -> None:
    clock = FakeClock()
    found = time_in_turns(calls(short=0.01, long=2.0), clock, replace(EFFORT, fewest_calls=5))
    assert dict(clock.measured[4:]) == {"short": 100, "long": 5}
    assert found["long"].median_s == pytest.approx(2.0)


@pytest.mark.parametrize(("seconds", "rounds"), [(1.0, 4), (40.0, 2), (50.0, 2), (1000.0, 2)])
def test_rounds_fit_the_budget_but_are_never_too_few(seconds: float, rounds: int) -> None:
    clock = FakeClock()
    time_in_turns(calls(a=seconds), clock, EFFORT)
    assert len(clock.measured) - 2 == rounds


def test_warming_up_goes_on_until_its_time_is_over() -> None:
    clock = FakeClock()
    effort = Effort(1.0, 2, 2, 100.0, warm_up_s=5.0, checks=1)
    time_in_turns(calls(a=1.0), clock, effort)
    assert len(clock.measured) == 1 + 5 + 2


def test_nobody_to_time_is_no_error() -> None:
    assert time_in_turns({}, FakeClock(), EFFORT) == {}


def test_the_median_and_the_distance_between_the_quartiles() -> None:
    found = summarize([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (found.median_s, found.spread_s) == (3.0, 2.0)
    assert summarize([7.0]).spread_s == 0.0


def test_the_cpu_s_clock_counts_every_call() -> None:
    counted: list[int] = []
    seconds = CpuClock().measure(lambda: counted.append(1), 3)
    assert len(counted) == 3
    assert seconds > 0


def test_garbage_is_collected_before_and_not_during() -> None:
    with timing.garbage_collected_before():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_the_documentation_states_the_effort() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md").read_text()
    cpu, cuda = timing.THOROUGH["cpu"], timing.THOROUGH["cuda"]
    assert f"{cpu.sample_s * 1e3:g} ms on the CPU, {cuda.sample_s * 1e3:g} ms on CUDA" in text
    assert f"up to {cpu.rounds} on the CPU, {cuda.rounds} on CUDA" in text
    assert f"never fewer than {cpu.fewest_rounds}" in text
    assert f"on CUDA {cuda.fewest_calls} at least" in text


def test_the_clock_follows_the_device() -> None:
    assert isinstance(timing.clock_for(torch.device("cpu")), CpuClock)
    assert isinstance(timing.clock_for(torch.device("cuda")), timing.CudaClock)


def test_a_median_is_as_certain_as_its_samples_are_alike_and_many() -> None:
    assert uncertainty([2.0]) == float("inf")
    assert uncertainty([2.0] * 5) == 0
    few, many = [9.0, 10.0, 11.0], [9.0, 10.0, 11.0] * 100
    assert uncertainty(few) == pytest.approx(1.25 * (1.0 / 1.35) / 3**0.5 / 10)
    assert uncertainty(many) == pytest.approx(1.25 * (2.0 / 1.35) / 300**0.5 / 10)


def test_it_is_what_medians_of_many_draws_deviate_by() -> None:
    draws_RS = torch.randn(4000, 31, generator=torch.Generator().manual_seed(1)) + 20
    deviation = float(draws_RS.median(1).values.std() / 20)
    told = sum(uncertainty(samples) for samples in draws_RS[:400].tolist()) / 400
    assert told == pytest.approx(deviation, rel=0.1)
