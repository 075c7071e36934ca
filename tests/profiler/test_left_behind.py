"""What stays of a profile that has ended: its report alone."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from ecornn.profiler import profile
from ecornn.profiler.history import History
from support.recorded_steps import recorded


def histories() -> int:
    gc.collect()
    return sum(type(one) is History for one in gc.get_objects())


@pytest.mark.parametrize("history", [True, False])
def test_neither_the_model_nor_the_history_stays(
    history: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before the storages are asked for."""
    before = histories()
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    optimizer = torch.optim.Adam(model.parameters())
    with recorded(monkeypatch) if history else nullcontext():
        observed = profile(model=model, optimizer=optimizer)
        with observed:
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
    gone = [weakref.ref(model), weakref.ref(optimizer)]
    del model, optimizer
    assert histories() == before
    assert [one() for one in gone] == [None, None]
    assert any(held.kind == "feature maps" for held in observed.report.held)
