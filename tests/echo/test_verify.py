"""A split that computes something else is found out before it runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._functorch.partitioners import default_partition

from ecornn.echo.graph import read_graph
from ecornn.echo.passes import Passes
from ecornn.echo.plan.bidirectional import bidirectional
from ecornn.echo.rewrite import duplicate, split, without_unread_draws
from ecornn.echo.verify import differences, refusal


def model(x: Tensor, w: Tensor) -> tuple[Tensor]:
    hidden = F.dropout(torch.tanh(x @ w).sin(), 0.5)
    return ((hidden @ w).exp() * x,)


def joint_of(function: Callable[..., Any] = model) -> tuple[fx.GraphModule, Passes]:
    inputs = tuple(torch.randn(6, 6, requires_grad=True) for _ in range(2))
    joint: fx.GraphModule = aot_export_joint_simple(function, inputs, trace_joint=True)
    return joint, Passes(read_graph(joint), 1)


Splitter = Callable[[fx.GraphModule, Passes], tuple[fx.GraphModule, fx.GraphModule]]


def echo(joint: fx.GraphModule, passes: Passes) -> tuple[fx.GraphModule, fx.GraphModule]:
    return split(duplicate(joint), passes, bidirectional(passes), 1)


def stock(joint: fx.GraphModule, passes: Passes) -> tuple[fx.GraphModule, fx.GraphModule]:
    found: tuple[fx.GraphModule, fx.GraphModule] = default_partition(
        duplicate(joint), [], num_fwd_outputs=1
    )
    return without_unread_draws(found)


@pytest.mark.parametrize("splitter", [echo, stock])
def test_what_is_right_passes(splitter: Splitter) -> None:
    joint, passes = joint_of()
    assert differences(joint, passes, splitter(joint, passes)) == []


def first(module: fx.GraphModule, part: str) -> fx.Node:
    return next(node for node in module.graph.nodes if part in str(node.target))


def another_operator(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    first(backward, "cos").target = torch.ops.aten.sin.default


def another_source(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    node = first(backward, "aten.mm")
    node.args = (node.args[1], node.args[0])


def a_draw_again(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """As torch's own budget does it."""
    drawn = first(forward, "native_dropout")
    with backward.graph.inserting_before(first(backward, "aten.mm")):
        given = next(n for n in backward.graph.nodes if n.op == "placeholder")
        backward.graph.call_function(drawn.target, (given, 0.5, True))


def a_draw_left_out(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    drawn = first(forward, "native_dropout")
    drawn.target = torch.ops.aten.sort.default


def gradients_in_another_order(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    (output,) = backward.graph.find_nodes(op="output")
    output.args = (tuple(reversed(output.args[0])),)


def a_gradient_left_out(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    (output,) = backward.graph.find_nodes(op="output")
    output.args = ((None, output.args[0][1]),)


def one_handed_over_less(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    (output,) = forward.graph.find_nodes(op="output")
    output.args = (tuple(output.args[0][:-1]),)


def handed_over_in_another_order(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    (output,) = forward.graph.find_nodes(op="output")
    results = list(output.args[0])
    output.args = ((*results[:1], *reversed(results[1:])),)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (another_operator, "gradient 0.*computed otherwise"),
        (another_source, "gradient.*computed otherwise"),
        (a_draw_again, "run too often"),
        (a_draw_left_out, "computed otherwise"),
        (gradients_in_another_order, "computed otherwise"),
        (a_gradient_left_out, "gradient 0 is None"),
        (one_handed_over_less, "it is handed"),
        (handed_over_in_another_order, "it is handed"),
    ],
)
def test_what_is_wrong_is_told(change: Callable[..., None], told: str) -> None:
    joint, passes = joint_of()
    modules = echo(joint, passes)
    change(*modules)
    found = differences(joint, passes, modules)
    assert found
    assert re.search(told, "; ".join(found))


def test_what_torch_must_carry_out_is_refused() -> None:
    joint, passes = joint_of()
    assert refusal(joint, passes) is None
    first(joint, "tanh").meta["recompute"] = "must"
    assert "checkpoint" in str(refusal(joint, passes))


def test_memory_that_is_written_to_backwards_is_refused() -> None:
    joint, _ = joint_of()
    (output,) = joint.graph.find_nodes(op="output")
    gradient = output.args[0][1]
    with joint.graph.inserting_before(output):
        joint.graph.call_function(torch.ops.aten.copy_.default, (output.args[0][2], gradient))
    passes = Passes(read_graph(joint), 1)
    assert "writes to memory in the backward pass" in str(refusal(joint, passes))


def test_what_reads_memory_that_is_written_to_is_not_run_again() -> None:
    def function(x: Tensor, state: Tensor) -> tuple[Tensor]:
        return ((x * state.sin()).cos(),)

    joint, before = joint_of(function)
    sine = next(i for i, op in enumerate(before.graph.operations) if "sin" in op.target)
    assert before.graph.operations[sine].kind == "cheap"
    state = joint.graph.find_nodes(op="placeholder")[1]
    with joint.graph.inserting_after(first(joint, "aten.cos")):
        joint.graph.call_function(torch.ops.aten.copy_.default, (state, first(joint, "aten.cos")))
    after = read_graph(joint)
    assert after.operations[sine].kind == "opaque"
    passes = Passes(after, 1)
    assert sine in bidirectional(passes)
