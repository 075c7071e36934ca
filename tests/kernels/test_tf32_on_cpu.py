"""What the persistent kernels make of float32 where they multiply as TF32, run on a CPU: where they
round, and what is no number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ecornn.backends import persistent_backward, persistent_calls
from ecornn.backends.protocol import ResultGrads
from ecornn.backends.registry import by_name
from support.kernel_cases import FP32, STEPS, TF32_ERROR, Case, converted, multiplied_as, run
from support.machine import Machine
from support.on_cpu import OnCpu, unavailable
from support.tolerances import assert_matches

pytestmark = [
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
    # a thousand threads, which coverage would trace
    pytest.mark.no_cover,
]

INFINITY = 0x7F800000  # its bits


@pytest.mark.parametrize(("cell", "hidden"), [("lstm", 64), ("gru", 64), ("gru", 65)])
def test_gradients_are_rounded_once_as_every_reader_would(
    cell: str, hidden: int, machine: Machine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: what is multiplied is the same. Of 65 units, whose gates' gradients are not what
    is exchanged, and of a GRU's candidate, whose gradient for the input is not, nothing is
    rounded."""
    monkeypatch.setattr(persistent_calls, "launcher", lambda g, _: OnCpu(g, folder))
    multiplied_as(monkeypatch, "tf32")
    undo, undone = persistent_backward._undo, []

    def noted(*given: Any) -> list[Tensor]:
        found = undo(*given)
        undone.append(found[0].clone())
        return found

    monkeypatch.setattr(persistent_backward, "_undo", noted)
    state_grads = []
    for rounded in (False, True):
        case = Case(cell, FP32, hidden, 5, numbers="tf32", rounded=rounded)
        monkeypatch.setattr(persistent_calls, "_LAUNCHES", {})
        monkeypatch.setattr(persistent_calls, "geometry", case.geometry)
        call = case.call()
        d_output = torch.ones(STEPS, 5, hidden)
        _, found = run("persistent", call, ResultGrads(d_output, None, None, None))
        state_grads.append(found.h0_DBR)
    by_readers, once = undone
    exchanged = (3 if cell == "gru" else 4) * hidden if hidden % 4 == 0 else 0
    want = by_readers.clone()
    want[:, :exchanged] = as_tf32(by_readers[:, :exchanged])
    assert torch.equal(once, want)
    assert torch.equal(once, by_readers) == (exchanged == 0)
    assert torch.equal(*state_grads)


def as_tf32(x: Tensor) -> Tensor:
    """To nearest, ties away from zero."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("regime", ["L2", "cluster"])
@pytest.mark.parametrize(
    ("bits", "numbers"),
    [
        *((bits, "tf32") for bits in (0x7FFFFFFF, 0x7F800001, -1, INFINITY)),
        *((bits, "ieee") for bits in (-1, INFINITY)),
    ],
)
def test_a_sequence_that_is_no_number_stays_so_and_alone(
    bits: int,
    numbers: str,
    regime: str,
    machine: Machine,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NaNs of all bits and of the last alone, the mark itself, and infinity, as one unit's initial
    state: of several infinities a product would make NaNs."""
    width = 4 if numbers == "ieee" and regime == "L2" else 8
    case = Case("rnn_relu", FP32, 24, 3, regime, numbers=numbers, width=width)
    monkeypatch.setattr(persistent_calls, "geometry", case.geometry)
    monkeypatch.setattr(persistent_calls, "launcher", lambda g, _: OnCpu(g, folder))
    multiplied_as(monkeypatch, numbers)
    call = case.call()
    call.h0_DBR[0, 1, 5] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    found = by_name("persistent").forward(call).output_TBO
    want = by_name("reference").forward(converted(call, torch.float64)).output_TBO
    others = [0, 2]
    assert_matches(found[:, others], want[:, others], 2 * TF32_ERROR * STEPS**0.5)
    assert torch.equal(found[:, 1].isnan(), want[:, 1].isnan())
    assert torch.equal(found[:, 1].isinf(), want[:, 1].isinf())
    assert (want[:, 1].isinf() if bits == INFINITY else want[:, 1].isnan()).any()
