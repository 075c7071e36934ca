"""Layers whose parameters have no memory before their first call."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from ecornn.profiler import profile
from support.recorded_steps import recorded


@pytest.mark.parametrize("history", [True, False])
def test_parameters_that_get_their_memory_in_the_step(
    history: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    never_called = nn.LazyLinear(8)

    def step() -> None:
        model(torch.randn(4, 6)).sum().backward()
        optimizer.step()

    with recorded(monkeypatch) if history else nullcontext():
        report = profile(step, model, optimizer)
    made = [one for one in report.held if one.born]
    shapes = {one.why.split(";")[0]: one.shape for one in made if one.kind == "weights"}
    assert shapes == {
        "the parameter 0.weight": (8, 6),
        "the parameter 0.bias": (8,),
        "the parameter 1.weight": (8,),
        "the parameter 1.bias": (8,),
        "the buffer 1.running_mean": (8,),
        "the buffer 1.running_var": (8,),
    }
    gradients = sorted(one.why for one in made if one.kind == "gradients")
    assert gradients == [f"the gradient of {n}.{w}" for n in (0, 1) for w in ("bias", "weight")]
    with recorded(monkeypatch) if history else nullcontext():
        assert profile(lambda: None, never_called).peak_time == 0
