"""A model that runs its parts within checkpoints itself is compiled without an error, and has the
gradients that it has as it is written."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ecornn
from ecornn.bench.training.memory import allocated_peak
from support.called_often import gradients, same

B, H = 3, 5


pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Loop(nn.Module):
    """Each second call is made within a checkpoint, or all of them within one."""

    def __init__(self, whole: bool, draws: bool = True) -> None:
        super().__init__()
        self.whole, self.draws = whole, draws
        self.step = nn.Sequential(
            nn.Linear(H, H), nn.Tanh(), nn.Dropout(0.3 * draws), nn.Linear(H, H)
        )

    def forward(self, x: Tensor, reentrant: bool = False) -> Tensor:
        how = {"use_reentrant": reentrant, "preserve_rng_state": self.draws}
        if self.whole:
            result: Tensor = checkpoint(self.steps, x, **how)
            return result
        for k in range(6):
            x = checkpoint(self.step, x, **how) if k % 2 else self.step(x)
        return x.square().sum()

    def steps(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = self.step(x)
        return x.square().sum()


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("around", [False, True])
def test_gradients(whole: bool, reentrant: bool, around: bool) -> None:
    """`around`: there is a checkpoint around the model as well."""
    model = Loop(whole).double()
    twin, run = copy.deepcopy(model), ecornn.compile(model, codegen="eager")
    for turn in range(3):
        found = []
        for one, own in ((run, model), (twin, twin)):
            torch.manual_seed(turn)
            own.zero_grad()
            x = torch.linspace(-1, turn + 1, B * H, dtype=torch.float64).view(B, H)
            x.requires_grad_()
            given = x, reentrant
            loss: Any = checkpoint(one, *given, use_reentrant=False) if around else one(*given)
            loss.backward()
            found.append([loss.detach(), x.grad, *gradients(own)])
        same(*found, bits=False)
    assert ("checkpoints of the model's own" in str(run.explain())) is not reentrant


def test_the_peak_is_foretold() -> None:
    """But for the generator's states, which a checkpoint keeps where something is drawn."""
    model, x = Loop(whole=False, draws=False), torch.randn(512, H)
    run = ecornn.compile(model, codegen="eager")
    for _ in range(2):
        run(x).backward()
    model.zero_grad()
    with torch.backends.mkldnn.flags(enabled=False):
        found = allocated_peak(lambda: run(x).backward())
    assert run.explain().predicted_peak_bytes(0) == found
