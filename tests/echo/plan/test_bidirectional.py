"""What is kept and what is recomputed, on graphs small enough to know the answer."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._functorch.partitioners import min_cut_rematerialization_partition

from ecornn.echo.graph import read_graph
from ecornn.echo.passes import Passes
from ecornn.echo.plan.bidirectional import bidirectional
from ecornn.echo.rewrite import split


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
    # its result and its mask, whoever refers to them, and the relu before it
    assert kept_memory(passes) == Counter({"native_dropout": 2, "relu": 1})


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


def decoder(steps: int) -> Callable[..., Any]:
    """An LSTM cell with additive attention over keys that all steps share."""

    def decode(keys_BSH: Tensor, w_x: Tensor, w_h: Tensor, v: Tensor, q: Tensor) -> tuple[Tensor]:
        h = c = keys_BSH.mean(1)
        shared, found = keys_BSH @ q, []
        for _ in range(steps):
            scores = torch.tanh(shared + (h @ q).unsqueeze(1)) @ v
            context = (scores.softmax(1).transpose(1, 2) @ keys_BSH).squeeze(1)
            i, f, g, o = (context @ w_x + h @ w_h).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            found.append(h)
        return (torch.stack(found),)

    return decode


def test_an_attention_decoder_keeps_no_more_than_torch_at_its_most_aggressive() -> None:
    steps, batch, length, hidden = 8, 4, 12, 16
    inputs = (
        leaf(batch, length, hidden),
        *(leaf(hidden, 4 * hidden), leaf(hidden, 4 * hidden)),
        *(leaf(hidden, 1), leaf(hidden, hidden)),
    )
    joint: fx.GraphModule = aot_export_joint_simple(decoder(steps), inputs, trace_joint=True)
    passes = Passes(read_graph(joint), 1)
    kept = bidirectional(passes)
    _, backward = split(copy.deepcopy(joint), passes, kept)
    with functorch_config.patch(aggressive_recomputation=True):
        _, aggressive = min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=1)
    own = {node.name for node in joint.graph.find_nodes(op="placeholder")}

    def bytes_between(module: fx.GraphModule) -> int:
        values = [
            n.meta["val"] for n in module.graph.find_nodes(op="placeholder") if n.name not in own
        ]
        return sum(
            {v.untyped_storage()._cdata: v.untyped_storage().nbytes() for v in values}.values()
        )

    assert bytes_between(backward) <= bytes_between(aggressive)
    # the keys once; of each step h, c, the gates, the query, the context and the weights
    small, weights = batch * hidden * 4, batch * length * 4
    assert passes.bytes_of(kept) <= batch * length * hidden * 4 + steps * (8 * small + 2 * weights)
    # everything that is kept is enough without a product run again
    depends = {node for node in backward.graph.nodes if "tangents" in node.name}
    for node in backward.graph.nodes:
        if depends.intersection(node.all_input_nodes):
            depends.add(node)
        elif "mm" in str(node.target):
            raise AssertionError(f"{node} runs a product again")
