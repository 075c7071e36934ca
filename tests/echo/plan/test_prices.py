"""What a pass takes: the sum of its operators, or kernels and what they move."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

from ecornn.echo import joint
from ecornn.echo.analysis.machine import Machine, _from_sheet
from ecornn.echo.graph import read_graph
from ecornn.echo.passes import Passes
from ecornn.echo.plan.bidirectional import bidirectional
from ecornn.echo.plan.estimate import Plan, estimate
from ecornn.echo.plan.prices import fused, one_by_one, within_a_kernel
from ecornn.echo.schedule import forward_program, saved
from support.joints import joint_of, leaf


def chain(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).sin().cos().exp() @ w


def passes_of(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> Passes:
    return Passes(read_graph(joint_of(function, *map(leaf, shapes))), 1)


def test_one_kernel_for_a_chain_of_light_operators() -> None:
    """What it reads and writes counts, what it makes on the way does not."""
    passes = passes_of(lambda x, w: chain(x, w), (16, 16), (16, 16))
    matrix = 16 * 16 * 4
    nothing = [0.0] * len(passes.graph.operations)
    bytes_only = fused(passes, nothing, bandwidth=1.0, launch=0.0)
    kernels_only = fused(passes, nothing, bandwidth=float("inf"), launch=1.0)
    product = next(i for i, op in enumerate(passes.graph.operations) if op.kind == "product")
    forward = forward_program(passes, saved(passes, frozenset({product})))
    # the product is read, exp's result is written for the next product
    assert bytes_only.of(forward) == 2 * matrix
    assert kernels_only.of(forward) == 1
    all_kept = forward_program(passes, saved(passes, passes.needed))
    # sine's derivative is kept too; it is made of the product by a kernel of its own
    assert kernels_only.of(all_kept) == 2
    assert bytes_only.of(all_kept) > 2 * matrix


def test_products_cost_the_same_either_way() -> None:
    passes = passes_of(lambda x, w: x @ w @ w, (8, 8), (8, 8))
    seconds = [float(op.kind == "product") for op in passes.graph.operations]
    forward = forward_program(passes, saved(passes, passes.needed))
    assert one_by_one(seconds).of(forward) == 2
    assert fused(passes, seconds, bandwidth=1e30, launch=0.0).of(forward) == 2


def attention(keys: Tensor, w: Tensor, v: Tensor, query: Tensor) -> Tensor:
    return (torch.tanh(keys + (query @ w).unsqueeze(1)) * v).sum(-1).softmax(1).sum(0)


def test_running_light_operators_again_is_nearly_free_when_they_are_fused() -> None:
    passes = passes_of(attention, (4, 64, 16), (16, 16), (16,), (4, 16))
    kept = bidirectional(passes)
    work = [float(op.work.read_bytes + op.work.written_bytes) for op in passes.graph.operations]
    plain = one_by_one(work)
    together = fused(passes, work, bandwidth=1.0, launch=0.0)
    for prices in (plain, together):
        all_kept = estimate(passes, Plan("", passes.needed), prices)
        assert abs(all_kept.seconds_added) < 1e-6 * prices.step_seconds
    costs = [
        estimate(passes, Plan("", kept), prices).seconds_added / prices.step_seconds
        for prices in (plain, together)
    ]
    assert costs[0] > 0.1
    assert costs[1] < costs[0] / 3


def moved_statistics() -> fx.GraphModule:
    """A product, and a batch norm's running mean, which is moved and copied into its buffer."""
    aten, graph = torch.ops.aten, fx.Graph()
    with FakeTensorMode():
        x, w, mean = (graph.placeholder(name) for name in ("primals_1", "primals_2", "primals_3"))
        for node, shape in ((x, (8, 4)), (w, (4, 4)), (mean, (4,))):
            node.meta["val"] = torch.empty(shape)
    y = graph.call_function(aten.mm.default, (x, w))
    moved = graph.call_function(
        aten.add.Tensor, (graph.call_function(aten.mean.dim, (y, [0])), mean)
    )
    graph.output((graph.call_function(aten.copy_.default, (mean, moved)), y))
    return fx.GraphModule(nn.Module(), graph)


def h200() -> Machine:
    machine = _from_sheet("NVIDIA H200", "data sheet")
    assert machine is not None
    return machine


def test_moving_statistics_is_part_of_the_kernel_that_makes_them() -> None:
    passes = Passes(read_graph(moved_statistics()), 2)
    kinds = {op.target: op.kind for op in passes.graph.operations}
    assert kinds["aten.copy_.default"] == "opaque"
    found = {op.target: within_a_kernel(op) for op in passes.graph.operations}
    assert found["aten.copy_.default"]
    assert not found["aten.mm.default"]
    seconds = dict(zip(kinds, joint.prices_of(passes, fuses=True).seconds, strict=True))
    alone = dict(zip(kinds, joint.prices_of(passes, fuses=False).seconds, strict=True))
    launch = joint.machine_of(torch.device("cpu")).launch_s
    assert seconds["aten.copy_.default"] == pytest.approx(alone["aten.copy_.default"] - launch)
    assert seconds["aten.mm.default"] == alone["aten.mm.default"]


def test_a_kernel_of_generated_code_takes_what_the_host_takes_to_launch_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More than the driver's part of it."""
    monkeypatch.setattr(joint, "machine_of", lambda _: h200())
    passes = passes_of(lambda x, w: chain(x, w), (16, 16), (16, 16))
    prices = joint.prices_of(passes, fuses=True)
    assert prices.launch == h200().compiled_launch_s > h200().launch_s
    product = next(i for i, op in enumerate(passes.graph.operations) if op.kind == "product")
    one_more = prices.kernel_seconds(0, launches=2) - prices.kernel_seconds(0)
    assert one_more == pytest.approx(h200().compiled_launch_s)
    kept = saved(passes, frozenset({product}))
    # one kernel for all that lies between the two products
    cheap = prices.of(forward_program(passes, kept)) - 2 * prices.seconds[product]
    assert cheap == pytest.approx(h200().compiled_launch_s, rel=0.01)
