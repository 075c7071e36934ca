"""Sums of rows with one entry, written as that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_function
from torch._inductor.decomposition import select_decomp_table
from torch.utils._pytree import tree_leaves

import ecornn
from ecornn.echo.single_sums import without_single_sums

pytestmark = pytest.mark.usefixtures("fresh_compiler")

ROWS, CLASSES = 6, 5
IGNORED = -100


class _Traced(BaseException):
    pass


def traced(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[fx.GraphModule, list[Any]]:
    """Its joint graph, as inductor's tables have it, and that graph's inputs but the last."""
    found: list[Any] = []

    def partition(joint: fx.GraphModule, given: Any, **_: Any) -> Any:
        found.append(joint)
        raise _Traced

    def never(*_: Any) -> Any:
        raise AssertionError("nothing is compiled")

    run = aot_function(function, never, never, partition, decompositions=select_decomp_table())
    with pytest.raises(_Traced):
        run(*inputs)
    return found[0], list(inputs)


def scores_and_targets() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    targets = torch.randint(CLASSES, (ROWS,))
    targets[2] = IGNORED
    return torch.randn(ROWS, CLASSES, requires_grad=True), targets


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("arriving", [1.0, float("inf"), float("nan")])
def test_gradients_of_a_cross_entropy_stay_what_they_are(reduction: str, arriving: float) -> None:
    scores, targets = scores_and_targets()

    def loss(scores: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(scores, targets, reduction=reduction)

    joint, inputs = traced(loss, scores, targets)
    tangent = torch.full_like(loss(scores, targets), arriving)
    expected, gradient, _ = tree_leaves(joint(inputs, [tangent]))
    if arriving == 1.0:  # of others torch's own graph is not what eager makes of them
        (eager,) = torch.autograd.grad(loss(scores, targets), scores, tangent)
        torch.testing.assert_close(gradient, eager)
    assert without_single_sums(joint) == 1
    assert without_single_sums(joint) == 0
    # targets have no gradient
    found, changed, none = tree_leaves(joint(inputs, [tangent]))
    assert none is None
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(changed, gradient, equal_nan=True)


def smoothed(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores, targets, label_smoothing=0.1)


def weighted(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores, targets, torch.arange(1.0, CLASSES + 1))


@pytest.mark.parametrize("loss", [smoothed, weighted])
def test_other_gradients_are_left_alone(loss: Callable[..., Tensor]) -> None:
    joint, _ = traced(loss, *scores_and_targets())
    assert without_single_sums(joint) == 0


def test_rows_that_somebody_wrote_may_have_no_entry() -> None:
    """A class that does not exist has none."""

    def by_hand(scores: Tensor, targets: Tensor) -> Tensor:
        marks = torch.arange(CLASSES) == targets[:, None]
        rows = torch.where(marks, -1.0, 0.0) * scores.mean(1, keepdim=True)
        return (rows - scores * rows.sum(1, keepdim=True)).square().sum()

    scores, targets = scores_and_targets()
    joint, _ = traced(by_hand, scores, targets)
    assert without_single_sums(joint) == 0


class Words(nn.Module):
    """Of which inductor held the rows beside the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(5000, 8), nn.Linear(8, 5000)
        self.output.weight = self.embedding.weight
        self.rnn = ecornn.LSTM(8, 8, backend="reference")
        self.dropout = nn.Dropout(0.5)

    def forward(self, words_TB: Tensor) -> Tensor:
        hidden = self.dropout(self.rnn(self.dropout(self.embedding(words_TB[:-1])))[0])
        return F.cross_entropy(self.output(hidden).flatten(0, 1), words_TB[1:].flatten())


def test_generated_code_overwrites_the_scores() -> None:
    model, words = Words(), torch.randint(5000, (11, 8))
    run = ecornn.compile(model, codegen="inductor", lean=False)
    run(words).backward()
    scores = 80 * 5000 * 4
    held = sum(weight.nbytes for weight in model.parameters())
    assert run.explain().predicted_peak_bytes(held) - held < 1.9 * scores
    assert "sums of rows with one entry that are written as that: 1" in str(run.explain())
