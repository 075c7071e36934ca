"""What is kept and what is recomputed, on graphs small enough to know the answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_export_joint_simple

from ecornn.echo.graph import read_graph
from ecornn.echo.passes import Passes
from ecornn.echo.plan.bidirectional import bidirectional


def passes_of(function: Callable[..., Any], *inputs: Tensor) -> Passes:
    joint: fx.GraphModule = aot_export_joint_simple(function, inputs, trace_joint=True)
    outputs = function(*inputs)
    return Passes(read_graph(joint), len(outputs) if isinstance(outputs, tuple) else 1)


def kept_memory(passes: Passes) -> Counter[str]:
    """What made the memory that is kept: a view of a result keeps the result."""
    operations = passes.graph.operations
    maker: dict[int, str] = {}
    for operation in operations:
        for storage in operation.holds:
            maker.setdefault(storage, operation.target.removeprefix("aten.").split(".")[0])
    kept = {s for i in bidirectional(passes) for s in operations[i].holds}
    return Counter(maker[storage] for storage in kept - passes.held_anyway)


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def test_two_products_added_then_tanh_are_not_recomputed() -> None:
    passes = passes_of(
        lambda x, a, y, b: (torch.tanh(x @ a + y @ b) @ b,),
        *(leaf(8, 8) for _ in range(4)),
    )
    assert kept_memory(passes) == Counter({"tanh": 1})


def test_many_uses_of_shared_keys_are_all_recomputed() -> None:
    steps, batch, length, hidden = 5, 2, 7, 8

    def attend(keys: Tensor, w: Tensor, v: Tensor, *queries: Tensor) -> tuple[Tensor, ...]:
        shared = keys @ w
        return tuple(torch.tanh(shared + (q @ w).unsqueeze(1)) @ v for q in queries)

    queries = [leaf(batch, hidden) for _ in range(steps)]
    passes = passes_of(
        attend, leaf(batch, length, hidden), leaf(hidden, hidden), leaf(hidden, 1), *queries
    )
    kept = bidirectional(passes)
    large = batch * length * hidden * 4
    assert set(kept_memory(passes)) == {"mm"}
    # the keys once, and a small query a step
    assert passes.bytes_of(kept) == large + steps * batch * hidden * 4
    assert passes.bytes_of(passes.needed) >= steps * large


def test_of_two_tanhs_before_a_product_the_second_is_recomputed() -> None:
    passes = passes_of(
        lambda x, a, b: (torch.tanh(torch.tanh(x @ a)) @ b,), *(leaf(8, 8) for _ in range(3))
    )
    assert kept_memory(passes) == Counter({"tanh": 1})
    # the first: what it was made of is no tanh
    operations = passes.graph.operations
    first = next(op for op in operations if "tanh" in op.target)
    (kept,) = {s for i in bidirectional(passes) for s in operations[i].holds}
    assert (kept,) == first.holds


def test_random_draws_are_kept() -> None:
    passes = passes_of(
        lambda x, a: (torch.nn.functional.dropout(torch.relu(x @ a), 0.5) @ a,),
        leaf(8, 8),
        leaf(8, 8),
    )
    kept = bidirectional(passes)
    assert any(passes.graph.operations[i].kind == "random" for i in kept)


@pytest.mark.parametrize("depth", [1, 4])
def test_what_is_kept_suffices_and_costs_no_more(depth: int) -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor]:
        for _ in range(depth):
            x = torch.nn.functional.layer_norm(torch.sigmoid(x @ w) * x, x.shape[-1:])
        return (x,)

    passes = passes_of(function, leaf(6, 10), leaf(10, 10))
    kept = bidirectional(passes)
    assert passes.bytes_of(kept) <= passes.bytes_of(passes.needed)
    operations, inputs = passes.graph.operations, set(passes.graph.inputs)
    available = set(kept) | inputs
    for i, operation in enumerate(operations):
        again = i not in passes.backward and operation.kind in ("cheap", "view")
        if again and available.issuperset(operation.uses):
            available.add(i)
    assert passes.needed <= available


def test_nothing_is_kept_where_the_inputs_are_enough() -> None:
    passes = passes_of(lambda x: (x.sin().exp(),), leaf(4, 4))
    kept = bidirectional(passes)
    # exp's result is the output and there anyway; sin follows from the input
    assert passes.bytes_of(kept) == 0
