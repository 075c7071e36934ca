"""What is estimated for a plan is what the graphs hold that are built for it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx

from ecornn.echo.analysis.liveness import simulate
from ecornn.echo.graph import read_graph
from ecornn.echo.passes import Passes
from ecornn.echo.plan.bidirectional import bidirectional
from ecornn.echo.plan.estimate import Plan, estimate
from ecornn.echo.plan.prices import one_by_one
from ecornn.echo.rewrite import split
from ecornn.echo.schedule import FOR_ALL, backward_program, saved
from support.joints import joint_of, leaf
from support.programs import PROGRAMS, function_of, two_hundred


def peaks_of_graphs(joint: fx.GraphModule, passes: Passes, plan: Plan) -> tuple[int, int]:
    forward, backward = (read_graph(m) for m in split(joint, passes, plan.kept, plan.window))
    own = {forward.operations[i].name for i in forward.inputs}
    held = [i for i in backward.inputs if backward.operations[i].name in own]
    beside = sum(
        held_by_the_caller_alone(passes, {backward.operations[i].name for i in backward.inputs})
    )
    return simulate(forward, forward.inputs).peak_bytes, simulate(
        backward, held
    ).peak_bytes + beside


def held_by_the_caller_alone(passes: Passes, taken: set[str]) -> list[int]:
    """Bytes of inputs and results that the backward graph, which is given these names, does not
    get."""
    graph, outputs = passes.graph, passes.graph.outputs[: passes.forward_outputs]
    whose = [i for i in graph.inputs if i not in passes.backward]
    whose += [i for i in outputs if i is not None]
    arriving = [
        op for i, op in enumerate(graph.operations) if i not in passes.backward and op.name in taken
    ]
    gets = {s for op in arriving for s in op.holds}
    held = {s for i in whose for s in graph.operations[i].holds}
    return [graph.storages[s] for s in held - gets]


@two_hundred
@given(
    program=PROGRAMS,
    two_results=st.booleans(),
    window=st.sampled_from([0, 2, 5, FOR_ALL]),
    echo=st.booleans(),
)
def test_estimated_peaks_are_those_of_the_graphs(
    program: list[tuple[str, int, int]], two_results: bool, window: int, echo: bool
) -> None:
    x, y = (torch.randn(4, 6, requires_grad=True) for _ in range(2))
    joint = joint_of(function_of(program, two_results=two_results), x, y)
    passes = Passes(read_graph(joint), 2 if two_results else 1)
    plan = Plan("", bidirectional(passes) if echo else passes.needed, window)
    found = estimate(passes, plan, one_by_one([0.0] * len(passes.graph.operations)))
    both = found.forward_peak, found.backward_peak + found.beside
    assert both == peaks_of_graphs(joint, passes, plan)


def far_apart(x: Tensor, w: Tensor) -> Tensor:
    """One large value from a small one, read at both ends of the backward pass."""
    large = (x @ w).unsqueeze(1).expand(8, 64, 8).sin()
    first = (large * large.cos()).sum(1)
    for _ in range(6):
        first = (first @ w).tanh()
    middle = (first.unsqueeze(1) * torch.ones(8, 64, 8)).exp().sum(1)
    return (large * middle.unsqueeze(1)).sum()


def test_two_copies_where_one_would_be_alive_for_long() -> None:
    passes = Passes(read_graph(joint_of(far_apart, *map(leaf, ((8, 8), (8, 8))))), 1)
    prices = one_by_one([1.0] * len(passes.graph.operations))
    kept = bidirectional(passes)
    once, twice = (estimate(passes, Plan("", kept, w), prices) for w in (FOR_ALL, 4))
    assert twice.seconds_added > once.seconds_added
    assert twice.backward_peak < once.backward_peak


@pytest.mark.parametrize("window", [0, FOR_ALL])
def test_nothing_is_run_again_where_all_is_kept(window: int) -> None:
    passes = Passes(read_graph(joint_of(far_apart, *map(leaf, ((8, 8), (8, 8))))), 1)
    program = backward_program(passes, saved(passes, passes.needed), window)
    again = [passes.graph.operations[i] for i in program.again(passes)]
    assert [op for op in again if op.kind != "constant" and op.uses] == []
