"""Two hundred random programs: each is traced and split once, and all that is promised of a split
is asked of it. And forty through the backend as it is used."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx
from torch._functorch.aot_autograd import aot_function, make_boxed_func

import ecornn
from ecornn.echo.analysis.liveness import simulate
from ecornn.echo.graph import read_graph
from ecornn.echo.passes import Passes
from ecornn.echo.plan.bidirectional import bidirectional
from ecornn.echo.plan.estimate import Plan, estimate
from ecornn.echo.plan.prices import one_by_one
from ecornn.echo.rewrite import duplicate, split
from ecornn.echo.schedule import FOR_ALL
from ecornn.echo.verify import differences
from ecornn.errors import InvalidInput
from support.programs import PROGRAMS, forty, function_of, two_hundred
from support.replay import assert_simulated_as_replayed

Modules = tuple[fx.GraphModule, fx.GraphModule]


def peaks_of_graphs(modules: Modules, passes: Passes) -> tuple[int, int]:
    forward, backward = map(read_graph, modules)
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


def split_as_estimated(joint: fx.GraphModule, passes: Passes, plan: Plan) -> Modules:
    modules = split(duplicate(joint), passes, plan.kept, plan.window)
    found = estimate(passes, plan, one_by_one([0.0] * len(passes.graph.operations)))
    both = found.forward_peak, found.backward_peak + found.beside
    assert both == peaks_of_graphs(modules, passes)
    return modules


@two_hundred
@given(
    program=PROGRAMS,
    two_results=st.booleans(),
    window=st.sampled_from([0, 2, 5, FOR_ALL]),
    all_kept_too=st.booleans(),
)
def test_gradients_peaks_and_estimates(
    program: list[tuple[str, int, int]], two_results: bool, window: int, all_kept_too: bool
) -> None:
    """Gradients are eager's, in float64, so that what was fused or ordered otherwise does not blur
    what is wrong; the peak of each graph is as simulated, and both as estimated for the plan."""
    ran: list[tuple[fx.GraphModule, list[Any]]] = []

    def compiler(module: fx.GraphModule, example: Any) -> Any:
        def run(*args: Any) -> Any:
            ran.append((module, list(args)))
            return module(*args)

        return make_boxed_func(run)

    def partition(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Modules:
        passes = Passes(read_graph(joint), num_fwd_outputs)
        if all_kept_too:
            split_as_estimated(joint, passes, Plan("", passes.needed, window))
        modules = split_as_estimated(joint, passes, Plan("", bidirectional(passes), window))
        assert differences(joint, passes, modules) == []
        return modules

    function = function_of(program, two_results=two_results)
    compiled = aot_function(
        function, fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition
    )
    torch.manual_seed(1)
    x, y = (torch.randn(4, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    found = []
    for run in (function, compiled):
        torch.manual_seed(2)
        results = run(x, y)
        results = results if isinstance(results, tuple | list) else (results,)
        loss = sum((r * torch.linspace(-1, 1, r.numel()).view_as(r)).sum() for r in results)
        found.append([*results, *torch.autograd.grad(loss, (x, y))])
    for eager, split_ in zip(*found, strict=True):
        torch.testing.assert_close(split_, eager, rtol=1e-10, atol=1e-10)
    assert len(ran) == 2
    for module, inputs in ran:
        assert_simulated_as_replayed(module, inputs)


@forty
@given(
    program=PROGRAMS,
    two_results=st.booleans(),
    memory=st.sampled_from(["auto", "min", 0.7]),
    masks=st.sampled_from(["auto", "bits"]),
)
def test_the_backend_gives_eager_s_bits(
    program: list[tuple[str, int, int]], two_results: bool, memory: str | float, masks: str
) -> None:
    torch._dynamo.reset()
    function = function_of(program, two_results=two_results)
    torch.manual_seed(1)
    x, y = (torch.randn(4, 6, requires_grad=True) for _ in range(2))

    def trained(run: Any) -> list[torch.Tensor]:
        torch.manual_seed(2)
        results = run(x, y)
        results = results if isinstance(results, tuple | list) else (results,)
        loss = sum((r * torch.linspace(-1, 1, r.numel()).view_as(r)).sum() for r in results)
        return [*results, *torch.autograd.grad(loss, (x, y))]

    def compiled(memory: str | float) -> Any:
        return ecornn.compile(function, memory=memory, masks=masks, codegen="eager")

    try:
        found = trained(compiled(memory))
    except InvalidInput:  # not all can do with so little
        assert memory == 0.7
        found = trained(compiled("min"))
    for one, other in zip(found, trained(function), strict=True):
        assert torch.equal(one, other)
