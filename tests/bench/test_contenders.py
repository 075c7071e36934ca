from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ecornn.bench.calls import make_call
from ecornn.bench.cases import Case
from ecornn.bench.contenders import (
    EXCHANGE_FLOOR,
    KEEP_GATES,
    KEEP_STATES,
    Contender,
    contenders_for,
    is_ours,
    is_replayed,
)
from ecornn.bench.grids import RNN
from ecornn.bench.problem import draw_problem, draw_values

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
USUAL = {"ecornn", "torch.nn", "ecornn+graph", "torch.nn+graph"}
KEEP = {f"ecornn keep={keep}{graph}" for keep in ("states", "gates") for graph in ("", "+graph")}
FLOOR = {"exchange floor+graph"}


def more(case: Case) -> set[str]:
    return {c.name for c in contenders_for(case, CUDA)} - USUAL


def is_plain_lstm(case: Case) -> bool:
    return case.cell == "lstm" and case.states == 1 and not case.lengths


def test_what_is_kept_is_compared_in_large_lstms() -> None:
    asked = {case for case in RNN.cases if more(case) >= KEEP}
    assert asked == {Case("lstm", 1024, batch, 256, "bf16") for batch in (16, 64)}


def test_the_floor_is_measured_beside_every_plain_lstm_of_small_batches() -> None:
    for case in RNN.cases:
        small = is_plain_lstm(case) and case.batch <= 4 and case.hidden >= 256
        assert (more(case) >= FLOOR) == small, str(case)


@pytest.mark.parametrize(
    "case",
    [
        Case("gru", 1024, 4, 256, "bf16"),
        Case("gru", 1024, 16, 256, "bf16"),
        Case("lstm", 1024, 4, 256, "bf16", bidirectional=True),
        Case("lstm", 1024, 16, 256, "bf16", layers=2),
        Case("lstm", 1024, 16, 256, "fp16"),
        Case("lstm", 128, 4, 256, "bf16"),
    ],
    ids=str,
)
def test_other_cases_have_the_usual_contenders(case: Case) -> None:
    assert more(case) == set()


def test_the_cpu_knows_neither() -> None:
    for batch in (4, 16):
        names = {c.name for c in contenders_for(Case("lstm", 1024, batch, 256, "bf16"), CPU)}
        assert names == {"ecornn", "torch.nn"}


def test_the_floor_is_replayed_and_not_ours() -> None:
    assert is_replayed(EXCHANGE_FLOOR.name)
    assert not is_ours(EXCHANGE_FLOOR.name)
    assert is_ours(KEEP_STATES.name)
    assert not is_replayed(KEEP_STATES.name)


@pytest.mark.parametrize(("contender", "keep"), [(KEEP_STATES, "states"), (KEEP_GATES, "gates")])
def test_those_that_are_replayed_keep_the_same(contender: Contender, keep: str) -> None:
    every = contenders_for(Case("lstm", 1024, 16, 256, "bf16"), CUDA)
    (replayed,) = (c for c in every if c.name == f"{contender.name}+graph")
    assert replayed == replace(contender, name=replayed.name, graph=True)
    assert replayed.options["keep"] == keep


@pytest.mark.parametrize(("contender", "keep"), [(KEEP_STATES, "states"), (KEEP_GATES, "gates")])
def test_a_contender_s_options_reach_its_layer(contender: object, keep: str) -> None:
    generator = torch.Generator()
    problem = draw_problem(Case("lstm", 6, 2, 4), CPU, generator)
    call = make_call(contender, problem, draw_values(problem, generator))  # type: ignore[arg-type]
    assert (call.layer.keep, call.layer.backend) == (keep, "persistent")
