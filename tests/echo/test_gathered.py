"""What is taken out of a backward pass is made of it, for many calls, as the pass would make it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from ecornn.echo.gathered import Columns, Factor, Gathered, Product, RowSum, Small
from ecornn.echo.weight_products import Backward, views_of
from ecornn.echo.weight_sums import WeightSums
from support.called_often import same

aten = torch.ops.aten


def graph_of(function: Callable[..., Any], *given: Tensor) -> fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, tracing_mode="fake")(*given)


@pytest.mark.parametrize("turned", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)])
def test_products_are_taken_out_however_they_are_turned(turned: tuple[int, int, int]) -> None:
    """Of two calls with other numbers of rows."""
    left, right, result = turned

    def backward(a: Tensor, b: Tensor) -> list[Tensor]:
        found = (a.t() if left else a) @ (b.t() if right else b)
        return [a.sum(), found.t() if result else found]

    def sized(rows: int) -> tuple[Tensor, Tensor]:
        a, b = torch.randn(40, rows), torch.randn(rows, 30)
        return (a.t().contiguous() if left else a), (b.t().contiguous() if right else b)

    given = sized(3), sized(4)
    expected = [backward(*one)[1] for one in given]
    module = graph_of(backward, *given[0])
    assert not products_of(copy.deepcopy(module), [0])
    sums = WeightSums([1], [(), tuple(expected[0].shape)], ())
    sums.in_any_order(module)
    (product,) = sums.gathered
    assert isinstance(product, Product)
    assert not module.graph.find_nodes(op="call_function", target=aten.mm.default)
    handed = [module(*one) for one in given]
    columns = columns_of(product.places, handed)
    made = product.of_calls(columns, None)
    torch.testing.assert_close(product.result(made), sum(expected))
    again = product.of_calls(columns, made)
    torch.testing.assert_close(product.result(again), 2 * sum(expected))
    for one, right_one in zip(handed, expected, strict=True):
        found = sums.of_one_call(one)
        assert len(found) == 2
        torch.testing.assert_close(found[1], right_one)


def products_of(
    module: fx.GraphModule, inputs: Collection[int], changing: Collection[str] = ()
) -> tuple[Gathered, ...]:
    backward = Backward(module, changing)
    backward.take_products(inputs)
    return backward.end()


def columns_of(places: Sequence[int], handed: Sequence[Any]) -> Columns:
    where = {place: i for i, place in enumerate(dict.fromkeys(places))}
    return Columns(where, [[one[place] for place in where] for one in handed])


def test_what_is_no_product_to_take_out() -> None:
    def backward(a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
        read_twice, rounded = a @ b, (a @ b).to(torch.bfloat16)
        twice = a @ (2 * b)
        # the last has factors of 50 columns, larger than half of the result
        return [read_twice, read_twice.sum(), rounded, twice, twice, c @ c.t()]

    given = torch.randn(40, 3), torch.randn(3, 40), torch.randn(40, 50)
    module = graph_of(backward, *given)
    before = module(*given)
    assert products_of(module, range(6)) == ()
    same(module(*given), before, bits=True)


def test_a_weight_is_no_factor_to_keep() -> None:
    """An optimizer may write to it before its turn comes."""

    def forward(weight: Tensor, x: Tensor) -> list[Tensor]:
        return [x @ weight.t(), weight[1:].view(-1), weight * 2, x.t()]

    module = graph_of(forward, torch.randn(40, 3), torch.randn(5, 3))
    shared = views_of(module, [0])
    kinds = {node.name: str(node.target) for node in module.graph.nodes}
    found = sorted(kinds[name] for name in shared)
    assert found == ["aten.slice.Tensor", "aten.t.default", "aten.view.default", "weight_1"]
    backward = graph_of(lambda w, g: [g @ w], torch.randn(2, 40), torch.randn(40, 2))
    first, _ = backward.graph.find_nodes(op="placeholder")
    assert not products_of(backward, [0], {first.name})
    assert products_of(backward, [0])


def test_small_results_and_factors() -> None:
    module = graph_of(lambda x: [x.sum(0), x, x[0]], torch.randn(200, 100, dtype=torch.float64))
    backward = Backward(module, ())
    backward.take_small([0, 1, 2])
    assert backward.end() == (Small(0, (100,)), Small(2, (100,)))
    columns = columns_of([0], [[torch.randn(2, 3)], [torch.randn(4, 3)]])
    assert Factor(0, turned=True).of_calls(columns, left=True).shape == (3, 6)
    assert Factor(0, turned=False).of_calls(columns, left=False).shape == (6, 3)


def test_a_bias_s_gradient_is_a_sum_of_a_factor_s_rows() -> None:
    """As torch writes that of a linear layer, and of a cell's two biases; a sum of something else
    is none."""

    def backward(g: Tensor, x: Tensor) -> list[Tensor]:
        g = g.tanh()
        bias = g.sum(0)
        return [g.t() @ x, g.sum(0, keepdim=True).view(40), bias, bias, x.sum(0), g.t() @ x.cos()]

    given = [(torch.randn(n, 40), torch.randn(n, 30)) for n in (3, 4)]
    expected = [backward(*one) for one in given]
    module = graph_of(backward, *given[0])
    sums = WeightSums(range(6), [tuple(one.shape) for one in expected[0]], ())
    sums.in_any_order(module)
    kinds = {one.weight: type(one) for one in sums.gathered}
    assert kinds == {0: Product, 5: Product, 1: RowSum, 2: RowSum, 3: RowSum, 4: RowSum}
    assert not module.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    handed = [list(module(*one)) for one in given]
    assert len({id(t) for t in handed[0]}) == len(sums._places) == 3, "one factor of both products"
    for one, right in zip(handed, expected, strict=True):
        torch.testing.assert_close(sums.of_one_call(one), right)
    columns = columns_of(tuple(sums._places), handed)
    for one in sums.gathered:
        total = sum(right[one.weight] for right in expected)
        found = one.of_calls(columns, None)
        torch.testing.assert_close(one.result(found), total)
        torch.testing.assert_close(one.result(one.of_calls(columns, found)), 2 * total)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sum_over_very_many_rows_is_left_half_done(flat: bool, dtype: torch.dtype) -> None:
    def backward(x: Tensor, y: Tensor) -> list[Tensor]:
        if not flat:
            return [(x * y).sum((0, 1)), y.sum((0, 1), keepdim=True).view(6), x.sum((1, 2))]
        rows = x.view(-1, 6) * y.view(-1, 6)
        return [rows.sum(0), y.view(-1, 6).cos().sum(0, keepdim=True), x.sum((1, 2))]

    given = [tuple(torch.randn(40, 50, 6, dtype=dtype) for _ in range(2)) for _ in range(3)]
    expected = [backward(*one) for one in given]
    module = graph_of(backward, *given[0])
    sums = WeightSums(range(3), [tuple(one.shape) for one in expected[0]], ())
    sums.in_any_order(module)
    assert {one.weight: one.rows for one in sums.gathered} == {0: 50, 1: 50, 2: None}  # type: ignore[attr-defined]
    handed = [list(module(*one)) for one in given]
    assert [tuple(one.shape) for one in handed[0]] == [(50, 6), (50, 6), (40,)]
    for one, right in zip(handed, expected, strict=True):
        torch.testing.assert_close(sums.of_one_call(one), right)
    columns = columns_of(range(3), handed)
    for one in sums.gathered:
        total = sum(right[one.weight] for right in expected)
        found = one.of_calls(columns, None)
        assert found.shape == total.shape
        torch.testing.assert_close(found, total)
        torch.testing.assert_close(one.of_calls(columns, found), 2 * total)


def test_sums_that_are_made_as_they_are() -> None:
    """Of few rows, of narrow numbers, of columns, read by others as well, or too large in half."""

    def backward(few: Tensor, narrow: Tensor, x: Tensor, wide: Tensor) -> list[Tensor]:
        read = x.sum((0, 1))
        return [
            few.sum((0, 1)),
            narrow.sum((0, 1)),
            x.sum((0, 2)),
            read,
            read * 2,
            wide.sum((0, 1)),
        ]

    x = torch.randn(40, 50, 6)
    given = x[:20], x.bfloat16(), x, torch.randn(2, 3000, 30)
    module = graph_of(backward, *given)
    before = module(*given)
    changed = Backward(module, ())
    changed.take_small(range(6))
    assert all(isinstance(one, Small) and one.rows is None for one in changed.end())
    same(module(*given), before, bits=True)
