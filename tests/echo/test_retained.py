"""Backward passes through a graph that is kept for a second one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ecornn

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(8, 50)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(torch.tanh(self.layer(x)), target)


@pytest.mark.parametrize("codegen", ["inductor", "eager"])
@pytest.mark.parametrize("memory", ["auto", "min"])
def test_code_that_overwrites_what_was_kept_does_not_come_from_a_cache(
    codegen: str, memory: str
) -> None:
    torch.manual_seed(1)
    x, target = torch.randn(20, 8), torch.randint(50, (20,))
    for retained in (False, True):
        torch._dynamo.reset()
        model = Model()
        loss = ecornn.compile(model, memory=memory, codegen=codegen)(x, target)
        loss.backward(retain_graph=retained)
        first = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
    loss.backward()
    assert len(first) == 2
    for weight, once in zip(model.parameters(), first, strict=True):
        torch.testing.assert_close(weight.grad, 2 * once)
