"""What was written down of compiled kernels is what the compiler says, or they are compiled."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest

from ecornn.kernels.jit import Variant
from ecornn.kernels.jit.resources import Resources
from ecornn.kernels.losses import CrossEntropyTile
from support import compilations
from support.chips import CHIPS, needs_compiler
from support.compilations import ONE_OF, Recording, compile_now, key_of, known, said_of

pytestmark = needs_compiler  # its version is part of every key

VARIANTS = [CrossEntropyTile().variant(arch) for arch in CHIPS]
TOOK = Resources(40, 0)


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Variant]]:
    """What is compiled, with a file of its own that knows nothing."""
    found: list[Variant] = []

    def compiles(variant: Variant) -> Resources:
        found.append(variant)
        return TOOK

    monkeypatch.setattr(compilations, "compile_now", compiles)
    monkeypatch.setattr(compilations, "FOLDER", tmp_path)
    monkeypatch.setattr(Recording, "on", False)
    forget()
    yield found
    forget()


def forget() -> None:
    said_of.cache_clear()
    known.cache_clear()


def write_down(takes: Resources) -> None:
    for variant in VARIANTS:
        compilations.write_down(key_of(variant), takes)


def on_the_day_of(variant: Variant, monkeypatch: pytest.MonkeyPatch, *, later: int = 0) -> None:
    class Today(date):
        @classmethod
        def today(cls) -> Today:
            return cls.fromordinal(ONE_OF * 1000 + (int(key_of(variant), 16) + later) % ONE_OF)

    monkeypatch.setattr(compilations, "date", Today)


def test_what_is_not_known_is_compiled_once(compiled: list[Variant]) -> None:
    for variant in VARIANTS * 2:
        assert said_of(variant) == TOOK
    assert compiled == VARIANTS
    assert not compilations.file().exists(), "only who is asked to writes it"


def test_what_is_known_is_compiled_on_its_day(
    compiled: list[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_down(TOOK)
    variant = VARIANTS[0]
    on_the_day_of(variant, monkeypatch, later=1)
    assert said_of(variant) == TOOK
    assert compiled == []
    forget()
    on_the_day_of(variant, monkeypatch)
    assert said_of(variant) == TOOK
    assert compiled == [variant]


def test_who_wrote_down_something_else_is_told(
    compiled: list[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_down(Resources(40, 8))
    on_the_day_of(VARIANTS[0], monkeypatch)
    with pytest.raises(AssertionError, match="make compilations"):
        said_of(VARIANTS[0])


def test_all_are_compiled_to_be_written_down(
    compiled: list[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recording, "on", True)
    assert {said_of(variant) for variant in VARIANTS} == {TOOK}
    monkeypatch.setattr(Recording, "on", False)
    assert known() == {key_of(variant): TOOK for variant in VARIANTS}


def test_sources_and_constants_are_part_of_the_key(
    compiled: list[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_down(TOOK)
    plain = VARIANTS[0]
    said_of(Variant(plain.source, plain.arch, (*plain.constants, ("MORE", 1))))
    assert len(compiled) == 1
    monkeypatch.setattr("ecornn.kernels.jit.key.sources_digest", lambda: "others")
    for variant in VARIANTS:
        said_of(variant)
    assert compiled[1:] == VARIANTS


def test_the_file_is_of_these_sources() -> None:
    """Else all are compiled in every run of the tests, which takes minutes: make compilations."""
    if not compilations.file().exists():
        pytest.skip(f"nothing is known of {compilations.compiler()}: all are compiled")
    forget()
    found = known()
    assert all(key_of(variant) in found for variant in VARIANTS)
    assert found[key_of(VARIANTS[0])] == compile_now(VARIANTS[0])
