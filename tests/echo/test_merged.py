"""What a joint graph calls twice on the same values is called once, unless that means something."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_module, make_boxed_func
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves

import ecornn
from ecornn.echo import pipeline
from ecornn.echo.graph import read_graph
from ecornn.echo.merged import with_single_calls
from ecornn.echo.options import read_memory
from ecornn.echo.passes import Passes
from ecornn.echo.pipeline import decide
from ecornn.echo.plan.estimate import Estimates, Plan
from ecornn.echo.request import Request
from ecornn.echo.rewrite import program_of
from support.joints import joint_of, leaf


class MadeAgain(torch.autograd.Function):
    """Keeps its input alone, and makes `function` of it again on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.function = function
        return function(x) * 2

    @staticmethod
    def backward(ctx: Any, *arriving: Any) -> Any:
        (x,) = ctx.saved_tensors
        return arriving[0] * ctx.function(x), None


def made_again(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: MadeAgain.apply(x, function)  # type: ignore[no-any-return, no-untyped-call]


def merged(joint: fx.GraphModule, outputs: int = 1) -> fx.GraphModule:
    return with_single_calls(joint, Passes(read_graph(joint), outputs))


def calls(module: fx.GraphModule) -> Counter[str]:
    return Counter(str(node.target) for node in module.graph.nodes if node.op == "call_function")


def returned(module: fx.GraphModule, *given: Tensor) -> list[Tensor]:
    return [one for one in tree_leaves(fx.Interpreter(module).run(*given)) if one is not None]


def test_a_result_that_is_made_again_is_one() -> None:
    x = leaf((4, 8))
    joint = joint_of(made_again(lambda x: torch.tanh(x).exp()), x)
    found = merged(joint)
    assert calls(joint)["aten.tanh.default"] == calls(joint)["aten.exp.default"] == 2
    assert calls(found)["aten.tanh.default"] == calls(found)["aten.exp.default"] == 1
    given = x.detach(), torch.randn(4, 8)
    for mine, theirs in zip(returned(found, *given), returned(joint, *given), strict=True):
        assert torch.equal(mine, theirs)


def test_a_graph_that_calls_nothing_twice_is_left_as_it_is() -> None:
    joint = joint_of(lambda x, w: F.relu(x @ w), leaf((4, 8)), leaf((8, 8)))
    assert merged(joint) is joint


def test_what_the_forward_pass_makes_twice_stays_two_if_it_is_large() -> None:
    """Merged, it would be there from the first time to the second, whatever the plan."""

    def twice(x: Tensor) -> Tensor:
        spread = [(x.unsqueeze(0) * x.unsqueeze(1)).tanh() for _ in range(2)]
        return spread[0].amax() + spread[1].sum() + x.exp().amax() + x.exp().sum()

    joint = joint_of(twice, leaf((16,)))
    assert calls(joint)["aten.exp.default"] == 2
    found = calls(merged(joint))
    assert found["aten.exp.default"] == 1
    assert found["aten.tanh.default"] == 2
    assert found["aten.unsqueeze.default"] < calls(joint)["aten.unsqueeze.default"]
    forward = [node for node in merged(joint).graph.nodes if str(node.target) == "aten.mul.Tensor"]
    assert sum(node.meta["val"].shape == (16, 16) for node in forward) >= 2


def by_hand(make: Callable[[fx.Graph, fx.Node, fx.Node], fx.Node]) -> fx.GraphModule:
    """A joint graph of x · x, and on the way back what is made of x and what arrives."""
    graph, mode = fx.Graph(), FakeTensorMode()
    x, arriving = graph.placeholder("primals_1"), graph.placeholder("tangents_1")
    y = graph.call_function(torch.ops.aten.mul.Tensor, (x, x))
    graph.output(([y], [make(graph, x, arriving)]))
    for node in (x, arriving):
        node.meta["val"] = mode.from_tensor(torch.ones(3))
    return fx.GraphModule(nn.Module(), graph)


def test_memory_that_is_made_empty_or_written_to_stays_two() -> None:
    aten = torch.ops.aten

    def two_of(make: Any, graph: fx.Graph, x: fx.Node) -> list[fx.Node]:
        return [graph.call_function(make, (x,)) for _ in range(2)]

    def times(graph: fx.Graph, arriving: fx.Node, two: list[fx.Node]) -> fx.Node:
        both = graph.call_function(aten.add.Tensor, tuple(two))
        return graph.call_function(aten.mul.Tensor, (arriving, both))

    def empty(graph: fx.Graph, x: fx.Node, arriving: fx.Node) -> fx.Node:
        return times(graph, arriving, two_of(aten.empty_like.default, graph, x))

    def written(graph: fx.Graph, x: fx.Node, arriving: fx.Node) -> fx.Node:
        two = two_of(aten.zeros_like.default, graph, x)
        kept = [graph.call_function(aten.copy_.default, (zeros, x)) for zeros in two]
        return times(graph, arriving, kept)

    def read(graph: fx.Graph, x: fx.Node, arriving: fx.Node) -> fx.Node:
        return times(graph, arriving, two_of(aten.zeros_like.default, graph, x))

    for make in (empty, written):
        module = by_hand(make)
        assert merged(module) is module
    assert calls(merged(by_hand(read)))["aten.zeros_like.default"] == 1


def test_products_stay_where_somebody_runs_them_again() -> None:
    joint = joint_of(made_again(lambda x: torch.tanh(x @ x)), leaf((8, 8)))
    assert calls(merged(joint)) == calls(joint)
    assert calls(joint)["aten.mm.default"] == 2


def test_draws_are_different_ones() -> None:
    joint = joint_of(lambda x: F.dropout(x, 0.5) + F.dropout(x, 0.5), leaf((4, 8)))
    name = "aten.native_dropout.default"
    assert calls(merged(joint))[name] == calls(joint)[name] == 2


def test_results_that_leave_the_graph_stay_two() -> None:
    joint = joint_of(lambda x: (torch.tanh(x), torch.tanh(x)), leaf((4, 8)))
    found = merged(joint, 2)
    first, second, *_ = returned(found, *(torch.ones(4, 8) for _ in range(3)))
    assert first.data_ptr() != second.data_ptr()


def test_numbers_of_other_types_are_others() -> None:
    joint = joint_of(lambda x: torch.add(x, 1).exp() * torch.add(x, 1.0).exp(), leaf((4, 8)))
    assert calls(merged(joint))["aten.add.Tensor"] == calls(joint)["aten.add.Tensor"]


def test_what_reads_memory_before_and_after_it_is_written_to_stays_two() -> None:
    graph = fx.Graph()
    x, buffer = graph.placeholder("primals_1"), graph.placeholder("primals_2")
    arriving = graph.placeholder("tangents_1")
    before = graph.call_function(torch.ops.aten.exp.default, (buffer,))
    graph.call_function(torch.ops.aten.copy_.default, (buffer, x))
    after = graph.call_function(torch.ops.aten.exp.default, (buffer,))
    total = graph.call_function(torch.ops.aten.add.Tensor, (before, after))
    graph.output(([total], [arriving, None]))
    mode = FakeTensorMode()
    for node in (x, buffer, arriving):
        node.meta["val"] = mode.from_tensor(torch.ones(3))
    module = fx.GraphModule(nn.Module(), graph)
    assert merged(module) is module


@pytest.mark.parametrize("memory", ["auto", "min"])
def test_torch_s_min_cut_is_one_of_ours_then(memory: str) -> None:
    """It plans graphs that were merged: what it keeps is what our plans can keep."""
    decisions = []

    def partition(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        request = Request(read_memory(memory), settings={"compiler": "inductor"})
        decisions.append(decide(joint, inputs, num_fwd_outputs, request))
        return decisions[-1].modules

    def compiler(module: fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(module.forward)

    model, x = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh()), torch.randn(64, 16)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    run = aot_module(
        model, compiler, compiler, partition_fn=partition, decompositions=select_decomp_table()
    )
    found = torch.autograd.grad(run(x).square().sum(), list(model.parameters()))
    torch.testing.assert_close(found, expected)
    (decision,) = decisions
    assert not decision.refused
    joint = decision.candidate("torch's min-cut").joint
    assert joint is not None
    assert joint.merged_from is not None
    estimate = decision.candidate("torch's min-cut").estimate
    assert decision.chosen.estimate.peak() <= estimate.peak()
    whole = decision.candidate("keep all")  # of the graph as it was written, told beside the other
    assert whole.joint is joint.merged_from
    assert whole.modules is not None
    programs = [program_of(module, joint.merged_from.passes) for module in whole.modules]
    seconds = sum(map(joint.merged_from.prices.of, programs))
    assert whole.estimate.seconds_added + joint.prices.step_seconds == pytest.approx(seconds)
    apart = [c for c in decision.candidates if c.strategy.endswith("equal calls apart")]
    assert bool(apart) == (memory != "auto")
    kept = pipeline.kept_by(decision.candidate("torch's min-cut"))
    assert Estimates(joint.passes, joint.prices).of(Plan("", kept)) == estimate


def test_gradients_of_a_model_whose_graph_is_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def watched(module: fx.GraphModule, passes: Passes) -> fx.GraphModule:
        found.append(with_single_calls(module, passes) is not module)
        return with_single_calls(module, passes)

    monkeypatch.setattr("ecornn.echo.joint.with_single_calls", watched)
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()]
    model = nn.Sequential(*layers, nn.Linear(16, 16), nn.LayerNorm(16)).double()
    x = torch.randn(8, 16, dtype=torch.float64)
    expected = torch.autograd.grad(model(x).exp().sum(), list(model.parameters()))
    run = ecornn.compile(model, codegen="inductor")
    gradients = torch.autograd.grad(run(x).exp().sum(), list(model.parameters()))
    assert found == [True]
    torch.testing.assert_close(gradients, expected)
    torch._dynamo.reset()


def test_operators_that_run_one_by_one_are_planned_as_they_are_written() -> None:
    joint = joint_of(made_again(lambda x: torch.tanh(x).exp()), leaf((4, 8)))
    inputs = [node.meta["val"] for node in joint.graph.find_nodes(op="placeholder")]
    for compiler, is_merged in (({}, False), ({"compiler": "inductor"}, True)):
        decision = decide(joint, inputs, 1, Request(settings=dict(compiler)))
        planned = [c.joint for c in decision.candidates if c.joint is not None]
        assert any(one.merged_from is not None for one in planned) == is_merged


def test_a_checkpoint_in_the_model_is_still_seen() -> None:
    """Its calls may be equal to others that are not its own."""
    joint = joint_of(made_again(lambda x: torch.tanh(x).exp()), leaf((4, 8)))
    inputs = [node.meta["val"] for node in joint.graph.find_nodes(op="placeholder")]
    *_, last = (node for node in joint.graph.nodes if "tanh" in str(node.target))
    last.meta["recompute"] = "PREFER_RECOMPUTE"
    decision = decide(joint, inputs, 1, Request(settings={"compiler": "inductor"}))
    assert "torch.utils.checkpoint" in (decision.fallback or "")
