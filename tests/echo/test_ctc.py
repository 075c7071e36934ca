"""The CTC loss of cuDNN and of torch itself, told without numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn import functional as F

import ecornn
from ecornn.bench.models.speech import CTCLoss, joined
from ecornn.bench.models.step import Step, make_step
from ecornn.bench.training.memory import allocated_peak
from ecornn.echo import ctc, cudnn
from ecornn.echo.cudnn import BLOCK, SHORT, AskedLoss, room_of_ctc
from ecornn.echo.graph import NotUnderstood
from ecornn.echo.lean.worth import Priced
from ecornn.echo.rehearse import Counted, ModelCall, rehearsed
from support.cudnn_ctc import losses_and_gradient

FRAMES, BATCH, CLASSES, LABELS = 20, 3, 6, 4
SCORES = FRAMES * BATCH * CLASSES * 4


def labels(device: str, *, padded: bool = False) -> tuple[Tensor, Tensor]:
    """And their lengths."""
    if padded:
        made = torch.empty(BATCH, LABELS, dtype=torch.int64, device=device)
        return made, torch.empty(BATCH, dtype=torch.int64, device=device)
    made = torch.empty(BATCH * LABELS, dtype=torch.int32, device=device)
    return made, torch.empty(BATCH, dtype=torch.int32, device=device)


@pytest.fixture
def has_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)


@pytest.mark.usefixtures("has_cudnn")
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("direct", [False, True])
def test_it_is_counted_dry(padded: bool, direct: bool) -> None:
    """Nothing is run on a GPU for that: none is here."""
    mode = Priced()
    with mode, torch.no_grad():
        scores = torch.empty(FRAMES, BATCH, CLASSES, device="cuda")
        texts, lengths = labels("cuda", padded=padded)
        if direct:
            loss = CTCLoss()(scores, texts, lengths)
        else:
            loss = F.ctc_loss(scores, texts, torch.full_like(lengths, FRAMES), lengths)
    assert (loss.shape, loss.device.type) == ((), "cuda")
    assert mode.shares.seconds > 0


@pytest.mark.usefixtures("has_cudnn")
def test_bytes_are_not_foretold_where_lengths_decide_whose_loss_it_is() -> None:
    with Counted("cuda"), torch.no_grad():
        scores = torch.empty(FRAMES, BATCH, CLASSES, device="cuda")
        texts, lengths = labels("cuda")
        with pytest.raises(NotUnderstood, match="how long its texts are"):
            F.ctc_loss(scores, texts, lengths, lengths)
        texts, lengths = labels("cuda", padded=True)
        assert F.ctc_loss(scores, texts, lengths, lengths).shape == ()


def test_lengths_on_the_host_have_a_workspace_that_nobody_asked_for() -> None:
    with Counted("cpu"):
        scores = torch.empty(FRAMES, BATCH, CLASSES)
        texts, _ = labels("cpu")
        with pytest.raises(NotUnderstood, match="lengths on the host"):
            torch._cudnn_ctc_loss(scores, texts, [FRAMES] * BATCH, [1] * BATCH, 0, True, False)


def test_its_workspace_and_what_the_backward_pass_reads_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gradient is made with the loss; the backward pass multiplies it, into another."""
    monkeypatch.setattr(ctc, "room_of_ctc", lambda scores, deterministic: 70_000)
    mode = Counted("cpu")
    with mode:
        texts, lengths = labels("cpu")
        scores = torch.empty(FRAMES, BATCH, CLASSES, requires_grad=True)
        before = mode.ledger.now
        loss = CTCLoss()(scores, texts, lengths)
        assert mode.ledger.now == before + SCORES + 4 * BATCH + loss.nbytes
        assert mode.ledger.most == before + SCORES + 8 * BATCH + 70_000
        mode.ledger.most = 0
        loss.backward()
        assert scores.grad is not None
        # the losses, their mean and both gradients are there beside
        assert mode.ledger.most == before + 2 * SCORES + 2 * (4 * BATCH + loss.nbytes)


