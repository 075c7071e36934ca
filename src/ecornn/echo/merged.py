"""Operators that a backward pass calls on values of the forward pass, called once.

torch's formulas for gradients make some results again that the forward pass has made: what a layer
norm has normalized, a weight cast for its product. Where both are one value, it is for the plan to
choose whether that is kept or made again; torch's min-cut plans graphs that were merged, too.

Only what may be run again is merged: whoever runs a product again in a backward pass does so to
save memory, and no plan would do it once the two were one. And within the forward pass nothing
that is larger than what it is made of, which is there until the second call anyway: no plan makes
something again there, and it would be there from the first call on.
"""

from __future__ import annotations

from torch import fx

from ecornn.echo.graph import RERUN, writes_to
from ecornn.echo.passes import Passes
from ecornn.echo.rewrite import duplicate
from ecornn.echo.verify import value_numbers

#: What they hold is not the same at each call.
_EMPTY = ("aten.empty", "aten.new_empty", "prims.empty")


def with_single_calls(module: fx.GraphModule, passes: Passes) -> fx.GraphModule:
    """The graph itself, if there is nothing to merge; else another one."""
    in_place_of = _equal_calls(module, passes)
    if not in_place_of:
        return module
    changed = duplicate(module)
    nodes = {node.name: node for node in changed.graph.nodes}
    for name, other in reversed(in_place_of.items()):
        nodes[name].replace_all_uses_with(nodes[other])
        changed.graph.erase_node(nodes[name])
    changed.graph.lint()
    changed.recompile()
    return changed


def _equal_calls(module: fx.GraphModule, passes: Passes) -> dict[str, str]:
    """By name: the calls in place of which another one can stand."""
    mergeable, forward = _mergeable(module, passes), _forward(passes)
    unlike = {op.name for op in passes.graph.operations if op.name not in mergeable}
    numbers = value_numbers(module, {}, unlike, {})
    first: dict[int, fx.Node] = {}
    found: dict[str, str] = {}

    def sources(node: fx.Node) -> list[str]:
        return [found.get(used.name, used.name) for used in node.all_input_nodes]

    for node in module.graph.nodes:
        if node.name not in mergeable:
            continue
        other = first.setdefault(numbers[node], node)
        if node.name in forward:
            there_anyway = forward[node.name] and sources(node) == sources(other)
            if not there_anyway:
                continue
        if other is not node:
            found[node.name] = other.name
    return found


def _forward(passes: Passes) -> dict[str, bool]:
    """By name, of what the forward pass runs whatever is kept: is it no larger than what it is made
    of?"""
    operations = passes.graph.operations
    waiting = [i for i in passes.graph.outputs[: passes.forward_outputs] if i is not None]
    # what draws or writes runs, whoever reads it
    once = (i for i, op in enumerate(operations) if op.kind in ("random", "opaque"))
    waiting += [i for i in once if i not in passes.backward]
    found: set[int] = set()
    while waiting:
        i = waiting.pop()
        if i not in found:
            found.add(i)
            waiting += operations[i].uses
    size = passes.graph.shown_bytes
    return {
        operations[i].name: size(i) <= max((size(u) for u in operations[i].uses), default=0)
        for i in found
    }


def _mergeable(module: fx.GraphModule, passes: Passes) -> frozenset[str]:
    """By name. Two results that leave the graph stay two, since whoever has them may write to one,
    and so does what the graph writes to."""
    graph = passes.graph
    written = {changed.name for node in module.graph.nodes for changed in writes_to(node)}
    apart = {s for op in graph.operations if op.name in written for s in op.holds}
    apart |= {s for i in graph.outputs if i is not None for s in graph.operations[i].holds}
    return frozenset(
        operation.name
        for operation in graph.operations
        if operation.kind in RERUN
        and apart.isdisjoint(operation.holds)
        and not operation.target.startswith(_EMPTY)
    )
