"""An output layer and its cross entropy in one operator, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.support.output_layers import (
    SCALES,
    assert_is_exact,
    assert_loses_no_more_than_eager,
    drawn,
)

from ecornn.bench.calls import capture
from ecornn.kernels import row_losses
from ecornn.ops import linear_cross_entropy as module
from ecornn.ops.linear_cross_entropy import ROWS_ALIGNED, linear_cross_entropy, scratch_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = (5, 200)


@pytest.fixture(autouse=True)
def _ieee() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [7, 1000, 1001, 50_257])
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_loss_and_gradients(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    classes: int,
    biased: bool,
    label_smoothing: float,
) -> None:
    """Rows that are whole vectors and rows that are filled up; in several chunks."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 3 * ROWS_ALIGNED * classes * 2)
    given = drawn(ROWS, classes, dtype, biased=biased, width=64, device="cuda")
    assert_is_exact(given, label_smoothing=label_smoothing)


@pytest.mark.parametrize("scale", SCALES)
def test_float16_loses_no_more_than_eager_does(scale: float) -> None:
    given = drawn(ROWS, 1001, torch.float16, device="cuda")
    assert_loses_no_more_than_eager(given, scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [20_000, 20_001])
def test_its_scratch_is_what_it_says(dtype: torch.dtype, classes: int) -> None:
    given = drawn((4096,), classes, dtype, width=256, device="cuda")
    linear_cross_entropy(*given)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = linear_cross_entropy(*given)
    torch.cuda.synchronize()
    most, kept = torch.cuda.max_memory_allocated() - held, torch.cuda.memory_allocated() - held
    assert most == pytest.approx(kept + scratch_of(4096, given.weight, dtype), rel=0.05)
    assert loss.isfinite()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.filterwarnings("error:the kernel of an output layer")
def test_the_kernel_makes_the_losses(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Not torch's operators, which would do where it cannot be loaded."""

    def never(*_: object) -> None:
        raise AssertionError("torch's operators were asked")

    monkeypatch.setattr(row_losses, "by_torch", never)
    assert linear_cross_entropy(*drawn(ROWS, 1001, dtype, device="cuda")).isfinite()


def test_captured() -> None:
    given = drawn(ROWS, 1001, width=64, device="cuda")
    expected = [
        one.clone() for one in torch.autograd.grad(linear_cross_entropy(*given), given.trained)
    ]
    found: list[torch.Tensor] = []

    def step() -> torch.Tensor:
        loss = linear_cross_entropy(*given)
        found[:] = torch.autograd.grad(loss, given.trained)
        return loss

    graph, _ = capture(step)
    for one in found:
        one.fill_(float("nan"))
    graph.replay()
    torch.testing.assert_close(found, expected)
