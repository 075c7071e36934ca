"""Models of the benchmark of which is said that all they call has deterministic kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ecornn.bench.models.step import make_step
from ecornn.bench.models.tasks import TASKS
from ecornn.bench.training.accuracy import compare, make_comparable, take_passes

STRICT = [task.name for task in TASKS.values() if task.strict]


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before, warn_only=warns)


@pytest.mark.parametrize("name", STRICT)
def test_gradients_are_equal_when_it_is_run_again(name: str) -> None:
    steps = [make_step(name, batch=2, device="cuda") for _ in range(2)]
    for step in steps:
        make_comparable(step)
    found, again = (take_passes(step, seed=3) for step in steps)
    assert compare(again, found).bitwise
