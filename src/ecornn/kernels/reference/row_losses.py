"""The cross entropy of rows of scores, and their gradient in their place: the definition.

Shape suffixes: R rows, W classes and what fills up a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """What rows of scores are. `classes`: so many of their entries, the others fill them up and are
    -∞. `smoothing`: of labels. `factor`: by which gradients are multiplied before they are
    rounded."""

    classes: int
    smoothing: float = 0.0
    factor: float = 1.0


def row_losses(scores_RW: Tensor, target_R: Tensor, losses_R: Tensor, rows: Rows) -> None:
    """Fill `losses_R` with the loss of each row, and `scores_RW` with the gradients of these. Rows
    whose target is below zero do not count: both are zeros. Computed in the losses' numbers."""
    classes, smoothing, factor = rows
    wide_RW = scores_RW.to(losses_R.dtype)  # the same if they are
    ignored_R1 = target_R.unsqueeze(1) < 0
    target_R1 = target_R.unsqueeze(1).clamp(min=0)
    largest_R1, at_R1 = wide_RW.max(1, keepdim=True)
    score_R1 = wide_RW[:, :classes].gather(1, target_R1)  # raises where there is no such class
    below_R1 = None
    if smoothing:
        wide_RW -= largest_R1  # which changes no softmax
        below_R1 = wide_RW[:, :classes].sum(1, keepdim=True)
    torch.softmax(wide_RW, 1, out=wide_RW)
    # of the sum of what scores are below the largest: nothing is lost of small losses to it
    log_sum_R1 = -wide_RW.gather(1, at_R1).log()
    loss_R1 = (largest_R1 - score_R1) + log_sum_R1
    # small where the model is right: a difference of rounded numbers would be none
    of_target_R1 = torch.expm1(-loss_R1)
    if below_R1 is not None:
        even_R1 = log_sum_R1 - below_R1 / classes
        loss_R1 = (1 - smoothing) * loss_R1 + smoothing * even_R1
        wide_RW[:, :classes].sub_(smoothing / classes)
        of_target_R1 += smoothing - smoothing / classes
    # into all of a row: of a part CUDA makes a copy, where algorithms have to be deterministic
    wide_RW.scatter_(1, target_R1, of_target_R1)
    if factor != 1:
        wide_RW *= factor
    wide_RW.masked_fill_(ignored_R1, 0)
    if scores_RW is not wide_RW:
        scores_RW.copy_(wide_RW)
    losses_R.copy_(loss_R1.masked_fill(ignored_R1, 0).squeeze(1))
