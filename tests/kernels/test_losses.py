"""The gradient of cross entropy in one pass: its source run on a CPU, and when it serves."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ecornn.kernels import loading
from ecornn.kernels.jit.key import SOURCES
from ecornn.kernels.losses import (
    CrossEntropyArguments,
    CrossEntropyTile,
    cross_entropy_launcher,
    serves,
)
from support.on_cpu import HERE, unavailable

#: A launch in which every thread runs after the other: they do not meet.
MAIN = """
#include "cuda_on_cpu.h"
#define blockIdx block_index
#define threadIdx thread_index
static Dim block_index, thread_index;
#include "cross_entropy.cu"
extern "C" void run(const CrossEntropyArguments* arguments) {
  for (block_index.x = 0; block_index.x < unsigned(arguments->rows); ++block_index.x)
    for (thread_index.x = 0; thread_index.x < THREADS; ++thread_index.x) cross_entropy(*arguments);
}
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("cross_entropy")
    (folder / "main.cpp").write_text(MAIN)
    library = folder / "kernel.so"
    command = ["g++", "-std=c++20", "-O1", "-w", "-fPIC", "-shared", "-pthread"]
    include = [f"-I{HERE}", f"-I{SOURCES}"]
    subprocess.run([*command, *include, "-o", library, folder / "main.cpp"], check=True)
    return ctypes.CDLL(str(library)).run


def at_offset(values: Tensor, offset: int) -> Tensor:
    """The same numbers, so many of them beyond a multiple of 64 bytes."""
    room = torch.full((values.numel() + 48,), 7.0)
    start = -(room.data_ptr() // 4) % 16 + 16 + offset
    return room[start : start + values.numel()].view(values.shape).copy_(values)


@pytest.mark.parametrize("classes", [1, 3, 16, 37, 1030])
@pytest.mark.parametrize(("of_scores", "of_grads"), [(0, 0), (1, 1), (3, 3), (0, 2), (1, 3)])
@pytest.mark.parametrize("in_place", [False, True])
def test_it_is_torch_s_gradient(
    kernel: Any, classes: int, of_scores: int, of_grads: int, in_place: bool
) -> None:
    """Whichever multiples of 16 bytes rows begin at; rows that are ignored have no gradient."""
    generator = torch.Generator().manual_seed(classes)
    drawn = torch.randn(7, classes, generator=generator) * 4
    target = torch.randint(classes, (7,), generator=generator)
    target[2], drawn[4, 0] = -100, float("-inf") if classes > 1 else 0.0
    leaf = drawn.clone().requires_grad_()
    F.cross_entropy(leaf, target).backward()
    log = drawn.log_softmax(1)
    largest, places = drawn.max(1)
    log_sum = -log.gather(1, places.unsqueeze(1)).squeeze(1)
    slope = torch.where(target == -100, 0.0, -1 / 6)
    scores = at_offset(drawn, of_scores)
    grads = scores if in_place else at_offset(torch.zeros_like(drawn), of_grads)
    tensors = (scores, grads, target, largest, log_sum, slope)
    arguments = CrossEntropyArguments(*(t.data_ptr() for t in tensors), *drawn.shape)
    kernel(ctypes.byref(arguments))
    torch.testing.assert_close(grads, leaf.grad, rtol=2e-6, atol=1e-8)
    assert grads[2].count_nonzero() == 0
    beside = torch.as_strided(grads, (2,), (grads.numel() + 1,), grads.storage_offset() - 1)
    assert beside.tolist() == [7.0, 7.0]  # nothing was written around it


def test_the_sum_of_a_row_stands_where_its_largest_score_is() -> None:
    scores = torch.randn(50, 999, generator=torch.Generator().manual_seed(1)) * 5
    largest, places = scores.max(1, keepdim=True)
    log = scores.log_softmax(1)
    again = scores - largest + log.gather(1, places)
    torch.testing.assert_close(again, log, rtol=0, atol=2e-6)


def test_it_serves_float32_in_order_on_a_gpu() -> None:
    assert serves(torch.empty(3, 4))
    assert not serves(torch.empty(3, 4, dtype=torch.bfloat16))
    assert not serves(torch.empty(4, 3).t())
    assert not serves(torch.empty(0, 4))
    assert cross_entropy_launcher(torch.empty(3, 4)) is None  # it lies on the CPU


class OnGpu:
    """Of scores, what is asked of them before a kernel is loaded: on the second of two GPUs, the
    first of which is too old and current."""

    is_cuda, dtype, shape = True, torch.float32, (3, 4)

    def __init__(self, monkeypatch: pytest.MonkeyPatch, made: Any) -> None:
        self.current = 0
        monkeypatch.setattr(loading, "_LAUNCHERS", {})
        monkeypatch.setattr(loading, "unavailable", lambda: None)
        monkeypatch.setattr(loading, "too_old", lambda: None if self.current else "too old")
        monkeypatch.setattr(loading, "make_context_current", lambda device: None)
        monkeypatch.setattr(loading, "Launcher", made)
        monkeypatch.setattr(torch.cuda, "device", self.on)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.current == 0)

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        before, self.current = self.current, device
        yield
        self.current = before

    def is_contiguous(self) -> bool:
        return True

    def get_device(self) -> int:
        return 1


def test_the_scores_device_is_asked_and_not_the_current_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scores: Any = OnGpu(monkeypatch, lambda geometry, device: f"on {device}")
    assert cross_entropy_launcher(scores) == "on 1"


def test_where_it_cannot_be_made_torch_s_operators_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*_: Any) -> None:
        raise OSError("the disk is full")

    scores: Any = OnGpu(monkeypatch, made)
    with pytest.warns(UserWarning, match="the disk is full"):
        assert cross_entropy_launcher(scores) is None
    assert cross_entropy_launcher(scores) is None  # and nobody is told again


def test_its_threads_are_those_of_the_source() -> None:
    source = Path(SOURCES / "cross_entropy.cu").read_text()
    assert f"THREADS = {CrossEntropyTile().threads};" in source
