from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecornn.bench.training.largest import Found, Known, largest


class Model:
    """Memory is `fixed` and so much a sample; what is beyond the limit does not fit."""

    def __init__(self, fixed: int, sample: float, limit: int) -> None:
        self.fixed, self.sample, self.limit = fixed, sample, limit
        self.tried: list[int] = []

    def __call__(self, batch: int) -> int | None:
        self.tried.append(batch)
        return self.fixed + int(batch * self.sample) if self.fits(batch) else None

    def fits(self, batch: int) -> bool:
        return self.fixed + int(batch * self.sample) <= self.limit

    @property
    def best(self) -> int:
        return int((self.limit - self.fixed) / self.sample)


def test_two_tries_say_where_the_limit_is() -> None:
    model = Model(fixed=300, sample=7.0, limit=16_000)
    found = largest(model, 128, model.limit, tries=6, grain=8)
    assert found is not None
    assert found.batch <= model.best
    assert found.batch >= 0.97 * model.best
    assert found.tries <= 6


def test_the_first_that_fits_leads_far() -> None:
    """Of a model that holds little, the second try is nearly half of the best already."""
    model = Model(fixed=340, sample=4.6, limit=16_384)
    largest(model, 128, model.limit, tries=3, grain=8)
    assert model.tried[0] == 128
    assert 0.45 * model.best < model.tried[1] < model.best
    assert 0.95 * model.best < model.tried[2] <= model.best


def test_it_stops_when_nothing_is_left_between() -> None:
    model = Model(fixed=0, sample=10.0, limit=100)
    assert largest(model, 4, model.limit, tries=50) == Found(10, 11, len(model.tried))
    assert len(model.tried) < 10


def test_what_is_near_the_limit_may_be_enough() -> None:
    model = Model(fixed=300, sample=7.0, limit=16_000)
    found = largest(model, 128, model.limit, tries=6, grain=8, enough=0.95)
    assert found == Found(model.tried[-1], None, 3)
    assert model.fits(found.batch)
    assert found.batch >= 0.95 * model.best


def test_a_start_that_does_not_fit_is_no_end() -> None:
    model = Model(fixed=0, sample=10.0, limit=100)
    found = largest(model, 128, model.limit, tries=20)
    assert found is not None
    assert found.batch == 10


def test_none_is_said_where_not_even_one_fits() -> None:
    model = Model(fixed=200, sample=10.0, limit=100)
    assert largest(model, 128, model.limit, tries=20) is None
    assert min(model.tried) == 1


def test_a_peak_that_does_not_grow_is_no_reason_to_divide_by_nothing() -> None:
    found = largest(lambda batch: 50 if batch <= 300 else None, 4, 100, tries=20)
    assert found == Found(300, 301, found.tries if found else 0)


def test_what_does_not_grow_is_no_part_of_a_sample() -> None:
    """One try that fits says where the limit is then, however much does not grow; a far guess is
    careful all the same."""
    for fixed in (100, 9_000):
        model = Model(fixed=fixed, sample=14.0, limit=16_000)
        found = largest(model, 64, model.limit, 6, 8, 0.95, Known(fixed))
        assert found == Found(model.tried[-1], None, 3)
        assert fixed + 14 * found.batch > 0.95 * model.limit


def test_a_search_begins_at_what_others_measured() -> None:
    model = Model(fixed=2_000, sample=200.0, limit=16_000)
    known = Known(2_000, {8: 3_600})
    found = largest(model, 8, model.limit, 6, enough=0.95, known=known)
    beyond = (0.98 * 16_000 - 3_600) / 200
    assert model.tried == [int(8 + 0.75 * beyond), int(8 + beyond)]
    assert found == Found(model.tried[1], None, 2)


def test_what_is_near_is_guessed_at_once() -> None:
    model = Model(fixed=2_000, sample=200.0, limit=16_000)
    found = largest(model, 40, model.limit, 6, enough=0.95, known=Known(2_000, {40: 10_000}))
    assert model.tried == [int(40 + (0.98 * 16_000 - 10_000) / 200)]
    assert found == Found(model.tried[0], None, 1)


@pytest.mark.parametrize("said", [800, 2_100, 3_599, 9_000, 17_000])
def test_what_others_said_is_not_believed(said: int) -> None:
    """Of other code, whose batches took less, or more, or did not fit."""
    model = Model(fixed=2_000, sample=200.0, limit=16_000)
    found = largest(model, 8, model.limit, 8, known=Known(2_000, {8: said}))
    assert found is not None
    assert model.fits(found.batch)
    assert found.batch >= 0.9 * model.best
    assert len(set(model.tried)) == len(model.tried)


