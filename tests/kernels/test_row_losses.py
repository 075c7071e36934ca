"""The losses of rows of scores with their gradients: the definition against torch's cross entropy
in float64, and the kernel's source, run on a CPU, against both."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.tolerances import assert_matches, tolerance
from torch import Tensor

from ecornn.kernels import row_losses as module
from ecornn.kernels.jit.key import SOURCES
from ecornn.kernels.persistent.tile import NUMBERS
from ecornn.kernels.reference.row_losses import Rows
from ecornn.kernels.reference.row_losses import row_losses as definition
from ecornn.kernels.row_losses import READ_AS, RowLossArguments, RowLossTile, reads, row_losses
from support.on_cpu import HERE, compiled, for_cpu, headers, unavailable

Made = Callable[[Tensor, Tensor, Tensor, Rows], None]

#: Those that the instructions of a GPU are written down for.
ON_CPU = (torch.float32, torch.bfloat16)
COUNT = 3
#: How many of the threads run on a CPU: as many as what they meet in needs.
MAIN = """
#include "cuda_on_cpu.h"
#define DTYPE {dtype}
#include "row_losses.cu"
extern "C" int run(const RowLossArguments* arguments) {{
  const uintptr_t none[4] = {{}};
  return launch(row_losses, arguments, Dim{{unsigned(arguments->rows), 1, 1}}, THREADS, CLUSTER,
                4 * WARPS, none, 0, 100.0);
}}
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[torch.dtype, Made]:
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    return {dtype: _on_cpu(dtype, tmp_path_factory.mktemp("row_losses")) for dtype in ON_CPU}


def _on_cpu(dtype: torch.dtype, folder: Path) -> Made:
    for name in ("exchange.cuh", "numbers.cuh", "row_losses.cu"):
        text = (SOURCES / name).read_text()
        if name == "row_losses.cu":
            declared = "extern __shared__ __align__(16) u8 shared[];"
            assert declared in text
            text = text.replace(declared, "")
        (folder / name).write_text(for_cpu(name, text))
    main = MAIN.format(dtype=NUMBERS.index(READ_AS[dtype]))
    (folder / "main.cpp").write_text(main)
    library = folder / "kernel.so"
    includes = (f"-I{headers(folder)}", f"-I{HERE}", f"-I{folder}")
    compiled("-shared", *includes, "-o", str(library), str(folder / "main.cpp"))
    run = ctypes.CDLL(str(library)).run

    def launch(scores_RW: Tensor, target_R: Tensor, losses_R: Tensor, rows: Rows) -> None:
        assert reads(scores_RW, target_R, losses_R)
        places = (tensor.data_ptr() for tensor in (scores_RW, target_R, losses_R))
        assert run(ctypes.byref(RowLossArguments(*places, *scores_RW.shape, *rows))) == 0

    return launch


def drawn(classes: int, width: int, dtype: torch.dtype, count: int = COUNT) -> tuple[Tensor, ...]:
    """Scores, filled up, and targets, one of which does not count."""
    generator = torch.Generator().manual_seed(classes)
    scores = torch.full((count, width), float("-inf"))
    scores[:, :classes] = torch.randn(count, classes, generator=generator) * 3
    target = torch.randint(classes, (count,), generator=generator)
    target[1] = -1
    return scores.to(dtype), target


