"""Output layers with a cross entropy: what they are given, and what float64 makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tests.support.tolerances import assert_matches, tolerance
from torch import Tensor

from ecornn.ops.linear_cross_entropy import linear_cross_entropy

IGNORED = -100
#: Of the loss: none, the one that torch's GradScaler begins with, and larger ones.
SCALES = (1.0, 2.0**16, 2.0**20, 2.0**23)


class Given(NamedTuple):
    input: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor

    @property
    def trained(self) -> list[Tensor]:
        layer = (self.input, self.weight, self.bias)
        return [one for one in layer if one is not None and one.requires_grad]

    def map(self, function: Any) -> Given:
        layer = (self.input, self.weight, self.bias)
        changed = (
            None if one is None else function(one.detach()).requires_grad_(one.requires_grad)
            for one in layer
        )
        return Given(*changed, self.target)


def drawn(
    rows: Sequence[int],
    classes: int,
    dtype: torch.dtype = torch.float32,
    *,
    width: int = 16,
    biased: bool = True,
    device: str = "cpu",
) -> Given:
    """Some rows are ignored; scores are as far apart as those of a trained model."""
    torch.manual_seed(0)
    with torch.device(device):
        x, weight, bias = (torch.randn(*n) for n in ((*rows, width), (classes, width), (classes,)))
        target = torch.randint(classes, tuple(rows))
        target.view(-1)[1::7] = IGNORED
    layer = [one.to(dtype).requires_grad_() for one in (x, 0.5 * weight, bias)]
    return Given(*layer[:2], layer[2] if biased else None, target)


def exact(given: Given, **options: Any) -> tuple[Tensor, ...]:
    wide = given.map(Tensor.double)
    scores = F.linear(*wide[:3]).flatten(0, -2)
    loss = F.cross_entropy(scores, wide.target.flatten(), **options)
    return loss.detach(), *torch.autograd.grad(loss, wide.trained)


def assert_is_exact(given: Given, **options: Any) -> None:
    loss = linear_cross_entropy(*given, **options)
    found = (loss, *torch.autograd.grad(loss, given.trained))
    for mine, theirs in zip(found, exact(given, **options), strict=True):
        assert_matches(mine, theirs, tolerance(given.input.dtype, order=1))


def assert_loses_no_more_than_eager(given: Given, scale: float) -> None:
    """Of float16: entries that round to nothing, and those beyond what it holds. Scores are so far
    apart that most probabilities are small, and weights so large that the input's gradient is."""
    given = given.map(lambda one: one * 4 if one.dim() > 1 else one)
    scores = F.linear(*given[:3]).flatten(0, -2).float()  # as under autocast
    loss = F.cross_entropy(scores, given.target.flatten())
    eager = torch.autograd.grad(loss * scale, given.trained)
    found = torch.autograd.grad(linear_cross_entropy(*given) * scale, given.trained)
    numbers, lost, lost_by_eager = torch.finfo(torch.float16), 0, 0
    for mine, theirs, exactly in zip(found, eager, exact(given)[1:], strict=True):
        is_there = scale * exactly.abs() >= numbers.tiny * numbers.eps
        lost += int((is_there & (mine == 0)).sum())
        lost_by_eager += int((is_there & (theirs == 0)).sum())
        assert (mine.isfinite() | (theirs.abs() > 0.99 * numbers.max)).all()
        assert mine.isfinite().all() or not theirs.isfinite().all()
    assert lost <= lost_by_eager
