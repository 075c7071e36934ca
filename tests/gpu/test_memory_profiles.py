"""The profiler on CUDA: rows against the allocator's own peak of a step that nobody observes."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ecornn
from ecornn.bench.models.step import Step, make_step
from ecornn.bench.training.memory import limited_to, peak_bytes
from ecornn.profiler import Profile, fit, profile
from ecornn.profiler.allocator import EVERY
from ecornn.profiler.blocks import Blocks
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


@pytest.mark.parametrize("operators", [False, True], ids=["history", "operators"])
@pytest.mark.parametrize("name", MODELS)
def test_the_rows_add_up_to_the_allocator_s_peak(name: str, operators: bool) -> None:
    step = ready(name, BATCHES[name])
    measured = peak_bytes(step)
    step.clear()
    report = profile(step, step.model, step.optimizer, operators=operators)
    assert report.unit == ("operator" if operators else "allocation")
    assert set(report.notes) <= {"tensors on cpu are not counted"}, "the optimizer's counters"
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


def test_what_the_allocator_has_room_for_is_foretold() -> None:
    """Of a model whose cuDNN layers take workspaces: within two per cent, and one sample."""
    found = fit(lambda samples: make_step("speech", batch=samples, device="cuda"), "8GiB")
    assert found.largest is not None
    assert found.largest_running is not None
    assert found.largest_running <= found.largest
    off = 1 + math.ceil(0.02 * found.largest_running)

    def runs(batch: int) -> bool:
        gc.collect()
        torch.cuda.empty_cache()
        try:
            with limited_to(8.0, torch.device("cuda")):
                ready("speech", batch)
        except torch.OutOfMemoryError:
            return False
        return True

    assert runs(found.largest_running - off)
    assert not runs(found.largest_running + off)


def test_few_readings_of_the_allocator_tell_what_all_would() -> None:
    """Where the peak is, how high, and what is beside tensors in it."""
    step = ready("speech", BATCHES["speech"])
    few, all_of_them = (
        Profile(step.model, (step.optimizer,), every=every, operators=True).of(step)
        for every in (EVERY, 1)
    )
    assert few.peak_bytes == pytest.approx(all_of_them.peak_bytes, rel=1e-3)
    assert few.timeline.operator == all_of_them.timeline.operator
    near = few.timeline.total(all_of_them.peak_time)
    assert near == pytest.approx(all_of_them.peak_bytes, rel=0.02)


@pytest.mark.parametrize("name", ["nmt", "gpt2"])
def test_the_history_tells_what_every_operator_tells(name: str) -> None:
    """Of all that is a tensor's, at the two peaks: module by module."""
    step = ready(name, BATCHES[name])
    found = [profile(step, step.model, step.optimizer, operators=way) for way in (False, True)]
    for kind in ("weights", "optimizer state", "feature maps"):
        history, operators = (
            {row.module: row.bytes for row in report.rows if row.kind == kind} for report in found
        )
        assert history == pytest.approx(operators, rel=0.01), kind


def texts_of_a_step(step: Step) -> set[str]:
    """What stands beside its allocations, on every thread."""
    record = torch.cuda.memory._record_memory_history
    record("all", context=None, clear_history=True)
    step()
    (events,) = torch.cuda.memory._snapshot()["device_traces"]
    record(None, clear_history=True)
    return {event["user_metadata"] for event in events}


@pytest.mark.parametrize("breaks", [False, True])
def test_nothing_is_left_of_the_history(breaks: bool) -> None:
    step = ready("nmt", 4)

    def broken() -> None:
        loss = step.loss()
        loss.register_hook(lambda _: 1 / 0)
        loss.backward()

    if breaks:
        with pytest.raises(ZeroDivisionError):
            profile(broken, step.model, step.optimizer)
    else:
        profile(step, step.model, step.optimizer)
    assert not torch._C._cuda_isHistoryEnabled()
    assert torch.cuda.memory._snapshot()["device_traces"] == [[]]
    assert texts_of_a_step(step) == {""}


