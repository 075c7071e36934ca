from __future__ import annotations

from typing import Any

import pytest
import torch

from ecornn.nn import base, overlapped, plain
from ecornn.planner import ExecutionPlan
from ecornn.spec import RnnSpec
from support.machine import Machine


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    found.install(monkeypatch)
    return found


@pytest.fixture
def on_gpu(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Layers run as if their tensors were on a GPU whose persistent kernels the planner chose."""

    def plan_from(cell: str, inputs: int, hidden: int, *fields: Any) -> ExecutionPlan:
        needs_grad, keep = fields[13:15]
        spec = RnnSpec(cell, inputs, hidden, needs_grad=needs_grad)
        kept = "states" if cell.startswith("rnn") or keep == "states" else "gates"
        return ExecutionPlan(spec, "persistent", kept if needs_grad else "none", "direct", "a test")

    monkeypatch.setattr(plain, "_ROUTES", {})
    monkeypatch.setattr(overlapped, "_FOUND", {})
    monkeypatch.setattr(plain, "plan_from", plan_from)
    monkeypatch.setattr(base, "run_plain", plain._run_on_gpu)
    monkeypatch.setattr(base, "run_plain_with_lengths", plain._run_on_gpu_with_lengths)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.zeros(0).get_device())
    return machine
