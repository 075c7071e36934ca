"""From a joint graph and what to keep of it to a forward and a backward graph.

The only place that builds graphs. What is needed and not kept is run again in the backward graph,
where and as often as its program says.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import fx
from torch._functorch.partitioners import _extract_fwd_bwd_modules
from torch.fx import _lazy_graph_module
from torch.utils._pytree import tree_leaves

from ecornn.echo.graph import SYMBOLS, NotUnderstood
from ecornn.echo.passes import Passes
from ecornn.echo.schedule import FOR_ALL, Program, Step, backward_program, saved

Modules = tuple[fx.GraphModule, fx.GraphModule]


def split(
    module: fx.GraphModule, passes: Passes, kept: frozenset[int], window: int = FOR_ALL
) -> Modules:
    """(forward graph, backward graph)"""
    nodes = {node.name: node for node in module.graph.nodes}
    between = saved(passes, kept)
    passed = [nodes[passes.graph.operations[i].name] for i in between]
    numbers = [node for node in passed if isinstance(node.meta.get("val"), SYMBOLS)]
    forward, backward = _extract_fwd_bwd_modules(
        module,
        [node for node in passed if node not in numbers],
        saved_sym_nodes=numbers,
        num_fwd_outputs=passes.forward_outputs,
    )
    return forward, as_written(backward, passes, backward_program(passes, between, window))


def as_written(module: fx.GraphModule, passes: Passes, program: Program) -> fx.GraphModule:
    """A backward graph that runs what a program says. torch's own leaves random draws there that
    nobody reads, since they move the generator; in a backward pass that is just why they must go:
    the model itself draws nothing there."""
    nodes = {node.name: node for node in module.graph.nodes}
    graph = fx.Graph()
    arriving = {
        node.name: graph.node_copy(node) for node in module.graph.find_nodes(op="placeholder")
    }
    made: list[fx.Node | None] = []
    copies: Counter[str] = Counter()
    for place, step in enumerate(program.steps):
        operation = passes.graph.operations[step.operation]
        if place < program.given:
            made.append(arriving.get(operation.name))  # None: nobody reads it
            continue
        if (node := nodes.get(operation.name)) is None:
            raise NotUnderstood(f"torch left {operation.name} out of the backward graph")
        sources = {
            passes.graph.operations[used].name: made[source]
            for used, source in zip(operation.uses, step.sources, strict=True)
        }
        made.append(_copy(graph, node, sources, copies[operation.name]))
        copies[operation.name] += 1
    (output,) = module.graph.find_nodes(op="output")
    results = [
        old if place is None else made[place]
        for old, place in zip(output.args[0], program.outputs, strict=True)
    ]
    graph.output(type(output.args[0])(results)).meta = dict(output.meta)
    graph.lint()
    return _module(module, graph)


def _copy(
    graph: fx.Graph, node: fx.Node, sources: dict[str, fx.Node | None], earlier: int
) -> fx.Node:
    """The first copy has the node's name; others must not take a name that another node has."""
    name = f"{node.name}_again_{earlier}" if earlier else node.name
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda old: sources[old.name])
    new = graph.create_node(node.op, node.target, args, kwargs, name, node.type)
    new.meta = dict(node.meta)
    return new


def _module(like: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """Inductor has modules made whose Python code is written when it is asked for: of those that
    only lose a comparison it never is. A fifth of the time to plan a transformer was that."""
    make = getattr(_lazy_graph_module, "_make_graph_module", fx.GraphModule)
    found: fx.GraphModule = make(like, graph, class_name=type(like).__name__)
    return found


def duplicate(module: fx.GraphModule) -> fx.GraphModule:
    """A graph of its own over the same attributes: partitioners change the one they are given."""
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    results = graph.graph_copy(module.graph, copied)
    (output,) = module.graph.find_nodes(op="output")
    graph.output(results).meta = dict(output.meta)
    found = _module(module, graph)
    found.meta.update(module.meta)
    return found


def without_unread_draws(modules: Modules) -> Modules:
    """torch's partitioners leave a forward pass's random draw in the backward graph as well if what
    it is made of is there, although nobody reads it: it would move the generator once more."""
    forward, backward = modules
    drawn = {node.name for node in forward.graph.nodes if node.op == "call_function"}
    count = len(backward.graph.nodes)
    for node in reversed(backward.graph.nodes):
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if random and not node.users and node.name in drawn:
            backward.graph.erase_node(node)
    if len(backward.graph.nodes) < count:
        backward.recompile()
    return forward, backward


def program_of(module: fx.GraphModule, passes: Passes) -> Program:
    """A graph that was split off a joint graph as a program: its nodes have the names that they had
    there. Reading it anew would take as long as reading the joint graph."""
    place = {operation.name: i for i, operation in enumerate(passes.graph.operations)}
    nodes = [node for node in module.graph.nodes if node.op != "output"]
    for node in nodes:
        if node.name not in place:
            raise NotUnderstood(f"{node.name} is not of the joint graph")
    given = [node for node in nodes if node.op == "placeholder"]
    order = given + [node for node in nodes if node.op != "placeholder"]
    step = {node: k for k, node in enumerate(order)}
    steps = (
        Step(place[node.name], tuple(step[used] for used in node.all_input_nodes)) for node in order
    )
    (output,) = module.graph.find_nodes(op="output")
    leaving = tree_leaves(output.args[0], is_leaf=lambda leaf: leaf is None)
    return Program(tuple(steps), len(given), tuple(step.get(node) for node in leaving))
