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
