"""The profiler on CUDA: rows against the allocator's own peak of a step that nobody observes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ecornn
from ecornn.bench.models.step import Step, make_step
from ecornn.bench.training.memory import peak_bytes
from ecornn.profiler import fit, profile
from ecornn.profiler.model import COUNTED, TENSORS

MODELS = ("nmt", "speech", "transformer", "resnet50", "gpt2")
#: Of the measured peak: the sum of the rows, and predictions for a batch that was not run.
OF_ROWS, OF_PREDICTIONS = 0.01, 0.03
BATCHES = {"nmt": 16, "speech": 4, "transformer": 8, "resnet50": 16, "gpt2": 2}


def ready(name: str, batch: int) -> Step:
    gc.collect()
    step = make_step(name, batch=batch, device="cuda")
    step()
    step()
    return step


@pytest.mark.parametrize("name", MODELS)
def test_the_rows_add_up_to_the_allocator_s_peak(name: str) -> None:
    step = ready(name, BATCHES[name])
    measured = peak_bytes(step)
    step.clear()
    report = profile(step, step.model, step.optimizer)
    assert report.peak_bytes == pytest.approx(measured, rel=OF_ROWS)
    assert sum(row.bytes for row in report.rows if row.kind in COUNTED) == report.peak_bytes
    assert report.timeline.total(report.peak_time) == report.peak_bytes
    # Tensors explain most of it, and never more than there is.
    tensors = sum(row.bytes for row in report.rows if row.kind in TENSORS)
    assert 0.5 * measured < tensors <= measured
    assert report.by_kind()["driver"] > 0


@pytest.mark.parametrize("name", MODELS)
def test_an_unseen_batch_is_predicted(name: str) -> None:
    batch = BATCHES[name]
    found = fit(
        lambda samples: make_step(name, batch=samples, device="cuda"), sizes=(batch // 2, batch)
    )
    step = ready(name, 3 * batch)
    assert found.peak(3 * batch) == pytest.approx(peak_bytes(step), rel=OF_PREDICTIONS)


def test_attention_and_recurrent_feature_maps_come_first() -> None:
    step = ready("nmt", 64)
    report = profile(step, step.model, step.optimizer)
    kept = [row.module for row in report.rows if row.kind == "feature maps"]
    assert kept[0].startswith("decoder.attention")
    lines = {held.line for held in report.at_peak if held.module == "decoder.attention"}
    assert any("attention_nmt.py:" in line for line in lines)


@pytest.mark.parametrize(
    "compiled",
    [
        pytest.param(torch.compile, id="inductor"),
        pytest.param(lambda model: ecornn.compile(model, memory="min"), id="echo"),
    ],
)
def test_compiled_models_add_up(compiled: Callable[[Any], Any]) -> None:
    torch._dynamo.reset()
    step = make_step("gpt2", size="tiny", batch=64, device="cuda")
    step.run = compiled(step.model)
    step()
    step()
    measured = peak_bytes(step)
    step.clear()
    report = profile(step, step.model, step.optimizer)
    assert report.peak_bytes == pytest.approx(measured, rel=OF_ROWS)


def test_the_report_of_a_step_that_ran_out_of_memory() -> None:
    step = ready("nmt", 4)

    def too_large() -> None:
        loss = step.loss()
        torch.empty(2**50, dtype=torch.int8, device="cuda")
        loss.backward()

    with pytest.raises(torch.OutOfMemoryError) as raised:
        profile(too_large, step.model, step.optimizer)
    report = raised.value.memory_report  # type: ignore[attr-defined]
    assert "feature maps" in {held.kind for held in report.held}
    assert torch._C._len_torch_dispatch_stack() == 0
