"""Peaks of batches that were never run, against those of the batches run afterwards."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ecornn
from ecornn.bench.models.step import make_step
from ecornn.errors import InvalidInput
from ecornn.profiler import fit, profile
from ecornn.profiler.steps import read_step


class TwoPeaks(nn.Module):
    """Small batches peak in the optimizer, large ones in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).exp().sum()


def make(batch: int, length: int = 1, device: str = "cpu") -> Any:
    model = TwoPeaks().to(device)
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.zeros(batch, length, 64, device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()

    return step, model, optimizer


def peak_of(made: Any) -> int:
    return read_step(made).observed().peak_bytes


@pytest.mark.parametrize("name", ["speech", "gpt2", "transformer", "resnet50"])
def test_an_unseen_batch_of_a_whole_model_is_predicted_exactly(name: str) -> None:
    def of(batch: int) -> Any:
        return make_step(name, size="tiny", device="cpu", batch=batch)

    found = fit(of, sizes=(2, 4))
    assert found.peak(13) == peak_of(of(13))
    assert found.curve.same_operators


def test_weights_that_a_step_replaces_are_not_held_on_to() -> None:
    """An allocator would count the old ones beside the new."""
    alive: list[bool] = []

    def of(batch: int) -> Any:
        model, x = nn.Linear(8, 8), torch.zeros(batch, 8)
        first = weakref.ref(model.weight)

        def step() -> None:
            model.weight = nn.Parameter(torch.zeros(8, 8))
            alive.append(first() is not None)
            model(x).sum().backward()

        return step, model

    fit(of, sizes=(2, 4))
    assert len(alive) == 4
    assert not any(alive)


def test_a_layer_whose_reserve_comes_in_pages_is_predicted_within_three_per_cent() -> None:
    def of(batch: int) -> Any:
        model, x = nn.LSTM(64, 64), torch.zeros(16, batch, 64)
        return lambda: model(x)[0].sum().backward(), model

    found = fit(of, sizes=(16, 32))
    assert found.peak(100) == pytest.approx(peak_of(of(100)), rel=0.03)


def test_the_peak_moves_to_another_operator() -> None:
    """The second line begins where the first one's operator is passed; one through the two peaks
    observed would miss it."""
    found = fit(make, sizes=(1, 8))
    real = peak_of(make(512))
    assert found.peak(512) == real
    small, large = found.observed.values()
    through_peaks = small + (large - small) / 7 * 511
    assert abs(through_peaks - real) > 0.05 * real


def test_the_largest_batch_is_the_largest() -> None:
    found = fit(make, "3MiB")
    assert found.largest is not None
    assert found.largest not in found.observed
    assert peak_of(make(found.largest)) <= 3 * 2**20 < peak_of(make(found.largest + 1))
    # What was run stayed far below the budget.
    assert max(found.observed.values()) <= 3 * 2**20 / 4
    assert f"3.00 MiB: {found.largest}" in str(found)


def test_on_meta_tensors_the_answer_is_observed() -> None:
    found = fit(lambda batch: make(batch, device="meta"), 10**9)
    assert found.method == "simulated"
    assert found.largest is not None
    assert found.observed[found.largest] <= 10**9 < found.observed[found.largest + 1]


def test_meta_tensors_tell_what_the_cpu_does_beside_its_optimizer_s_counters() -> None:
    """Which are on the CPU in both cases, four bytes a parameter."""
    counters = 4 * len(list(make(3)[1].parameters()))
    assert peak_of(make(3)) == peak_of(make(3, device="meta")) + counters


def test_every_length_has_its_curve() -> None:
    short, long = (fit(make, "3MiB", length=length, sizes=(2, 4)) for length in (1, 10))
    assert short.largest is not None
    assert long.largest == short.largest // 10
    assert short.peak(500) == long.peak(50)


def test_nothing_fits() -> None:
    found = fit(make, 1000)
    assert found.largest is None
    assert "not even a batch of 1" in str(found)


def test_with_echo_less_is_kept_and_that_is_predicted() -> None:
    def compiled(batch: int) -> Any:
        torch._dynamo.reset()  # each size is compiled for itself
        _, model, optimizer = make(batch)
        run = ecornn.compile(model, memory="min", codegen="eager")
        x = torch.zeros(batch, 64)

        def step() -> None:
            optimizer.zero_grad()
            run(x).backward()
            optimizer.step()

        return step, model, optimizer

    found = fit(compiled, sizes=(64, 128))
    assert found.peak(200) == peak_of(compiled(200))
    assert found.peak(200) <= peak_of(make(200))
    assert any("compiled code" in note for note in found.notes)


def test_what_a_make_step_may_return() -> None:
    step, model, optimizer = make(2)
    assert read_step((step, model)).optimizers == ()
    assert read_step((step, model, [optimizer])).optimizers == (optimizer,)
    assert read_step(make_step("gpt2", size="tiny", device="cpu")).optimizers
    for wrong in (step, (step,), (model, step), None):
        with pytest.raises(InvalidInput, match="return one of these"):
            read_step(wrong)


def test_bad_arguments() -> None:
    with pytest.raises(InvalidInput, match="units are"):
        fit(make, "24 apples")
    with pytest.raises(InvalidInput, match="above 0"):
        fit(make, -1)
    with pytest.raises(InvalidInput, match="two different"):
        fit(make, sizes=(2, 2))
    step, model, _ = make(2)
    for not_a_maker, words in (
        (step, r"step\(\).* called as make_step\(batch\); let it take \(batch\)"),
        ((step, model), "got tuple, .* makes the step"),
        (lambda batch, length: make(batch, length), r"\(batch, length\).* pass length="),
    ):
        with pytest.raises(InvalidInput, match=words):
            fit(not_a_maker, "1GiB")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"called as make_step\(batch, length\)"):
        fit(lambda batch: make(batch), length=3)


def test_a_report_of_a_step_that_was_made() -> None:
    step, model, optimizer = make(4)
    step()
    assert peak_of(make(4)) == profile(step, model, optimizer).peak_bytes
