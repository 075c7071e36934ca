"""The speech model's loss by cuDNN's operator, of which another stands in for the GPU's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ecornn.bench.models.speech import LONGEST_TEXT, CTCLoss, joined
from ecornn.bench.models.step import Step, make_step
from support.cudnn_ctc import CudnnOnTheCpu


def texts(batch: int = 5, longest: int = 7, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Zero is the label of nothing: no text has it."""
    draws = torch.Generator().manual_seed(seed)
    labels_BL = torch.randint(1, 29, (batch, longest), generator=draws)
    lengths_B = torch.randint(1, longest + 1, (batch,), generator=draws)
    return labels_BL, lengths_B


def as_on_a_gpu(step: Step) -> Step:
    sound, labels, lengths = step.batch
    step.batch = sound, joined(labels, lengths), lengths.int()
    return step


@pytest.mark.parametrize(("batch", "longest"), [(1, 1), (5, 7), (3, LONGEST_TEXT)])
def test_texts_lie_one_behind_the_other(batch: int, longest: int) -> None:
    labels_BL, lengths_B = texts(batch, longest)
    found = joined(labels_BL, lengths_B)
    rows = zip(labels_BL.tolist(), lengths_B.tolist(), strict=True)
    expected = [label for row, length in rows for label in row[:length]]
    assert found[: len(expected)].tolist() == expected
    assert (found.shape, found.dtype) == ((batch * longest,), torch.int32)
    assert found.is_contiguous()


def test_a_text_that_cudnn_does_not_take_is_refused() -> None:
    with pytest.raises(ValueError, match="256 labels: cuDNN's CTC loss takes 255"):
        joined(*texts(2, LONGEST_TEXT + 1))


def test_the_loss_is_torch_s() -> None:
    """The mean over texts of unequal lengths, and the gradient that reaches the scores."""
    labels, lengths = texts()
    found: list[Tensor] = []
    scores = torch.randn(20, 5, 29)
    with CudnnOnTheCpu() as cudnn:
        for given in ((labels, lengths), (joined(labels, lengths), lengths.int())):
            leaf = scores.clone().requires_grad_()
            loss = CTCLoss()(leaf.log_softmax(-1), *given)
            loss.backward()
            assert leaf.grad is not None
            found += [loss.detach(), leaf.grad]
    assert cudnn.calls == 1
    own = F.ctc_loss(scores.log_softmax(-1), labels, torch.full((5,), 20), lengths)
    torch.testing.assert_close(found[0], own)
    torch.testing.assert_close(found[2], found[0])
    torch.testing.assert_close(found[3], found[1])


def test_a_step_of_the_model_is_the_same_for_both_forms_of_labels() -> None:
    padded = make_step("speech", size="tiny", device="cpu")
    other = as_on_a_gpu(make_step("speech", size="tiny", device="cpu"))
    assert padded.batch[1].dim() == 2, "of joined texts nobody knows the longest without numbers"
    with CudnnOnTheCpu() as cudnn:
        losses = padded.passes(), other.passes()
    assert cudnn.calls == 1
    torch.testing.assert_close(*losses)
    for one, two in zip(padded.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)
