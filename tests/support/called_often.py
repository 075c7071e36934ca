"""Models with a part that is called often, and whether the weights' gradients of its calls were
really added up (`weight_sums.py`) before autograd had them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ecornn.echo.weight_sums import WeightSums

WIDTH, WORDS = 6, 9


class Step(nn.Module):
    """Weights of all kinds: of products, small ones, and a table that is neither."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.inwards, self.across = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, word: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.inwards(x) + self.across(h) + self.table(word)))


class Speaker(nn.Module):
    """States, one for each step; detached after each step of `cut`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.step = nn.Linear(WIDTH, WIDTH), Step()

    def forward(self, x_TBH: Tensor, cut: tuple[int, ...] = ()) -> list[Tensor]:
        h, states = torch.tanh(self.first(x_TBH.mean(0))), []
        for t, x in enumerate(x_TBH):
            word = (torch.arange(len(x)) * 5 + t * 7) % WORDS
            h = self.step(x, word, h)
            states.append(h)
            if t in cut:
                h = h.detach()
        return states


@dataclass
class Seen:
    """`passes`: sums that were begun. `calls`: backward passes of calls that were added to them."""

    passes: int = 0
    common: int = 0  # of which: with inputs that their calls have in common
    calls: int = 0
    largest: int = 0  # of those that have waited to be made one


@contextmanager
def watched() -> Iterator[Seen]:
    seen = Seen()
    begun, add = WeightSums._begun, WeightSums._add

    def begin(self: Any, *args: Any) -> Any:
        found = begun(self, *args)
        seen.passes += found is not None
        seen.common += found is not None and found.common
        return found

    def count(self: Any, under_way: Any, returned: Any) -> None:
        seen.calls += 1
        add(self, under_way, returned)
        seen.largest = max(seen.largest, len(under_way.calls))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightSums, "_begun", begin)
        patch.setattr(WeightSums, "_add", count)
        yield seen


@contextmanager
def in_any_order(small_bytes: int = 8 * WIDTH) -> Iterator[None]:
    """What is compiled here makes gradients of many calls at once, as inductor's code does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ecornn.echo.backend.adds_in_any_order", lambda codegen: True)
        patch.setattr("ecornn.echo.weight_products.LARGEST_FACTORS", 1e9)
        patch.setattr("ecornn.echo.weight_products.SMALL_BYTES", small_bytes)
        yield


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def same(found: Any, expected: Any, *, bits: bool) -> None:
    """Of two lists of tensors, or of None."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) is (other is None)
        if one is not None:
            rtol, atol = (0.0, 0.0) if bits else (1e-10, 1e-12)
            torch.testing.assert_close(one, other, rtol=rtol, atol=atol, equal_nan=False)
