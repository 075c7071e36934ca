"""Operators that a joint graph calls twice on the same values, called once.

torch's formulas for gradients make some results again that the forward pass has made: what a layer
norm has normalized, a weight cast for its product. Where both are one value, it is for the plan to
choose whether that is kept or made again; torch's min-cut plans graphs that were merged, too.

Only what may be run again is merged: whoever runs a product again in a backward pass does so to
save memory, and no plan would do it once the two were one.
"""

from __future__ import annotations

from torch import fx

from ecornn.echo.graph import RERUN
from ecornn.echo.passes import Passes
from ecornn.echo.rewrite import duplicate
from ecornn.echo.verify import value_numbers

#: What they hold is not the same at each call.
_EMPTY = ("aten.empty", "aten.new_empty")


def with_single_calls(module: fx.GraphModule, passes: Passes) -> fx.GraphModule:
    """The graph itself, if it calls nothing twice; else another one."""
    mergeable = _mergeable(passes)
    unlike = {op.name for op in passes.graph.operations if op.name not in mergeable}
    numbers = value_numbers(module, {}, unlike, {})
    first: dict[int, str] = {}
    in_place_of: dict[str, str] = {}
    for node in module.graph.nodes:
        if node.name in mergeable:
            name = first.setdefault(numbers[node], node.name)
            if name != node.name:
                in_place_of[node.name] = name
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


def _mergeable(passes: Passes) -> frozenset[str]:
    """By name. Two results that leave the graph stay two: whoever has them may write to one."""
    graph = passes.graph
    leaving = {s for i in graph.outputs if i is not None for s in graph.operations[i].holds}
    return frozenset(
        operation.name
        for operation in graph.operations
        if operation.kind in RERUN
        and leaving.isdisjoint(operation.holds)
        and not operation.target.startswith(_EMPTY)
    )
