"""Right factors of large products, by the transposition's contract; `tests/gpu` has it on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ecornn.backends import persistent_gradients, persistent_products
from ecornn.backends.persistent_products import (
    reads_along_the_inner,
    right_factor,
    weights_as_factor,
)
from ecornn.kernels.persistent import gradients
from support.machine import BATCH, Machine, make_call, routed, run_route, transpose_all
from support.tolerances import assert_matches, tolerance

CPU = torch.device("cpu")


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    "parts",
    [
        [draw(70, 37)],
        [draw(4, 9), draw(130, 9)],
        [draw(4, 9), draw(0, 9)],
        [draw(70, 40)[:, 3:20]],
        [draw(20, 70).t()],
    ],
    ids=["one", "two", "an empty one", "of longer rows", "by columns already"],
)
def test_it_is_the_same_matrix_by_columns(
    parts: list[Tensor], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    transpose_all(monkeypatch)
    found = right_factor(parts, 5)
    assert torch.equal(found, torch.cat(parts))
    assert found.t().is_contiguous()
    assert machine.transposed.launches == sum(len(part) > 0 for part in parts)


def test_small_products_take_the_rows_as_they_are(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    transpose_all(monkeypatch)
    rows = draw(64, 32)
    monkeypatch.setattr(persistent_products, "LEAST_WORK", 2 * 64 * 32 * 100)
    assert right_factor([rows], 99) is rows
    assert right_factor([rows], 100) is not rows
    assert machine.transposed.launches == 1
    assert torch.equal(right_factor([rows, rows], 1), torch.cat([rows, rows]))


def test_weights_need_many_rows(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    many = persistent_products.MANY
    transpose_all(monkeypatch)
    monkeypatch.setattr(persistent_products, "MANY", many)
    weights = draw(12, 5)
    assert weights_as_factor(weights, 12 * many - 1) is weights
    found = weights_as_factor(weights, 12 * many)
    assert torch.equal(found, weights)
    assert found.t().is_contiguous()


@pytest.mark.parametrize("precision", ["ieee", "none", "tf32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_tf32_gains(
    precision: str, dtype: torch.dtype, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    transpose_all(monkeypatch)
    monkeypatch.setattr(persistent_products, "products_precision", lambda: precision)
    rows = draw(64, 32).to(dtype)
    gains = precision == "tf32" and dtype == torch.float32
    assert (right_factor([rows], 8) is rows) is not gains


@pytest.mark.parametrize(("major", "gains"), [(8, False), (9, True), (10, False)])
def test_only_where_it_was_measured(
    major: int, gains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    reads_along_the_inner.cache_clear()
    assert reads_along_the_inner(torch.device("cuda", 0)) is gains
    assert not reads_along_the_inner(CPU)
    reads_along_the_inner.cache_clear()


@pytest.mark.parametrize("zero", [False, True])
def test_gradients_by_the_short_way(
    zero: bool, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "MOST_WORK", {4: 0})
    monkeypatch.setattr(persistent_gradients, "is_zero_state", lambda state: zero)
    found: list[list[Tensor]] = []
    for transposed in (False, True):
        if transposed:
            transpose_all(monkeypatch)
        route, leaves = routed(make_call("lstm", 24, keep="gates"))
        if zero:
            leaves[1] = torch.zeros_like(leaves[1])
        results = run_route(route, leaves)
        sources = [leaf for leaf in leaves if leaf.requires_grad]
        upstream = [torch.ones_like(result) for result in results]
        found.append(list(torch.autograd.grad(results, sources, upstream)))
    # the input's weights; the input; the output, behind h0 where there is one
    assert machine.transposed.launches == (3 if zero else 4)
    for one, other in zip(*found, strict=True):
        assert_matches(one, other.double(), tolerance(torch.float32, BATCH))
