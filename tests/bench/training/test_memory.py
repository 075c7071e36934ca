from __future__ import annotations

import pytest
import torch

from ecornn.bench.models.step import Step, make_step
from ecornn.bench.training.build import build
from ecornn.bench.training.cases import ModelCase
from ecornn.bench.training.contenders import CHECKPOINT, EAGER
from ecornn.bench.training.memory import (
    allocated_peak,
    fixed_bytes,
    held_bytes,
    limited_to,
    peak_bytes,
    taken_by_others,
)

KIB = 256  # elements of float32
#: What operators allocate beside their results, such as a number that is added.
SCRATCH = 64


def test_the_peak_is_what_is_alive_at_once() -> None:
    def function() -> None:
        first = torch.ones(4 * KIB)
        second = first + 1  # 8 KiB
        del first
        third = second + 1  # 8 KiB again
        del second, third
        torch.ones(5 * KIB)

    assert 0 <= allocated_peak(function) - 8 * 1024 < SCRATCH


def test_views_and_in_place_operators_take_nothing() -> None:
    def function() -> None:
        tensor = torch.zeros(4 * KIB)
        tensor.view(2, -1).t().add_(1)

    assert 0 <= allocated_peak(function) - 4 * 1024 < SCRATCH


def test_what_is_there_before_a_step_is_counted_once() -> None:
    step = make_step("gpt2", size="tiny", device="cpu")  # its output is its embedding
    weights = sum(4 * p.numel() for p in step.model.parameters())
    batch = step.batch[0].numel() * 8
    assert held_bytes(step) == weights + batch
    step()
    adam = 2 * weights + 4 * len(list(step.model.parameters()))  # moments, and counts of steps
    assert held_bytes(step) == 2 * weights + batch + adam


@pytest.mark.parametrize("model", ["gpt2", "resnet50"])
def test_what_no_batch_changes_is_told_from_the_weights(model: str) -> None:
    """Without the batch, and without Adam's counts of steps and batch norm's of batches."""
    step = make_step(model, size="tiny", device="cpu")
    foretold = fixed_bytes(make_step(model, size="tiny", device="meta"))
    assert foretold == fixed_bytes(step)
    step()
    step.passes()
    counts = 4 * len(list(step.model.parameters())) if model == "gpt2" else 0
    batch = sum(tensor.nbytes for tensor in step.batch)
    assert held_bytes(step) == foretold + counts + batch


def warm(contender: object, length: int) -> Step:
    case = ModelCase("nmt", batch=8, length=length, size="tiny")
    step = build(contender, case, "cpu")  # type: ignore[arg-type]
    step()
    return step


def test_a_step_s_peak_is_between_what_it_keeps_and_all_it_makes() -> None:
    step = warm(EAGER, 20)
    found = peak_bytes(step)
    step.clear()
    held = held_bytes(step)
    gradients = sum(4 * p.numel() for p in step.model.parameters())
    # tanh's results of all 20 words are kept: each is 8 × 20 × 16 floats
    assert found > held + gradients
    assert found > held + 20 * (8 * 20 * 16 * 4)
    assert peak_bytes(step) == found, "a step allocates what the one before it did"


def test_checkpoints_need_less() -> None:
    assert peak_bytes(warm(CHECKPOINT, 20)) < 0.7 * peak_bytes(warm(EAGER, 20))


def test_a_limit_is_of_no_concern_to_the_cpu() -> None:
    with limited_to(1e-9, torch.device("cpu")):
        assert torch.ones(1000).sum() == 1000


@pytest.mark.gpu
def test_a_limit_is_kept_on_cuda() -> None:
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    with limited_to(1.0, device):
        torch.empty(2**29, dtype=torch.uint8, device=device)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2**31, dtype=torch.uint8, device=device)
    torch.empty(2**31, dtype=torch.uint8, device=device)


def test_others_took_what_is_neither_free_nor_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, gib = torch.device("cuda", 0), 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (3 * gib, 140 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 12 * gib)
    assert taken_by_others(16 * gib, gpu)
    assert not taken_by_others(15 * gib, gpu)
    assert not taken_by_others(16 * gib, torch.device("cpu"))