def test_allocations_are_those_of_a_step_alone() -> None:
    step = ready("nmt", 8)
    record = torch.cuda.memory._record_memory_history
    record("all", context=None, clear_history=True)
    step()
    (events,) = torch.cuda.memory._snapshot()["device_traces"]
    record(None, clear_history=True)
    alone = [event["size"] for event in events if event["action"] == "alloc"]
    report = profile(step, step.model, step.optimizer)
    assert [held.bytes for held in report.held if held.born] == alone


def test_where_somebody_else_records_the_report_says_so() -> None:
    step = ready("nmt", 4)
    record = torch.cuda.memory._record_memory_history
    record("all", context=None, clear_history=True)
    try:
        report = profile(step, step.model, step.optimizer)
        assert torch._C._cuda_isHistoryEnabled(), "and goes on"
    finally:
        record(None, clear_history=True)
    assert report.unit == "operator"
    assert any("somebody else" in note for note in report.notes)


def test_what_the_step_does_not_read_is_told_apart() -> None:
    step = ready("nmt", 8)
    extra = torch.zeros(2**28, device="cuda")
    report = profile(step, step.model, step.optimizer)
    assert report.by_kind()["other"] >= extra.nbytes
    largest = report.at_peak[0]
    assert (largest.bytes, largest.kind) == (extra.nbytes, "other")


def test_what_making_it_again_would_free() -> None:
    step = ready("nmt", 64)
    report = profile(step, step.model, step.optimizer, what_if=True)
    found = {one.module: one for one in report.what_if}
    attention = found["decoder.attention"]
    assert attention.cheap_frees > 0.5 * attention.kept_bytes
    assert attention.cheap_seconds < attention.whole_seconds
    assert found["encoder"].cheap_frees < 0.1 * found["encoder"].kept_bytes, "cuDNN's layers stay"


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
    kept = [held for held in report.held if "compiled code" in held.kept_by]
    named = sum(held.bytes for held in kept if held.module.startswith("blocks."))
    assert not any("could not be read" in note for note in report.notes)
    assert named > 0.25 * sum(held.bytes for held in kept if held.kind == "feature maps")


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


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_blocks_are_those_of_the_allocator(seed: int) -> None:
    """The rules that `fit` plays steps through by, on blocks taken and given at random."""
    draw = random.Random(seed)
    blocks, tensors, addresses = Blocks(2**40), [], []
    pool = torch.cuda.MemPool()  # of its own, so that free parts from before are not lent
    before = torch.cuda.memory_reserved()
    with torch.cuda.use_mem_pool(pool):
        for _ in range(400):
            if tensors and draw.random() < 0.45:
                place = draw.randrange(len(tensors))
                tensors.pop(place)
                blocks.give(addresses.pop(place))
            else:
                size = int(2 ** draw.uniform(4, 27))
                tensors.append(torch.empty(size, dtype=torch.int8, device="cuda"))
                addresses.append(blocks.take(size))
            assert torch.cuda.memory_reserved() - before == blocks.reserved
        tensors.clear()


def test_a_loss_whose_lengths_are_on_the_cpu() -> None:
    """torch leaves them there as long as somebody observes operators."""
    model = torch.nn.Linear(8, 5).cuda()
    x, targets = torch.randn(20, 4, 8, device="cuda"), torch.randint(1, 5, (4, 6), device="cuda")
    lengths = torch.full((4,), 20), torch.tensor([6, 3, 5, 2])

    def step() -> None:
        scores = model(x).log_softmax(-1)
        torch.nn.functional.ctc_loss(scores, targets, *lengths).backward()
        model.zero_grad(set_to_none=True)

    step()
    for operators in (False, True):
        report = profile(step, model, operators=operators)
        assert report.peak_bytes > 0
