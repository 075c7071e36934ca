"""From a joint graph and what to keep of it to a forward and a backward graph.

The only place that builds graphs. What is needed and not kept is run again in the backward graph.
"""

from __future__ import annotations

from torch import fx
from torch._functorch.partitioners import _extract_fwd_bwd_modules

from ecornn.echo.graph import Graph
from ecornn.echo.passes import Passes


def saved(passes: Passes, kept: frozenset[int]) -> list[int]:
    """Everything that goes from the forward to the backward pass: what is kept, and the inputs that
    it or what is run again reads. A tensor each: an operation of several results is passed by those
    that are read."""
    graph = passes.graph
    found: set[int] = set()
    seen: set[int] = set()
    waiting = list(passes.needed)
    while waiting:
        i = waiting.pop()
        if i in seen:
            continue
        seen.add(i)
        if i in kept or graph.operations[i].kind == "input":
            found.add(i)
        else:
            waiting += graph.operations[i].uses
    return sorted(_one_by_one(graph, found, seen))


def _one_by_one(graph: Graph, found: set[int], seen: set[int]) -> set[int]:
    several = {i for i in found if graph.operations[i].several}
    parts = {i for i in seen if set(graph.operations[i].uses) & several}
    return (found - several) | parts


def split(
    module: fx.GraphModule, passes: Passes, kept: frozenset[int]
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """(forward graph, backward graph)"""
    nodes = {node.name: node for node in module.graph.nodes}
    names = [passes.graph.operations[i].name for i in saved(passes, kept)]
    forward, backward = _extract_fwd_bwd_modules(
        module,
        [nodes[name] for name in names],
        saved_sym_nodes=[],
        num_fwd_outputs=passes.forward_outputs,
    )
    return forward, without_unread(backward)


def without_unread(module: fx.GraphModule) -> fx.GraphModule:
    """Remove what nobody reads. torch leaves random draws there, since they move the generator; in
    a backward pass that is just why they must go: the model itself draws nothing there."""
    for node in reversed(module.graph.nodes):
        if not node.users and node.op not in ("placeholder", "output"):
            module.graph.erase_node(node)
    module.recompile()
    return module