def exact(scores: Tensor, target: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Losses and gradients in float64, by torch."""
    leaf = scores[:, : rows.classes].double().requires_grad_()
    options = {"ignore_index": -1, "label_smoothing": rows.smoothing, "reduction": "none"}
    losses = F.cross_entropy(leaf, target, **options)
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    filling = scores.shape[1] - rows.classes
    return losses.detach(), rows.factor * F.pad(gradient, (0, filling))


def assert_makes(
    make: Made, scores: Tensor, target: Tensor, rows: Rows, wide: torch.dtype = torch.float32
) -> None:
    expected = exact(scores, target, rows)
    losses = torch.full((len(scores),), float("nan"), dtype=wide)
    make(scores, target, losses, rows)
    assert_matches(losses, expected[0], tolerance(wide))
    assert_matches(scores, expected[1], tolerance(scores.dtype))
    assert not scores[target < 0].any()
    assert not scores[:, rows.classes :].any()


@pytest.mark.parametrize("dtype", [torch.float64, *READ_AS])
@pytest.mark.parametrize(("classes", "width"), [(1, 1), (37, 40), (1000, 1000)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_definition(dtype: torch.dtype, classes: int, width: int, smoothing: float) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rows = Rows(classes, smoothing, 2.0**15 if dtype == torch.float16 else 1.0)
    assert_makes(definition, *drawn(classes, width, dtype), rows, wide)  # type: ignore[misc]


@pytest.mark.parametrize("dtype", ON_CPU)
@pytest.mark.parametrize(
    ("classes", "width", "smoothing"),
    [(1, 8, 0.0), (37, 40, 0.1), (1000, 1000, 0.0), (9001, 9008, 0.1)],
)
def test_the_kernel(
    kernels: Any, dtype: torch.dtype, classes: int, width: int, smoothing: float
) -> None:
    """Fewer vectors than threads, and several for each."""
    scores, target = drawn(classes, width, dtype)
    assert_makes(kernels[dtype], scores, target, Rows(classes, smoothing, 4.0))


@pytest.mark.parametrize("dtype", ON_CPU)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_small_losses_of_large_scores(kernels: Any, dtype: torch.dtype, smoothing: float) -> None:
    for make in (definition, kernels[dtype]):
        scores, _ = drawn(40, 40, dtype)
        scores = (scores.float() * 2 + 1000).to(dtype)
        target = scores.argmax(1)
        scores[:, 0] += 30
        assert_makes(make, scores, target, Rows(40, smoothing))


@pytest.mark.parametrize("dtype", ON_CPU)
def test_numbers_that_are_none_stay_so(kernels: Any, dtype: torch.dtype) -> None:
    """As with torch: an infinite score, one that is no number, and nothing but -∞; and a class that
    is not possible."""
    for make in (definition, kernels[dtype]):
        scores, target = drawn(40, 40, dtype, count=6)
        scores[0, 3], scores[2, 7], scores[3] = float("inf"), float("nan"), float("-inf")
        scores[4, 5], target[4] = float("-inf"), 5
        scores[1, 2] = float("nan")  # of a row that does not count
        expected, _ = exact(scores, target, Rows(40))
        losses = torch.zeros(6)
        make(scores, target, losses, Rows(40))
        assert losses.isnan().tolist() == expected.isnan().tolist()
        assert losses[4] == expected[4] == float("inf")
        assert scores[2].isnan().any()
        assert scores[4].isfinite().all()
        assert not scores[1].any()


def test_where_no_kernel_reads_it_the_definition_does() -> None:
    for dtype, width in ((torch.float64, 40), (torch.float32, 37), (torch.float32, 40)):
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        scores, target = drawn(37, width, dtype)
        assert_makes(row_losses, scores, target, Rows(37), wide)


def test_what_the_kernel_reads() -> None:
    losses, target = torch.empty(3), torch.zeros(3, dtype=torch.int64)
    assert reads(torch.empty(3, 8), target, losses)
    assert not reads(torch.empty(3, 7), target, losses)
    assert not reads(torch.empty(3, 8).double(), target, losses.double())
    assert not reads(torch.empty(8, 3).t(), target, losses)
    assert not reads(torch.empty(25)[1:].view(3, 8), target, losses)
    assert not reads(torch.empty(0, 8), target[:0], losses[:0])
    assert not module.is_served(torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("old", [None, "too old"])
def test_where_it_serves(old: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the operator takes is foretold by it: on a GPU that is too old torch's operators run."""
    monkeypatch.setattr(module, "unavailable", lambda: None)
    monkeypatch.setattr(module, "too_old", lambda: old)
    assert module.is_served(torch.bfloat16, torch.device("cuda")) is (old is None)
    assert not module.is_served(torch.float64, torch.device("cuda"))


def test_its_threads_are_those_of_the_source() -> None:
    text = Path(SOURCES / "row_losses.cu").read_text()
    assert f"THREADS = {RowLossTile('bf16').threads};" in text
    assert RowLossTile("bf16").shared_bytes == 4 * RowLossTile("bf16").threads // 32
