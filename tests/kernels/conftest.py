"""Kernels that run on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ecornn.backends import persistent_gradients
from support.kernel_cases import multiplied_as
from support.machine import Machine


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    machine.install(monkeypatch)
    multiplied_as(monkeypatch, "tf32x3")
    monkeypatch.setattr(persistent_gradients, "is_small", lambda *_, **__: False)
    mm, addmm = torch.mm, torch.addmm

    def widened(a: Tensor, b: Tensor, out_dtype: Any = None, **more: Any) -> Tensor:
        return mm(a, b, **more) if out_dtype is None else mm(a.float(), b.float())

    def added(c: Tensor, a: Tensor, b: Tensor, out_dtype: Any = None, **more: Any) -> Tensor:
        return addmm(c, a if out_dtype is None else a.float(), b.to(c.dtype), **more)

    # torch has these with another dtype for CUDA alone
    monkeypatch.setattr(torch, "mm", widened)
    monkeypatch.setattr(torch, "addmm", added)
    return machine
