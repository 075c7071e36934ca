"""The speech model's CTC loss by cuDNN: its numbers, in a CUDA graph, and the memory it takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import ecornn
from ecornn.bench.calls import capture
from ecornn.bench.models import speech
from ecornn.bench.models.speech import CTCLoss, joined
from ecornn.bench.models.step import Step
from ecornn.bench.models.tasks import SPEECH
from ecornn.bench.training.accuracy import BOUNDS, bound, compare_with_eager, difference, ieee
from ecornn.bench.training.memory import collect
from ecornn.echo.cudnn import BLOCK, asked_for, room_of_ctc
from ecornn.echo.rehearse import ModelCall, rehearsed
from ecornn.profiler import profile

CUDA = torch.device("cuda", 0)
#: 300 frames reach the loss: more than the 255 that `F.ctc_loss` lets through in a capture.
SIZE = replace(SPEECH.tiny, frames=600, labels=40)
SEED = 11


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()
    with ieee(CUDA):
        yield


def made() -> Step:
    return Step(SPEECH, SIZE, 4, CUDA, capturable=True)


def drawn(frames: int, longest: int, batch: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, padded labels and lengths, the longest of which fills its row."""
    draws = torch.Generator().manual_seed(frames)
    scores = torch.randn(frames, batch, 29, generator=draws)
    labels = torch.randint(1, 29, (batch, longest), generator=draws)
    lengths = torch.randint(1, longest + 1, (batch,), generator=draws)
    lengths[1] = longest
    return scores, labels, lengths


def loss_and_gradient(scores: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
    leaf = scores.clone().requires_grad_()
    loss = CTCLoss()(leaf.log_softmax(-1), *given)
    loss.backward()
    assert leaf.grad is not None
    return loss.detach().cpu(), leaf.grad.cpu()


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_cudnn_s_is_what_runs() -> None:
    """And torch says that cuDNN takes such a batch: nothing but asking it is left out."""
    step = made()
    with Operators() as ran:
        step.passes()
    assert "_cudnn_ctc_loss" in ran.names
    assert "_ctc_loss" not in ran.names
    _, labels, lengths = step.batch
    scores = torch.randn(300, 4, 29, device=CUDA)
    frames = torch.full_like(lengths, 300)
    assert torch._use_cudnn_ctc_loss(scores, labels, frames, lengths, speech.BLANK)


@pytest.mark.parametrize(("frames", "longest"), [(20, 6), (300, 40), (500, 140), (600, 255)])
def test_loss_and_gradient_are_those_of_float64(frames: int, longest: int) -> None:
    """Rounding grows with the frames: torch's own loss in float32 is 5e-4 off for 500."""
    scores, labels, lengths = drawn(frames, longest)
    expected = loss_and_gradient(scores.double(), labels, lengths)
    own = loss_and_gradient(scores, labels, lengths)
    given = joined(labels, lengths).cuda(), lengths.int().cuda()
    found = loss_and_gradient(scores.cuda(), *given)
    assert difference(found[0], expected[0]) < 1e-5
    ours, theirs = (difference(one, expected[1]) for one in (found[1], own[1]))
    assert ours < 4 * theirs, (ours, theirs)
    again = loss_and_gradient(scores.cuda(), *given)
    assert all(map(torch.equal, found, again)), "the algorithm is the reproducible one"


@pytest.mark.parametrize("contender", ["eager", "echo", "echo memory=min"])
def test_a_replayed_step_is_the_plain_one(contender: str) -> None:
    """Also with other sounds and texts in the place of those that were captured."""
    step, plain = made(), made()
    if contender != "eager":
        memory = "min" if "min" in contender else "auto"
        step.run = ecornn.compile(step.model, memory=memory, codegen="eager")

    def count_from_here() -> None:
        step.clear()
        collect(CUDA)

    step()
    graph, loss = capture(step, count_from_here)

    def replay() -> Tensor:
        graph.replay()
        captured: Tensor = loss
        return captured

    traced = contender != "eager"  # compiled batch norms are torch's own, eager's are cuDNN's
    found = compare_with_eager(step, plain, SEED, replay, as_traced=traced)
    assert found.error < bound(step), found.where
    other = speech.make_batch(SIZE, 4, torch.Generator(CUDA).manual_seed(5))
    assert not torch.equal(other[2], step.batch[2])
    for place, value in zip(step.batch, other, strict=True):
        place.copy_(value)
    plain.batch = other
    found = compare_with_eager(step, plain, SEED, replay, as_traced=traced)
    assert found.error < bound(step), found.where
    torch.cuda.synchronize()


@pytest.mark.parametrize(("frames", "batch"), [(500, 32), (123, 7), (300, 1)])
def test_its_workspace_grows_by_the_frame(frames: int, batch: int) -> None:
    scores, labels, lengths = drawn(frames, 40, batch=max(batch, 2))
    scores = scores[:, :batch].contiguous().cuda()
    given = (
        joined(labels[:batch], lengths[:batch]).cuda(),
        *(torch.full((batch,), n, dtype=torch.int32, device=CUDA) for n in (frames, 1)),
    )
    room = room_of_ctc(scores, deterministic=True)
    before = asked_for(CUDA)
    results = torch._cudnn_ctc_loss(scores, *given, 0, True, False)
    taken = asked_for(CUDA) - before - sum(one.nbytes for one in results)
    assert room == pytest.approx(taken, rel=0.02, abs=BLOCK)


class Scores(nn.Module):
    """A loss that is nearly all of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(64, 29)
        self.loss = CTCLoss()

    def forward(self, x: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        loss: Tensor = self.loss(self.output(x).log_softmax(-1), labels, lengths)
        return loss


@pytest.mark.parametrize("padded", [False, True], ids=["cuDNN's", "torch's own"])
def test_both_passes_of_it_are_foretold(padded: bool) -> None:
    _, labels, lengths = drawn(500, 140, batch=32)
    x = torch.randn(500, 32, 64, device=CUDA)
    given = labels.cuda(), lengths.cuda()
    if not padded:
        given = joined(*given), given[1].int()
    model = Scores().cuda()
    call = ModelCall.of((x, *given), {}, CUDA)
    assert call is not None

    def passes() -> None:
        model(x, *given).backward()
        model.zero_grad()

    passes()  # what libraries take once
    collect(CUDA)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    passes()
    peak = torch.cuda.max_memory_allocated() - before
    assert rehearsed(model, call, {}, None) == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize("operators", [False, True])
def test_a_profile_of_it(operators: bool) -> None:
    step = made()
    for _ in range(2):
        step()
    step.clear()
    collect(CUDA)
    torch.cuda.reset_peak_memory_stats()
    step()
    peak = torch.cuda.max_memory_allocated()
    step.clear()
    report = profile(step, step.model, step.optimizer, operators=operators)
    assert report.peak_bytes == pytest.approx(peak, rel=0.01)
    if operators:
        kept = [one for one in report.held if one.operator == "aten._cudnn_ctc_loss"]
        assert (300, 4, 29) in {one.shape for one in kept}


def test_native_labels_still_take_torch_s_own() -> None:
    scores, labels, lengths = drawn(300, 40)
    own = F.ctc_loss(scores.log_softmax(-1), labels, torch.full((5,), 300), lengths)
    found, _ = loss_and_gradient(scores.cuda(), labels.cuda(), lengths.cuda())
    assert difference(found, own) < BOUNDS["ieee"]
