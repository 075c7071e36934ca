"""Float32 as float16 times powers of two (`scaled.cuh`), run on a CPU: as near as TF32 whatever the
size of weights and initial states, and what is no number stays in its own sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ecornn.backends import persistent_calls
from ecornn.backends.protocol import LayerCall
from ecornn.backends.registry import by_name
from ecornn.kernels.persistent.tile import Geometry
from support.kernel_cases import FP32, STEPS, TF32_ERROR, Case, converted, multiplied_as
from support.machine import Machine
from support.on_cpu import OnCpu, unavailable
from support.tolerances import assert_matches

pytestmark = [
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
    # a thousand threads, which coverage would trace
    pytest.mark.no_cover,
]

BOUND = 2 * TF32_ERROR * STEPS**0.5
#: Every way that states from memory take: gathered by each warp, and by those of a cluster that
#: share the inner dimension; in shared memory; there, and multiplied in the loop itself.
CASES = (
    Case("lstm", FP32, 24, 5, numbers="scaled"),
    Case("rnn_tanh", FP32, 96, 3, "L2 and clusters", numbers="scaled"),
    Case("lstm", FP32, 60, 3, "cluster", numbers="scaled"),
    Case("lstm", FP32, 64, 2, "one block", width=2, numbers="scaled"),
    Case("gru", FP32, 128, 5, numbers="scaled"),
    Case("gru", FP32, 60, 3, "cluster", numbers="scaled"),
)

Run = Callable[[Case, LayerCall], Tensor]


@pytest.fixture
def run(machine: Machine, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The output of a call by a case's kernel, which is of the case's numbers."""

    def run(case: Case, call: LayerCall) -> Tensor:
        made: list[OnCpu] = []

        def launcher(geometry: Geometry, _device: Any) -> OnCpu:
            made.append(OnCpu(geometry, folder))
            return made[-1]

        monkeypatch.setattr(persistent_calls, "_LAUNCHES", {})
        monkeypatch.setattr(persistent_calls, "geometry", case.geometry)
        monkeypatch.setattr(persistent_calls, "launcher", launcher)
        multiplied_as(monkeypatch, case.numbers)
        output = by_name("persistent").forward(call).output_TBO
        assert {launcher.geometry.tile.numbers for launcher in made} == {case.numbers}
        assert not any(launcher.failed for launcher in made)
        return output

    return run


def wanted(call: LayerCall) -> Tensor:
    return by_name("reference").forward(converted(call, torch.float64)).output_TBO


def without_rounding(call: LayerCall) -> LayerCall:
    """Recurrent weights and initial states that TF32 and float16 have, so that no error is due to
    rounding these: of small weights and large states it would be large."""
    weights = tuple(replace(w, w_hh=w.w_hh.half().float()) for w in call.weights)
    return replace(call, weights=weights, h0_DBR=call.h0_DBR.half().float())


@pytest.mark.parametrize("power", [-20, -14, 3, 15, 20])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_unit_s_weights_and_initial_states_may_be_of_any_size(
    case: Case, power: int, run: Run
) -> None:
    """Of one unit the states are so many times as large and the weights that they meet so many
    times as small: their products are what they were, for a step."""
    call = without_rounding(replace(case.call(), input_TBI=case.call().input_TBI[:1]))
    factor = 2.0**power
    call.h0_DBR[..., 5] *= factor
    for w in call.weights:
        w.w_hh[:, 5] /= factor
    assert_matches(run(case, call), wanted(call), BOUND)


@pytest.mark.parametrize("power", [7, 20])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_sequence_s_initial_states_may_be_large_for_all_steps(
    case: Case, power: int, run: Run
) -> None:
    """Those of some units, which not all warps gather. A GRU's stay large, where its update gate
    is; all steps are published by their bound. The other sequences of the batch are as near as
    without it."""
    call = case.call()
    call.h0_DBR[:, 1, :8] *= 2.0**power
    for w in call.weights:
        if case.cell == "gru":  # so that states stay what they are
            w.b_ih.view(3, -1)[1] += 4.0
    found, want = run(case, call), wanted(call)
    others = [s for s in range(case.batch) if s != 1]
    assert_matches(found[:, others], want[:, others], BOUND)
    if case.cell == "gru":
        assert want[-1, 1, :8].abs().max() > 4, "some stay large"
        assert_matches(found[:, 1], want[:, 1], 4 * BOUND)


@pytest.mark.parametrize("power", [30, 40, 100])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_whatever_a_sequence_begins_with_the_others_are_as_near(
    case: Case, power: int, run: Run
) -> None:
    """At every step; and its own gates are full or shut, by one unit that is far too large. Of
    several all count as much, so that only their signs are right."""
    call = case.call()
    call.h0_DBR[:, 1, 5] *= 2.0**power
    found, want = run(case, call), wanted(call)
    others = [s for s in range(case.batch) if s != 1]
    for step in range(STEPS):
        assert_matches(found[step, others], want[step, others], BOUND)
    if case.cell != "gru":
        assert_matches(found[:, 1], want[:, 1], BOUND)
    assert found.isfinite().all()


@pytest.mark.parametrize("power", [20, 30, 100])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_whatever_a_weight_is_other_units_are_as_near(case: Case, power: int, run: Run) -> None:
    """For a step: all meet it in the next one."""
    call = replace(case.call(), input_TBI=case.call().input_TBI[:1])
    call.weights[0].w_hh[7, 3] = 2.0**power
    found, want = run(case, call), wanted(call)
    others = [unit for unit in range(case.hidden) if unit != 7]
    assert_matches(found[..., others], want[..., others], BOUND)
    assert_matches(found[..., 7], want[..., 7], BOUND)


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7F800001, -1, 0x7F800000])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_sequence_that_is_no_number_stays_so_and_alone(case: Case, bits: int, run: Run) -> None:
    call = case.call()
    call.h0_DBR[0, 1, 5] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    found, want = run(case, call), wanted(call)
    others = [s for s in range(case.batch) if s != 1]
    assert_matches(found[:, others], want[:, others], BOUND)
    assert torch.equal(found[:, 1].isnan(), want[:, 1].isnan())
    if bits != 0x7F800000:
        assert want[:, 1].isnan().any()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_a_weight_that_is_no_number_leaves_other_units_alone(
    case: Case, value: float, run: Run
) -> None:
    """For a step: all meet it in the next one."""
    call = replace(case.call(), input_TBI=case.call().input_TBI[:1])
    call.weights[0].w_hh[7, 3] = value
    found, want = run(case, call), wanted(call)
    sound = want.isfinite()
    assert torch.equal(found.isfinite(), sound)
    assert_matches(found[sound], want[sound], BOUND)


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh"])
def test_it_is_as_near_as_tf32(cell: str, run: Run) -> None:
    case = Case(cell, FP32, 60, 3, "cluster", numbers="scaled")
    call, errors = case.call(), {}
    want = wanted(call)
    for numbers in ("scaled", "tf32"):
        found = run(case._replace(numbers=numbers), call)
        errors[numbers] = float((found - want).norm() / want.norm())
    assert errors["scaled"] < 1.2 * errors["tf32"]
    assert errors["scaled"] > 1e-6, "TF32's bits, and no more"
