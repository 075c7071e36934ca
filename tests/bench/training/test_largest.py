from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecornn.bench.training.largest import Found, largest


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
    """Of a model that holds little, the second try is more than half of the best already."""
    model = Model(fixed=340, sample=4.6, limit=16_384)
    largest(model, 128, model.limit, tries=3, grain=8)
    assert model.tried[0] == 128
    assert 0.5 * model.best < model.tried[1] < model.best
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


@given(
    fixed=st.integers(0, 900),
    sample=st.floats(0.5, 60),
    start=st.integers(1, 200),
    tries=st.integers(1, 12),
    grain=st.sampled_from([1, 8]),
)
def test_what_is_found_fits_and_tries_are_bounded(
    fixed: int, sample: float, start: int, tries: int, grain: int
) -> None:
    model = Model(fixed, sample, 1000)
    found = largest(model, start, model.limit, tries, grain)
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
