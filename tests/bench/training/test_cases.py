from __future__ import annotations

from typing import Any

import pytest

from ecornn.bench.results import read_case
from ecornn.bench.training.cases import LIMIT_GIB, NAMED, PARTS, ModelCase, make_case, make_cases
from ecornn.bench.training.contenders import ALL, CONTENDERS, UNROLLED, contenders_for
from ecornn.errors import InvalidInput

EVERY = make_cases((), PARTS) + make_cases((), PARTS, tiny=True)


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_what_is_written_is_read_again(case: ModelCase) -> None:
    assert read_case(case.to_json()) == case


def test_names_and_sizes_are_told() -> None:
    case = make_case("nmt-100", "step")
    assert (case.model, case.length, case.batch, case.name) == ("nmt", 100, 128, "nmt-100")
    assert str(case) == "nmt-100, B=128"
    assert str(make_case("resnet50", "batch")) == f"resnet50, in {LIMIT_GIB:g} GiB"
    assert str(make_case("gpt2", "check", tiny=True)) == "gpt2, B=2, checked, tiny"
    assert len({str(case) for case in EVERY}) == len(EVERY)
    assert [case.name for case in make_cases((), ["step"])] == list(NAMED)
    assert [str(case) for case in make_cases((), ["plan"])] == ["nmt-100, B=128, planned"]


def test_cases_are_chosen_by_their_fields() -> None:
    case = make_case("nmt-50", "step")
    assert case.matches({"model": ("nmt",), "length": (50, 100)})
    assert not case.matches({"part": ("batch",)})


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no such model": ({"model": "vgg", "batch": 1}, "model"),
    "no such part": ({"model": "nmt", "part": "speed", "batch": 1}, "part"),
    "no such size": ({"model": "nmt", "batch": 1, "size": "huge"}, "size"),
    "a batch of none": ({"model": "nmt", "batch": 0}, "batch"),
    "a length in words": ({"model": "nmt", "batch": 1, "length": "ten"}, "length"),
    "a step without a batch": ({"model": "nmt"}, "batch"),
    "a search with a batch": ({"model": "nmt", "part": "batch", "batch": 3}, "batch"),
    "a search without a limit": ({"model": "nmt", "part": "batch"}, "memory_gib"),
    "a limit of nothing": ({"model": "nmt", "part": "batch", "memory_gib": 0}, "memory_gib"),
    "a key too many": ({"model": "nmt", "batch": 1, "hidden": 3}, "hidden"),
}


@pytest.mark.parametrize(("value", "says"), BAD.values(), ids=BAD)
def test_bad_cases_are_refused(value: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        read_case(value)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InvalidInput, match="nmt-50"):
        make_case("nmt", "step")
    with pytest.raises(InvalidInput, match="batch, check"):
        make_cases((), ["speed"])


class TestContenders:
    step = make_case("nmt-50", "step")

    def test_all_that_the_benchmark_is_about_are_there(self) -> None:
        names = [c.name for c in contenders_for(self.step, "cuda")]
        assert set(names) == {
            *("eager", "eager+graph", "checkpoint", "checkpoint+graph"),
            *("torch.compile", "budget=0.5", "budget=0.1", "aggressive"),
            *("echo", "echo memory=min", "echo+graph"),
        }
        assert names[:2] == ["eager", "echo"], "the most telling first"

    def test_the_cpu_has_no_graphs(self) -> None:
        assert not any(c.graph for c in contenders_for(self.step, "cpu"))

    def test_the_unrolled_model_is_measured_only_where_asked_for(self) -> None:
        assert contenders_for(self.step, "cuda", unrolled=True)[-1] is UNROLLED
        for case in (make_case("nmt-100", "step"), make_case("nmt-50", "batch")):
            assert UNROLLED not in contenders_for(case, "cuda", unrolled=True)

    def test_some_can_be_named(self) -> None:
        assert [c.name for c in contenders_for(self.step, "cuda", ["echo"])] == ["echo"]
        assert contenders_for(self.step, "cpu", ["eager+graph"]) == ()
        (within,) = contenders_for(self.step, "cuda", ["echo memory=0.5"])
        assert (within.kind, within.memory) == ("echo", 0.5)
        with pytest.raises(InvalidInput, match="contender"):
            contenders_for(self.step, "cuda", ["eco"])

    def test_names_are_unique(self) -> None:
        assert all(len({c.name for c in part}) == len(part) for part in CONTENDERS.values())
        assert all(ALL[c.name] == c for part in CONTENDERS.values() for c in part)
