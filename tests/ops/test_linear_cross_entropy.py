"""An output layer and its cross entropy in one operator, against torch's in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.output_layers import (
    IGNORED,
    SCALES,
    assert_is_exact,
    assert_loses_no_more_than_eager,
    drawn,
    exact,
)
from tests.support.tolerances import assert_matches, tolerance
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ecornn.bench.training.memory import allocated_peak, storage_bytes
from ecornn.errors import InvalidInput, NotDifferentiableTwice
from ecornn.ops import linear_cross_entropy as module
from ecornn.ops.linear_cross_entropy import (
    OPERATOR,
    ROWS_ALIGNED,
    linear_cross_entropy,
    row_bytes_of,
    rows_at_once,
    scratch_of,
)
from ecornn.ops.scratch import scratch_bytes

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
#: Several chunks, the last of them smaller.
ROWS, CLASSES = (7, 3 * ROWS_ALIGNED // 7 + 1), 37


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", ROWS_ALIGNED * CLASSES * 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_loss_and_gradients(
    dtype: torch.dtype, biased: bool, reduction: str, label_smoothing: float
) -> None:
    given = drawn(ROWS, CLASSES, dtype, biased=biased)
    assert_is_exact(given, reduction=reduction, label_smoothing=label_smoothing)


@pytest.mark.parametrize("rows", [(1,), (ROWS_ALIGNED,), (ROWS_ALIGNED + 1,), (2, 3, 5)])
@pytest.mark.parametrize("classes", [1, 2, 500])
def test_sizes(rows: tuple[int, ...], classes: int) -> None:
    assert_is_exact(drawn(rows, classes), reduction="sum")


def test_another_class_is_ignored() -> None:
    given = drawn(ROWS, CLASSES)
    given = given._replace(target=given.target.clamp(min=3))
    assert_is_exact(given, ignore_index=3)


def test_no_rows_at_all_and_none_that_count() -> None:
    given = drawn((0,), CLASSES)
    assert_is_exact(given, reduction="sum")
    assert linear_cross_entropy(*given).isnan()  # as torch's
    given = drawn(ROWS, CLASSES)
    given.target.fill_(IGNORED)
    for reduction in ("sum", "mean"):
        loss = linear_cross_entropy(*given, reduction=reduction)
        assert all(not one.any() for one in torch.autograd.grad(loss, given.trained))
        assert loss == 0 if reduction == "sum" else loss.isnan()


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_small_losses_of_large_scores(label_smoothing: float) -> None:
    given = drawn(ROWS, CLASSES)
    assert given.bias is not None
    with torch.no_grad():
        given.bias.add_(1e4)
        given.target.copy_(F.linear(*given[:3]).argmax(-1))
    # what rounding makes of the scores themselves is not the operator's
    scores = F.linear(*given[:3]).flatten(0, 1).double()
    expected = F.cross_entropy(scores, given.target.flatten(), label_smoothing=label_smoothing)
    found = linear_cross_entropy(*given, label_smoothing=label_smoothing)
    assert_matches(found, expected, tolerance(torch.float32))


def test_inputs_of_other_strides() -> None:
    given = drawn((64,), CLASSES)
    across = given.input.detach().t().contiguous().t().requires_grad_()
    assert not across.is_contiguous()
    assert_is_exact(given._replace(input=across))
    torch.library.opcheck(
        OPERATOR, (across, given.weight, None, given.target, IGNORED, 0.0, [True, True, False])
    )


@pytest.mark.parametrize("trained", [("input",), ("weight",), ("bias",), ("input", "weight")])
def test_gradients_that_are_not_asked_for_are_not_made(trained: tuple[str, ...]) -> None:
    given = drawn(ROWS, CLASSES)
    for name in ("input", "weight", "bias"):
        getattr(given, name).requires_grad_(name in trained)
    assert_is_exact(given)
    wanted = [name in trained for name in ("input", "weight", "bias")]
    made = OPERATOR(
        *given._replace(input=given.input.flatten(0, 1), target=given.target.flatten()),
        IGNORED,
        0.0,
        wanted,
    )[2:]
    assert [one.numel() > 0 for one in made] == wanted


def test_a_scale_that_16_bits_do_not_hold_arrives() -> None:
    given = drawn(ROWS, CLASSES, torch.float16)
    scale = 2.0**17
    found = torch.autograd.grad(linear_cross_entropy(*given) * scale, given.trained)
    for mine, theirs in zip(found, exact(given)[1:], strict=True):
        assert_matches(mine / scale, theirs, tolerance(torch.float16, order=1))


@pytest.mark.parametrize("scale", SCALES)
def test_float16_loses_no_more_than_eager_does(scale: float) -> None:
    assert_loses_no_more_than_eager(drawn(ROWS, 500, torch.float16), scale)


def test_a_model_that_is_sure_still_has_a_gradient_in_16_bits() -> None:
    """Of a probability near one, what is missing to one is what counts."""
    given = drawn((64,), 2, torch.bfloat16, biased=False)
    with torch.no_grad():
        given.target.copy_(F.linear(*given[:3]).argmax(1))
        given.input.mul_(2)
    assert_is_exact(given, reduction="sum")


def test_scores_in_other_numbers_than_the_input_s() -> None:
    given = drawn(ROWS, CLASSES)
    loss = linear_cross_entropy(*given, dtype=torch.bfloat16)
    found = torch.autograd.grad(loss, given.trained)
    assert {one.dtype for one in found} == {torch.float32}
    for mine, theirs in zip(found, exact(given)[1:], strict=True):
        assert_matches(mine, theirs, tolerance(torch.bfloat16, order=1))


def test_autocast_does_not_reach_inside() -> None:
    given = drawn(ROWS, CLASSES)
    with torch.autocast("cpu", torch.bfloat16):
        assert_is_exact(given)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_opcheck(label_smoothing: float, dtype: torch.dtype) -> None:
    x, weight, bias, target = drawn((ROWS_ALIGNED + 3,), CLASSES, dtype)
    for given, wanted in (
        ((x, weight, bias), [True] * 3),
        ((x, weight, None), [True, True, False]),
    ):
        torch.library.opcheck(OPERATOR, (*given, target, IGNORED, label_smoothing, wanted))


@pytest.fixture(params=[0, 3], ids=["whole rows", "filled up"])
def more(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes by which rows are filled up, as on CUDA."""
    monkeypatch.setattr(module, "filled_up", lambda *_: request.param)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.usefixtures("more")