def test_what_others_said_is_tried_where_nothing_else_fits() -> None:
    model = Model(fixed=0, sample=100.0, limit=1_000)
    found = largest(model, 8, model.limit, 2, known=Known(peaks={8: 100}))
    assert (found, model.tried[-1]) == (Found(8, model.tried[0], 2), 8)
    nothing = Model(fixed=2_000, sample=1.0, limit=1_000)
    assert largest(nothing, 8, nothing.limit, 3, known=Known(peaks={8: 100})) is None
    assert nothing.tried[-1] == 8


def test_a_guess_that_does_not_fit_is_little_too_large() -> None:
    """The allocator cannot use all: what fits by its peak may not."""
    tried: list[int] = []

    def attempt(batch: int) -> int | None:
        tried.append(batch)
        return 100 * batch if 100 * batch <= 95_000 else None

    found = largest(attempt, 100, 100_000, 6, 4, 0.9)
    assert tried == [100, 760, 980, 920]
    assert found == Found(920, 980, 4)


def test_a_peak_of_another_plan_misleads_one_guess() -> None:
    """What recomputes less for a large batch than for a small one: of these figures, of an H200's
    language model, bisection of sums ended at 632 of 1,080."""
    tried: list[int] = []

    def attempt(batch: int) -> int | None:
        tried.append(batch)
        peak = 15 * batch if batch > 160 else 1_037
        return peak if peak <= 16_384 else None

    found = largest(attempt, 160, 16_384, 6, 8, 0.95, Known(450, {160: 1_037}))
    assert found is not None
    assert found.batch >= 0.95 * 16_384 / 15
    assert tried[0] > 3_000


def test_time_may_end_after_what_did_not_fit() -> None:
    tried: list[int] = []

    def attempt(batch: int) -> int | None:
        tried.append(batch)
        return 10 * batch if batch <= 121 else None

    found = largest(attempt, 120, 1_280, 20, go_on=lambda: len(tried) < 2)
    assert tried == [120, 125]
    assert found == Found(120, 125, 2, stopped=True)


def test_nothing_is_left_out_where_nothing_is_left() -> None:
    """Neighbours of a grain of four: time ended, and so had the search."""
    tried: list[int] = []

    def attempt(batch: int) -> int | None:
        tried.append(batch)
        return 900 if batch <= 100 else None

    found = largest(attempt, 100, 1_000, 20, 4, go_on=lambda: len(tried) < 50)
    assert found is not None
    assert (found.batch, found.refused) == (100, 104)
    assert not found.stopped
    count = len(tried)
    tried.clear()
    again = largest(attempt, 100, 1_000, 20, 4, go_on=lambda: len(tried) < count)
    assert again == found


def test_whoever_has_no_time_takes_what_fits() -> None:
    model = Model(fixed=0, sample=10.0, limit=16_000)
    found = largest(model, 3_000, model.limit, 20, go_on=lambda: False)
    assert found is not None
    assert found.stopped
    assert model.fits(found.batch)
    assert not any(model.fits(batch) for batch in model.tried[:-1]), "it goes on until one fits"


@given(
    fixed=st.integers(0, 900),
    sample=st.floats(0.5, 60),
    start=st.integers(1, 200),
    tries=st.integers(1, 12),
    grain=st.sampled_from([1, 8]),
    told=st.none() | st.tuples(st.integers(0, 900), st.integers(0, 1200)),
)
def test_what_is_found_fits_and_tries_are_bounded(
    fixed: int,
    sample: float,
    start: int,
    tries: int,
    grain: int,
    told: tuple[int, int] | None,
) -> None:
    model = Model(fixed, sample, 1000)
    known = Known() if told is None else Known(told[0], {start: told[1]})
    found = largest(model, start, model.limit, tries, grain, known=known)
    assert len(model.tried) <= tries
    assert all(batch >= 1 for batch in model.tried)
    assert len(set(model.tried)) == len(model.tried), "nothing is tried twice"
    fitting = [batch for batch in model.tried if model.fits(batch)]
    refused = [batch for batch in model.tried if not model.fits(batch)]
    if found is None:
        assert fitting == []
    else:
        assert found == Found(max(fitting), min(refused, default=None), len(model.tried))


def test_many_tries_find_the_very_largest() -> None:
    for sample in (3.3, 11.0, 90.0):
        model = Model(10, sample, 1000)
        found = largest(model, 7, model.limit, tries=60)
        assert found is not None
        assert found.batch == pytest.approx(model.best, abs=0)
