"""torch's question whether cuDNN takes a CTC loss, answered for tensors without numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from ecornn.ctc import cudnn_may_take, made_by_cudnn

FRAMES, BATCH, CLASSES = 20, 3, 6


@pytest.fixture(autouse=True)
def _has_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)


def fake(
    *shape: int, dtype: torch.dtype = torch.int32, device: str = "cuda", every: int = 1
) -> Any:
    """`every`: how far entries are apart."""
    strides = [every * size for size in torch.empty(shape, device="meta").stride()]
    with FakeTensorMode():
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def given(**other: Any) -> dict[str, Any]:
    """What cuDNN takes, but for what is said otherwise."""
    plain = {
        "log_probs": fake(FRAMES, BATCH, CLASSES, dtype=torch.float32),
        "targets": fake(9),
        "frames": fake(BATCH),
        "texts": fake(BATCH),
        "blank": 0,
    }
    return plain | other


def numbers(frames: Any = (FRAMES,) * BATCH, texts: Any = (4, 2, 3)) -> dict[str, Any]:
    return given(frames=list(frames), texts=list(texts), targets=fake(9, device="cpu"))


@pytest.mark.parametrize(
    "asked",
    [
        given(),
        given(targets=fake(9, device="cpu")),
        numbers(),
        numbers(texts=(0, 20, 20)),
    ],
)
def test_what_cudnn_takes(asked: dict[str, Any]) -> None:
    assert cudnn_may_take(**asked)
    with torch.backends.cudnn.flags(enabled=False):
        assert not cudnn_may_take(**asked)


@pytest.mark.parametrize(
    "asked",
    [
        given(blank=1),
        given(targets=fake(BATCH, 3)),
        given(targets=fake(9, dtype=torch.int64)),
        given(targets=fake(9, every=2)),
        given(frames=fake(BATCH, dtype=torch.int64)),
        given(texts=fake(BATCH, dtype=torch.int64)),
        given(log_probs=fake(FRAMES, BATCH, CLASSES, dtype=torch.float64)),
        given(log_probs=fake(FRAMES, BATCH, CLASSES, dtype=torch.float32, device="cpu")),
        given(log_probs=fake(FRAMES, CLASSES, dtype=torch.float32)),
        numbers(frames=(FRAMES, FRAMES - 1, FRAMES)),
        numbers(texts=(4, FRAMES + 1, 3)),
        {**numbers(), "targets": fake(9)},
        {
            **numbers(frames=(300,) * BATCH, texts=(4, 256, 3)),
            "log_probs": fake(300, BATCH, CLASSES, dtype=torch.float32),
        },
    ],
)
def test_what_torch_keeps_for_itself(asked: dict[str, Any]) -> None:
    assert not cudnn_may_take(**asked)


def test_without_cudnn_it_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    assert not cudnn_may_take(**given())


def test_the_gradient_is_made_in_one_piece_with_the_loss() -> None:
    scores = torch.empty(BATCH, FRAMES, CLASSES, device="meta").transpose(0, 1)
    losses, gradient = made_by_cudnn(scores)
    assert losses.shape == (BATCH,)
    assert gradient.shape == scores.shape
    assert gradient.is_contiguous()
