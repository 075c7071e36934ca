"""What torch's settings make of float32, by the older ones and by the newer ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ecornn.backends.persistent_calls import Matched, matching_products
from ecornn.kernels.persistent.device import numbers_of

matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = torch.backends.fp32_precision, cudnn.fp32_precision, matmul.fp32_precision
    yield
    torch.backends.fp32_precision, cudnn.fp32_precision = before[:2]
    torch.set_float32_matmul_precision("highest")
    matmul.fp32_precision = before[2]
    cudnn.allow_tf32 = True


def by_older(rnn: bool, products: str) -> None:
    cudnn.allow_tf32 = rnn
    torch.set_float32_matmul_precision(products)


def by_newer(rnn: str, products: str) -> None:
    cudnn.rnn.fp32_precision = rnn
    matmul.fp32_precision = products


def test_torch_s_own_choice_is_tf32() -> None:
    assert numbers_of(torch.float32) == "tf32"
    assert numbers_of(torch.bfloat16) == "bf16"
    assert numbers_of(torch.float64) is None


@pytest.mark.parametrize(("rnn", "numbers"), [(True, "tf32"), (False, "tf32x3")])
@pytest.mark.parametrize("products", ["highest", "high", "medium"])
def test_the_older_settings(rnn: bool, products: str, numbers: str) -> None:
    by_older(rnn, products)
    assert numbers_of(torch.float32) == numbers


@pytest.mark.parametrize(
    ("rnn", "numbers"), [("tf32", "tf32"), ("none", "tf32x3"), ("ieee", "ieee")]
)
@pytest.mark.parametrize("products", ["none", "ieee", "tf32"])
def test_the_newer_settings(rnn: str, products: str, numbers: str) -> None:
    by_newer(rnn, products)
    assert numbers_of(torch.float32) == numbers


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_what_is_not_set_is_what_is_set_for_all(precision: str) -> None:
    by_newer("none", "none")
    torch.backends.fp32_precision = precision
    assert numbers_of(torch.float32) == precision


@pytest.mark.parametrize(
    ("rnn", "products", "during"),
    [
        ("tf32", "none", "tf32"),
        ("tf32", "tf32", "tf32"),
        ("ieee", "tf32", "ieee"),
        ("ieee", "none", "none"),
        ("none", "tf32", "ieee"),
    ],
)
def test_torch_s_products_match_and_change_nothing_else(
    rnn: str, products: str, during: str
) -> None:
    by_newer(rnn, products)
    numbers = numbers_of(torch.float32)
    with matching_products():
        assert matmul.fp32_precision == during
        assert numbers_of(torch.float32) == numbers
        with matching_products():
            assert matmul.fp32_precision == during
            assert numbers_of(torch.float32) == numbers
        assert matmul.fp32_precision == during
    assert matmul.fp32_precision == products
    assert numbers_of(torch.float32) == numbers


def test_a_setting_comes_back_after_an_error() -> None:
    by_newer("none", "tf32")
    with pytest.raises(ZeroDivisionError), matching_products():
        raise ZeroDivisionError
    assert matmul.fp32_precision == "tf32"
    assert numbers_of(torch.float32) == "tf32x3"


@pytest.mark.parametrize(("rnn", "during"), [("tf32", "tf32"), ("ieee", "ieee"), ("none", "ieee")])
def test_products_of_a_size_match_the_kernels_that_it_was_made_with(rnn: str, during: str) -> None:
    """Whatever the setting is by then: what a layer kept goes backwards by its own kernels."""
    by_newer(rnn, "none")
    matched = Matched(torch.float32)
    other = "ieee" if rnn == "tf32" else "tf32"
    by_newer(other, other)
    with matched():
        assert matmul.fp32_precision == during
    assert matmul.fp32_precision == other
    with pytest.raises(ZeroDivisionError), matched():
        raise ZeroDivisionError
    assert matmul.fp32_precision == other


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_other_products_are_as_they_are(dtype: torch.dtype) -> None:
    by_newer("tf32", "none")
    with Matched(dtype)():
        assert matmul.fp32_precision == "none"
