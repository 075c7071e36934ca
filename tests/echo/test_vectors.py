"""Products with a vector become multiplications and sums, and mean the same."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import ecornn
from ecornn.echo.vectors import without_vector_products

aten = torch.ops.aten


def product(left: Tensor, right: Tensor) -> Tensor:
    return torch.mm(left.sin(), right.cos()).tanh()


@pytest.mark.parametrize("symbols", [False, True])
@pytest.mark.parametrize(
    ("rows", "inner", "columns", "sums"),
    [(7, 5, 1, 1), (1, 5, 7, 1), (7, 1, 5, 0), (1, 5, 1, 1), (1, 1, 1, 0)],
)
def test_the_same_numbers(rows: int, inner: int, columns: int, sums: int, symbols: bool) -> None:
    left, right = torch.randn(rows, inner), torch.randn(inner, columns)
    mode = "symbolic" if symbols else "fake"
    traced = make_fx(product, tracing_mode=mode)(left, right)
    assert without_vector_products(traced) == 1
    targets = [node.target for node in traced.graph.nodes]
    assert aten.mm.default not in targets
    assert targets.count(aten.sum.dim_IntList) == sums
    expected = product(left.double(), right.double())
    torch.testing.assert_close(traced(left, right).double(), expected, rtol=1e-5, atol=1e-6)
    for node in traced.graph.nodes:
        if node.op == "call_function":
            assert isinstance(node.meta["val"], Tensor), "later stages read the sizes"


@pytest.mark.parametrize(
    ("rows", "columns", "dtype"),
    [(7, 6, torch.float32), (7, 1, torch.bfloat16), (7, 1, torch.float64)],
)
def test_others_stay(rows: int, columns: int, dtype: torch.dtype) -> None:
    given = torch.randn(rows, 5, dtype=dtype), torch.randn(5, columns, dtype=dtype)
    traced = make_fx(product, tracing_mode="fake")(*given)
    assert without_vector_products(traced) == 0
    assert aten.mm.default in [node.target for node in traced.graph.nodes]


@pytest.mark.parametrize(("rows", "columns"), [(7, 1), (1, 7)])
def test_a_matrix_that_is_in_memory_anyway_is_multiplied(rows: int, columns: int) -> None:
    """A weight, or another product."""

    def plain(left: Tensor, right: Tensor) -> Tensor:
        return torch.mm(left, right)

    def of_product(left: Tensor, right: Tensor) -> Tensor:
        made = torch.mm(left, right.new_ones(right.shape[0], 5)).view(rows, 5)
        return torch.mm(made, made.new_ones(5, 1))

    given = torch.randn(rows, 5), torch.randn(5, columns)
    traced = make_fx(plain, tracing_mode="fake")(*given)
    assert without_vector_products(traced) == 0
    traced = make_fx(of_product, tracing_mode="fake")(torch.randn(rows, 5), torch.randn(5, 5))
    assert without_vector_products(traced) == 0


def test_a_transposed_factor_and_several_readers() -> None:
    def scores(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        found = torch.mm(x.tanh(), w.t())
        return found.exp(), found.sum()

    x, w = torch.randn(6, 4), torch.randn(1, 4)
    traced = make_fx(scores, tracing_mode="fake")(x, w)
    assert without_vector_products(traced) == 1
    torch.testing.assert_close(traced(x, w), scores(x, w))


def test_a_model_s_gradients_and_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where code is generated, by operators one by one."""
    monkeypatch.setattr("ecornn.echo.backend.adds_in_any_order", lambda codegen: True)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1, bias=False))
    twin, x = copy.deepcopy(model).double(), torch.randn(5, 6)
    run = ecornn.compile(model, codegen="eager")
    run(x).square().sum().backward()
    twin(x.double()).square().sum().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-5, atol=1e-6)
    # the scores, and of the backward pass the gradient of the vector and of the rows
    assert "written as sums: 3" in str(run.explain())
