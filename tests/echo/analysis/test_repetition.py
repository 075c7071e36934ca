"""Steps that repeat are found, and so is what they hand on; other chains are not taken for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_export_joint_simple

from ecornn.echo.analysis.circles import circles
from ecornn.echo.analysis.repetition import repetition
from ecornn.echo.graph import RERUN, Graph, Operation, read_graph
from ecornn.echo.passes import Passes
from ecornn.echo.plan.bidirectional import bidirectional

BATCH, HIDDEN = 3, 4
STATE = BATCH * HIDDEN * 4  # bytes


def passes_of(function: Callable[..., Any], *inputs: Tensor) -> Passes:
    joint: fx.GraphModule = aot_export_joint_simple(function, inputs, trace_joint=True)
    outputs = function(*inputs)
    return Passes(read_graph(joint), len(outputs) if isinstance(outputs, tuple) else 1)


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def lstm(x_TBH: Tensor, w: Tensor, u: Tensor, state: Tensor) -> tuple[Tensor]:
    h = c = state
    for x in x_TBH:
        i, f, g, o = (x @ w + h @ u).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
    return (h.clone(),)


def gru(x_TBH: Tensor, w: Tensor, u: Tensor, state: Tensor) -> tuple[Tensor]:
    h, gates = state, w[:, : 3 * HIDDEN]
    for x in x_TBH:
        xr, xz, xn = (x @ gates).chunk(3, -1)
        hr, hz, hn = (h @ u[:, : 3 * HIDDEN]).chunk(3, -1)
        z = (xz + hz).sigmoid()
        h = (1 - z) * (xn + (xr + hr).sigmoid() * hn).tanh() + z * h
    return (h.clone(),)


def elementwise(x_TBH: Tensor, w: Tensor, u: Tensor, state: Tensor) -> tuple[Tensor]:
    """The product of all steps at once, before the loop (as in SRU and QRNN)."""
    h, all_TBH = state, x_TBH @ w[:, :HIDDEN]
    for x in all_TBH:
        h = torch.relu(x + u[0, :HIDDEN] * h)
    return (h.clone(),)


def leaky(x_TBH: Tensor, w: Tensor, u: Tensor, state: Tensor) -> tuple[Tensor]:
    """The state itself is not needed by the backward pass; what is made of it is."""
    h, c, total = state, state, state
    for x in x_TBH:
        c = 0.9 * c + x @ w[:, :HIDDEN]
        h = c.tanh()
        total = total + h @ u[:, :HIDDEN]
    return (total,)


def other_ends(x_TBH: Tensor, w: Tensor, u: Tensor, state: Tensor) -> tuple[Tensor]:
    """The first step starts from nothing, the last one ends in something else."""
    h, c = torch.tanh(x_TBH[0] @ w[:, :HIDDEN]), None
    for t, x in enumerate(x_TBH):
        i, f, g, o = (x @ w + h @ u).chunk(4, -1)
        new = i.sigmoid() * g.tanh()
        c = new if c is None else f.sigmoid() * c + new
        h = o.sigmoid() * c.tanh() if t < len(x_TBH) - 1 else (c * o).softmax(-1)
    return (h.clone(),)


CELLS = {f.__name__: f for f in (lstm, gru, elementwise, leaky, other_ends)}


@cache
def unrolled(cell: Callable[..., Any], steps: int) -> Passes:
    weights = (leaf(HIDDEN, 4 * HIDDEN), leaf(HIDDEN, 4 * HIDDEN))
    return passes_of(cell, leaf(steps, BATCH, HIDDEN), *weights, leaf(BATCH, HIDDEN))


def longest_chain(passes: Passes, kept: frozenset[int]) -> int:
    """How many operators at most are run again one after the other to make one needed result."""
    operations = passes.graph.operations
    length: dict[int, int] = {}
    for i, operation in enumerate(operations):
        if operation.kind in RERUN and i not in kept:
            own = operation.kind == "cheap"
            length[i] = own + max((length.get(u, 0) for u in operation.uses), default=0)
    return max(length.get(i, 0) for i in passes.needed)


def states(passes: Passes) -> frozenset[int]:
    return repetition(passes).states


@pytest.mark.parametrize("name", CELLS)
def test_no_chain_runs_back_through_the_states(name: str) -> None:
    short, long = (unrolled(CELLS[name], steps) for steps in (6, 12))
    chains = [longest_chain(passes, bidirectional(passes)) for passes in (short, long)]
    assert chains[0] == chains[1]
    # it would, without them
    ends = [
        frozenset(i for i, op in enumerate(p.graph.operations) if op.kind not in RERUN)
        for p in (short, long)
    ]
    assert longest_chain(long, ends[1]) >= longest_chain(short, ends[0]) + 6


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("steps", [4, 9])
def test_there_is_one_state_a_step(name: str, steps: int) -> None:
    passes = unrolled(CELLS[name], steps)
    found = repetition(passes)
    operations = passes.graph.operations
    assert len({operations[i].holds for i in found.states}) == len(found.states)
    # the last step's is made into the result; what comes in at the first is an input
    assert steps - 2 <= len(found.states) <= steps
    assert all(passes.bytes_of(frozenset({i})) in (0, STATE) for i in found.states)
    assert not found.states & {i for i, op in enumerate(operations) if op.kind == "view"}


def test_what_is_kept_of_a_gated_sum_can_be_counted() -> None:
    steps = 7

    def gated(x_TBH: Tensor, w: Tensor, c: Tensor) -> tuple[Tensor]:
        for x in x_TBH:
            z = x @ w
            f = z.sigmoid()
            c = f * c + z
        return (c @ w,)

    passes = passes_of(gated, leaf(steps, BATCH, HIDDEN), leaf(HIDDEN, HIDDEN), leaf(BATCH, HIDDEN))
    # a state a step; and the gate, in place of the product that it and the state were made of
    assert passes.bytes_of(bidirectional(passes)) == 2 * steps * STATE


def test_interior_steps_are_decided_alike() -> None:
    steps = 12
    passes = unrolled(lstm, steps)
    found, kept = repetition(passes), bidirectional(passes)
    forward = set(range(len(passes.graph.operations))) - passes.backward
    by_step = [group for group in found.alike(forward) if len(group) >= steps - 3]
    assert len(by_step) >= 10
    for group in by_step:
        inner = group[1:-1]
        assert len({i in kept for i in inner}) == 1


def test_different_operations_do_not_grow_with_the_steps() -> None:
    def unique(steps: int) -> int:
        passes = unrolled(lstm, steps)
        forward = set(range(len(passes.graph.operations))) - passes.backward
        return len(repetition(passes).alike(forward))

    assert unique(24) == unique(12)


def test_a_chain_that_lives_on_itself_is_no_recurrence() -> None:
    def chain(x: Tensor, w: Tensor) -> tuple[Tensor]:
        y = x @ w
        for _ in range(12):
            y = y.tanh()
        return (y @ w,)

    assert not states(passes_of(chain, leaf(4, 4), leaf(4, 4)))


def test_partial_sums_are_no_states() -> None:
    def total(x: Tensor, w: Tensor) -> tuple[Tensor]:
        y = x @ w
        for _ in range(12):
            y = y + x @ w
        return (y.tanh() @ w,)

    passes = passes_of(total, leaf(4, 4), leaf(4, 4))
    assert not states(passes)
    assert passes.bytes_of(bidirectional(passes)) == 4 * 4 * 4


def test_shared_keys_have_no_states() -> None:
    def attend(keys: Tensor, w: Tensor, *queries: Tensor) -> tuple[Tensor, ...]:
        shared = keys @ w
        return tuple((torch.tanh(shared + (q @ w).unsqueeze(1)) * keys).sum(1) for q in queries)

    queries = [leaf(2, 8) for _ in range(6)]
    assert not states(passes_of(attend, leaf(2, 7, 8), leaf(8, 8), *queries))


def test_a_residual_stream_is_a_state() -> None:
    """Layers with weights of their own are alike, and what they add to is carried."""
    layers = 5

    def network(x: Tensor, *weights: Tensor) -> tuple[Tensor]:
        for w in weights:
            x = x + torch.relu(nn.functional.layer_norm(x, x.shape[-1:]) @ w)
        return (x,)

    passes = passes_of(network, leaf(3, 6), *(leaf(6, 6) for _ in range(layers)))
    found = repetition(passes)
    assert {passes.graph.operations[i].target for i in found.states} == {"aten.add.Tensor"}
    assert len(found.states) == layers - 1  # the last is the result


def fused_cells(steps: int) -> Passes:
    """A graph as a GPU's fused LSTM cell makes it, by hand: products, a cell of several results
    (h, c, gates), its parts; and backwards, per step, a reader of the states and the gates."""
    operations = [
        *(Operation(name, "", "input", (), (k,)) for k, name in enumerate("xwc")),
        Operation("tangents_1", "", "input", (), (3,)),
    ]
    storages = [40, 40, 40, 40]

    def add(target: str, kind: str, uses: tuple[int, ...], holds: tuple[int, ...]) -> int:
        operations.append(Operation(f"op{len(operations)}", target, kind, uses, holds))
        return len(operations) - 1

    h, c, read = 0, 2, []
    for _ in range(steps):
        gates, made = len(storages), len(storages) + 1
        storages += [160, 40, 40, 160]
        product = add("mm", "product", (h, 1), (gates,))
        cell = add("cell", "cheap", (product, c), (made, made + 1, made + 2))
        before, h = c, add("first", "view", (cell,), (made,))
        c, kept = (
            add("second", "view", (cell,), (made + 1,)),
            add("3rd", "view", (cell,), (made + 2,)),
        )
        read.append((before, c, kept, h))
    forward, arriving = h, 3
    for uses in reversed(read):
        storages.append(40)
        arriving = add("back", "cheap", (arriving, *uses), (len(storages) - 1,))
    return Passes(Graph(tuple(operations), tuple(storages), (forward, arriving)), 1)


def test_the_state_of_a_fused_cell_is_one_of_its_parts() -> None:
    passes = fused_cells(6)
    targets = [passes.graph.operations[i].target for i in sorted(states(passes))]
    assert targets == ["second"] * 6
    # c, and what the cell reads; h and the gates follow from them
    assert passes.bytes_of(bidirectional(passes)) == 6 * (40 + 160)


def test_fifteen_thousand_operations_take_no_time() -> None:
    passes = fused_cells(15_000 // 6)
    assert len(passes.graph.operations) > 14_000
    start = time.perf_counter()
    bidirectional(passes)
    # 0.2 s were measured; a loop over all operations for each of them takes minutes
    assert time.perf_counter() - start < 5


def test_it_tells_what_it_found() -> None:
    passes = unrolled(lstm, 6)
    found = repetition(passes)
    told = found.explain()
    assert f"{len(passes.graph.operations):,} operations" in told
    assert f"{len(found.states)} states" in told
    assert found.unique < len(passes.graph.operations)


def test_circles() -> None:
    assert circles({1: {2}, 2: {3}, 3: set()}) == []
    assert circles({1: {1}, 2: set()}) == [{1}]
    found = circles({1: {2}, 2: {3}, 3: {1, 4}, 4: {5}, 5: {4}, 6: {1}})
    assert sorted(map(sorted, found)) == [[1, 2, 3], [4, 5]]
    ring = {i: {(i + 1) % 50_000} for i in range(50_000)}
    assert circles(ring) == [set(range(50_000))]
