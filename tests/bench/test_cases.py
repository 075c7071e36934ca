from __future__ import annotations

import pytest
import torch

from ecornn.bench.cases import Case, parse_filter, select
from ecornn.bench.contenders import contenders_for
from ecornn.bench.grids import CPU, GRIDS, RNN, SMOKE
from ecornn.bench.targets import TARGETS, Target
from ecornn.errors import InvalidInput

#: The form of shared measurements: these keys in every case, in this order.
KEYS = ["cell", "hidden", "batch", "steps", "dtype", "layers", "bidirectional"]


def test_the_json_form_has_the_shared_keys_and_no_defaults() -> None:
    assert list(Case("lstm", 1024, 4, 256, "bf16").to_json()) == KEYS
    special = Case("gru", 8, 2, 5, input=4, initial=True, lengths=True).to_json()
    assert list(special) == [*KEYS, "input", "initial", "lengths"]


@pytest.mark.parametrize("grid", GRIDS.values(), ids=lambda grid: grid.name)
def test_cases_survive_the_json_form(grid: object) -> None:
    for case in grid.cases:  # type: ignore[attr-defined]
        assert Case.from_json(case.to_json()) == case


def test_an_input_as_large_as_the_state_is_the_default() -> None:
    plain = Case("lstm", 8, 2, 5)
    assert Case.from_json({**plain.to_json(), "input": 8}) == plain
    assert plain.input_size == 8
    assert Case("lstm", 8, 2, 5, input=3).input_size == 3


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"cell": "transformer"}, "cell"),
        ({"dtype": "int8"}, "dtype"),
        ({"hidden": 0}, "hidden"),
        ({"batch": 1.5}, "batch"),
        ({"steps": True}, "steps"),
        ({"layers": "2"}, "layers"),
        ({"input": -1}, "input"),
        ({"bidirectional": 1}, "bidirectional"),
        ({"lengths": None}, "lengths"),
        ({"colour": "red"}, "case"),
    ],
)
def test_a_case_that_makes_no_sense_is_refused(changes: dict[str, object], argument: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        Case.from_json({**Case("lstm", 8, 2, 5).to_json(), **changes})
    assert refused.value.argument == argument


def test_a_case_needs_all_shared_keys() -> None:
    for missing in KEYS:
        value = {k: v for k, v in Case("lstm", 8, 2, 5).to_json().items() if k != missing}
        with pytest.raises(InvalidInput, match=missing):
            Case.from_json(value)
    with pytest.raises(InvalidInput, match="an object"):
        Case.from_json([])


class TestFilters:
    def test_no_filter_lets_everything_through(self) -> None:
        assert select(CPU.cases, parse_filter("")) == CPU.cases

    def test_terms_are_joined_and_values_are_alternatives(self) -> None:
        found = select(RNN.cases, parse_filter("cell=lstm hidden=256,512 dtype=bf16 batch=4"))
        assert {(c.hidden, c.dtype, c.batch) for c in found} == {
            (256, "bf16", 4),
            (512, "bf16", 4),
        }

    def test_flags_and_the_input_s_size(self) -> None:
        found = select(SMOKE.cases, parse_filter("lengths=true bidirectional=True"))
        assert [c.cell for c in found] == ["lstm"]
        assert all(c.input_size == 4 for c in select(SMOKE.cases, parse_filter("input=4")))
        assert Case("lstm", 8, 2, 5).matches({"input": (8,)})

    @pytest.mark.parametrize(
        "text",
        ["hidden", "hidden=", "size=3", "hidden=big", "hidden=3,", "lengths=maybe", "cell=cnn"],
    )
    def test_a_filter_that_makes_no_sense_is_refused(self, text: str) -> None:
        with pytest.raises(InvalidInput, match="cases"):
            parse_filter(text)

    def test_a_filter_that_nothing_passes_is_refused(self) -> None:
        with pytest.raises(InvalidInput, match="hidden=3"):
            select(SMOKE.cases, parse_filter("hidden=3"))


@pytest.mark.parametrize("grid", GRIDS.values(), ids=lambda grid: grid.name)
def test_no_case_is_twice_in_a_grid(grid: object) -> None:
    cases = grid.cases  # type: ignore[attr-defined]
    assert len(set(cases)) == len(cases)


def test_the_grids_cover_what_their_issues_name() -> None:
    assert {c.cell for c in CPU.cases if c.steps == 1} == {"lstm", "gru", "rnn_tanh"}
    assert any(c.layers > 1 and c.bidirectional for c in CPU.cases)
    assert {c.steps for c in CPU.cases if c.lengths} == {1000}
    assert {c.steps for c in RNN.cases} == {256}
    assert all(c.input is None for c in RNN.cases)


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_every_target_speaks_of_cases_that_are_measured(target: object) -> None:
    benchmark, where = target.benchmark, target.where  # type: ignore[attr-defined]
    grid = GRIDS[benchmark]
    concerned = [case for case in grid.cases if case.matches(where)]
    assert concerned
    asked = {target.contender, getattr(target, "peer", target.contender)}  # type: ignore[attr-defined]
    for case in concerned:
        assert asked <= {c.name for c in contenders_for(case, torch.device(grid.device))}


def test_one_sequence_is_the_unit_of_memory() -> None:
    assert Case("lstm", 1024, 64, 256, "bf16").sequence_bytes == 256 * 64 * 1024 * 2
    assert Case("gru", 3, 5, 7, bidirectional=True, input=4).sequence_bytes == 3 * 5 * 7 * 4


def test_every_lstm_of_the_cuda_grid_has_targets_called_and_replayed() -> None:
    beside_torch = [t for t in TARGETS if isinstance(t, Target) and t.peer.startswith("torch.nn")]
    for case in RNN.cases:
        found = [t for t in beside_torch if t.benchmark == "rnn" and case.matches(t.where)]
        plain_lstm = case.cell == "lstm" and case.states == 1 and not case.lengths
        assert len(found) == (4 if plain_lstm else 2), str(case)