def test_rows_that_are_filled_up(dtype: torch.dtype, label_smoothing: float) -> None:
    for biased in (True, False):
        given = drawn(ROWS, CLASSES, dtype, biased=biased)
        assert_is_exact(given, label_smoothing=label_smoothing)


@pytest.mark.parametrize("missing", [CLASSES, -1])
@pytest.mark.usefixtures("more")
def test_a_class_that_there_is_not(missing: int) -> None:
    given = drawn(ROWS, CLASSES)
    given.target[0, 0] = missing
    with pytest.raises(IndexError, match="out of range"):
        linear_cross_entropy(*given)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("more")
def test_scratch_is_what_it_takes(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    rows, classes, width = 9 * ROWS_ALIGNED, 2001, 256
    row_bytes = row_bytes_of(classes, dtype, torch.device("cpu"))
    monkeypatch.setattr(module, "CHUNK_BYTES", 4 * ROWS_ALIGNED * row_bytes)
    assert rows_at_once(rows, row_bytes) == 3 * ROWS_ALIGNED
    x, weight, bias, target = drawn((rows,), classes, dtype, width=width)
    given = (x, weight, bias, target, IGNORED, 0.1, [True] * 3)
    kept: list[torch.Tensor] = []
    most = allocated_peak(lambda: kept.extend(OPERATOR(*given)))
    scratch = scratch_of(rows, weight, dtype)
    assert most == pytest.approx(storage_bytes(kept) + scratch, rel=0.02)
    assert scratch_bytes(OPERATOR, given) == scratch


@pytest.mark.parametrize(
    ("dtype", "kernel", "expected"),
    [
        (torch.float32, True, 1408 * 20_004 * 4 + 20_004 * 256 * 4),
        (torch.float32, False, 1408 * 20_004 * 4 + 20_004 * 256 * 4),
        (torch.bfloat16, True, 2048 * 20_008 * 2 + 20_008 * 256 * 2),
        (torch.bfloat16, False, 1024 * 20_008 * 6 + 20_008 * 256 * 2),
        (torch.float16, True, 2048 * (20_008 * 2 + 256 * 4) + 20_008 * 256 * 2),
        (torch.float16, False, 1024 * 20_008 * 6 + 20_008 * 256 * 2),
    ],
)
def test_scratch_on_cuda(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kernel: bool, expected: int
) -> None:
    """Without numbers: rows of scores that are filled up, of 16 bits in float32 as well where no
    kernel reads them, and the weights; float16's products are made in float32."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 128 * 2**20)
    monkeypatch.setattr(module, "is_served", lambda *_: kernel)
    with FakeTensorMode():
        weight = torch.empty(20_001, 256, dtype=dtype, device="cuda")
    assert scratch_of(4096, weight, dtype) == expected


@pytest.mark.usefixtures("more")
def test_nothing_is_written_to_scattered_places_of_a_part_of_rows() -> None:
    """On CUDA, deterministic algorithms make a copy of what is not contiguous for that."""

    class Scattered(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten.scatter_.src:
                assert args[0].is_contiguous()
                self.count += 1
            return func(*args, **(kwargs or {}))

    given = drawn((ROWS_ALIGNED,), CLASSES)
    with Scattered() as scattered, torch.no_grad():
        module._operator._init_fn(*given, IGNORED, 0.1, [True] * 3)
    assert scattered.count == 1


@pytest.mark.parametrize(("rows", "row_bytes"), [(1, 1), (5600, 133_112), (10**6, 4), (3, 10**9)])
def test_rows_at_once(monkeypatch: pytest.MonkeyPatch, rows: int, row_bytes: int) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 128 * 2**20)
    at_once = rows_at_once(rows, row_bytes)
    assert at_once % ROWS_ALIGNED == 0
    assert (at_once - ROWS_ALIGNED) * row_bytes < 128 * 2**20
    assert at_once == ROWS_ALIGNED or -(-rows // at_once) <= -(-rows * row_bytes // (128 * 2**20))


def test_a_reduction_that_it_has_not() -> None:
    with pytest.raises(InvalidInput, match="reduction"):
        linear_cross_entropy(*drawn(ROWS, CLASSES), reduction="none")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_first_derivatives_that_could_be_differentiated_again(reduction: str) -> None:
    given = drawn(ROWS, CLASSES)
    loss = linear_cross_entropy(*given, reduction=reduction)
    expected = torch.autograd.grad(loss, given.trained, retain_graph=True)
    found = torch.autograd.grad(loss, given.trained, create_graph=True)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("by", ["input", "weight", "bias"])
@pytest.mark.parametrize("of", ["input", "weight", "bias"])
def test_second_derivatives_raise(of: str, by: str) -> None:
    """Also where a part of them is known, and where only one is asked for."""
    given = drawn(ROWS, CLASSES)
    source = getattr(given, by)
    (first,) = torch.autograd.grad(
        linear_cross_entropy(*given), getattr(given, of), create_graph=True
    )
    for penalty in (first.square().sum(), first.sum() + source.square().sum()):
        with pytest.raises(NotDifferentiableTwice, match="as it is written, not compiled"):
            torch.autograd.grad(penalty, source, retain_graph=True)
        with pytest.raises(NotDifferentiableTwice):
            penalty.backward(retain_graph=True)


@pytest.mark.parametrize("trained", ["input", "weight", "bias"])
def test_second_derivatives_raise_where_others_are_frozen(trained: str) -> None:
    given = drawn(ROWS, CLASSES)
    for name in ("input", "weight", "bias"):
        getattr(given, name).requires_grad_(name == trained)
    loss = 3 * linear_cross_entropy(*given)
    (first,) = torch.autograd.grad(loss, given.trained, create_graph=True)
    with pytest.raises(NotDifferentiableTwice):
        torch.autograd.grad((first * given.trained[0]).sum(), given.trained)


def test_second_derivatives_raise_of_other_numbers() -> None:
    given = drawn(ROWS, CLASSES)
    loss = linear_cross_entropy(*given, dtype=torch.bfloat16)
    first = torch.autograd.grad(loss, given.trained, create_graph=True)
    for one, source in zip(first, given.trained, strict=True):
        with pytest.raises(NotDifferentiableTwice):
            torch.autograd.grad((one * source).sum(), source, retain_graph=True)
