"""What a call is known by is short, whatever its arguments are, and tells different ones apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from ecornn.echo.work import work_of
from ecornn.profiler import profile

LARGE = 1 << 20


@dataclass
class Settings:
    scale: float
    weights: Tensor


def typed(count: int) -> torch.TypedStorage:
    wrapped = torch.UntypedStorage(count)
    return torch.TypedStorage(wrap_storage=wrapped, dtype=torch.float32, _internal=True)


def key_of(*args: object, **kwargs: object) -> str:
    call = work_of(torch.ops.aten.set_.source_Storage, args, kwargs, None).call
    assert call is not None
    return call.key


@pytest.mark.parametrize(
    ("argument", "another"),
    [
        (torch.UntypedStorage(LARGE), torch.UntypedStorage(LARGE + 1)),
        (typed(LARGE), typed(LARGE + 4)),
        (np.zeros(LARGE), np.zeros(LARGE, np.float32)),
        (torch.Generator(), torch.Generator()),
        ({"a": torch.zeros(LARGE)}, {"a": torch.zeros(2, LARGE)}),
        ([(torch.zeros(LARGE),)], [(torch.zeros(2, LARGE),)]),
        (Settings(1.0, torch.zeros(LARGE)), Settings(2.0, torch.zeros(LARGE))),
        (torch.nn.ModuleList(torch.nn.ReLU() for _ in range(200)), torch.nn.ReLU()),
        (slice(0, 3), slice(0, 4)),
        (torch.float32, torch.float16),
    ],
)
def test_a_key_is_short_and_tells_arguments_apart(argument: object, another: object) -> None:
    found = key_of(argument, option=argument)
    assert len(found) < 400
    assert found == key_of(argument, option=argument)
    assert found != key_of(another, option=another)


def test_storages_of_one_form_have_one_key() -> None:
    assert key_of(torch.UntypedStorage(LARGE)) == key_of(torch.UntypedStorage(LARGE))
    assert "storage[1048576]@cpu" in key_of(torch.UntypedStorage(LARGE))


def test_tensors_within_arguments_are_read() -> None:
    held = Settings(1.0, torch.zeros(3)), {"a": torch.zeros(5)}
    assert work_of("operator", held, {}, None).read_bytes == 4 * (3 + 5)


def test_a_step_that_sets_a_tensor_s_storage_is_profiled() -> None:
    """As cuDNN's layers do with their weights; torch prints such a storage byte by byte."""
    model = torch.nn.Linear(8, 8)
    storage = torch.zeros(1 << 22).untyped_storage()

    def step() -> None:
        flat = torch.empty(0)
        with torch.no_grad():
            flat.set_(storage, 0, (64, 8), (8, 1))
        model(flat).tanh().sum().backward()

    report = profile(step, model, what_if=True)
    assert {one.module for one in report.what_if} >= {""}