class PretendedCudnn:
    """Takes what cuDNN's loss takes."""

    asked_for = 0

    def take(self, *shape: int) -> Tensor:
        made = torch.zeros(shape)
        self.asked_for += made.nbytes
        return made

    def _cudnn_ctc_loss(self, scores: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        losses, _ = losses_and_gradient(scores, *rest)  # refuses what cuDNN cannot take
        self.take(256 + scores.shape[0] * scores.shape[1] * 511)  # a workspace
        return self.take(*losses.shape), self.take(*scores.shape)


def test_its_workspace_at_a_length_follows_from_two(monkeypatch: pytest.MonkeyPatch) -> None:
    pretended = PretendedCudnn()
    monkeypatch.setattr(cudnn, "aten", pretended)
    monkeypatch.setattr(cudnn, "asked_for", lambda _: pretended.asked_for)
    asked = AskedLoss(BATCH, CLASSES, True, torch.device("cpu"))
    found = [cudnn.measured_loss(asked, frames) for frames in SHORT]
    assert found == [(256 + frames * BATCH * 511) * 4 for frames in SHORT]
    monkeypatch.setattr(cudnn, "_KNOWN_LOSSES", {asked: tuple(found)})
    exactly = (256 + 500 * BATCH * 511) * 4
    assert 0 <= room_of_ctc(torch.empty(500, BATCH, CLASSES), True) - exactly < BLOCK


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is measured there")
def test_without_a_gpu_its_workspace_is_not_guessed() -> None:
    texts, lengths = torch.ones(BATCH * LABELS).int(), torch.ones(BATCH).int()
    given = torch.randn(FRAMES, BATCH, CLASSES), texts, lengths
    call = ModelCall.of(given, {}, torch.device("cpu"))
    assert call is not None
    with pytest.raises(NotUnderstood, match="takes for a CTC loss is measured on a GPU"):
        rehearsed(CTCLoss(), call, {}, None)


class Scaled(torch.autograd.Function):
    """As torch's derivative of `_cudnn_ctc_loss`."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        losses, gradient = losses_and_gradient(*args)
        ctx.save_for_backward(losses, gradient)
        ctx.mark_non_differentiable(gradient)
        ctx.set_materialize_grads(False)
        return losses, gradient

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> Any:
        _, gradient = ctx.saved_tensors
        return gradient * arriving[0][None, :, None], *[None] * 6


def test_a_divided_model_with_it_is_counted_dry_and_rehearsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch's own loss stands in for cuDNN's where there are numbers: no mode does, as torch would
    compile nothing under one."""
    operator = torch._cudnn_ctc_loss

    def either(scores: Tensor, *rest: Any, **named: Any) -> Any:
        if isinstance(scores, FakeTensor):
            return operator(scores, *rest, **named)
        return Scaled.apply(scores, *rest, *named.values())

    monkeypatch.setattr(torch, "_cudnn_ctc_loss", either)
    room = room_of_the_stand_in(as_on_a_gpu())
    monkeypatch.setattr(ctc, "room_of_ctc", lambda scores, deterministic: room)
    torch._dynamo.reset()
    with torch.backends.mkldnn.flags(enabled=True):
        step, plain = (as_on_a_gpu() for _ in range(2))
        step.run = ecornn.compile(step.model, codegen="eager")
        for one in (step, plain):
            one.clear()
        losses = step.passes(), plain.passes()
        torch.testing.assert_close(*losses)
        for ours, theirs in zip(step.model.parameters(), plain.model.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
        explained = step.run.explain()
        assert "first call ran without Echo" not in str(explained)
        step.clear()
        peak = allocated_peak(lambda: step.loss().backward())
        assert explained.predicted_peak_bytes(held=0) == peak
    torch._dynamo.reset()


def room_of_the_stand_in(step: Step) -> int:
    _, texts, lengths = step.batch
    scores = torch.randn(20, 16, 29)
    given = scores, texts, torch.full_like(lengths, 20), lengths, 0, True, False
    made: list[Tensor] = []
    peak = allocated_peak(lambda: made.extend(losses_and_gradient(*given)))
    return peak - sum(one.nbytes for one in made)


def as_on_a_gpu() -> Step:
    step = make_step("speech", size="tiny", device="cpu", batch=16)
    sound, texts, lengths = step.batch
    step.batch = sound, joined(texts, lengths), lengths.int()
    return step
