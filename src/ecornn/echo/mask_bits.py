"""Masks as bits in a joint graph: one more thing that a plan can keep, at its price.

What the backward pass reads of a mask is made of its bits there, and a plan keeps the mask or the
bits, whichever serves. Gradients of ReLU and its like, where they are operators of their own, read
a mask in the place of a result that they only compare, if it is there for nobody else.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, fx

from ecornn.echo.encode import inserted, maker, way, why_no_bits
from ecornn.echo.forms import BITS
from ecornn.echo.gradients_by_masks import BY_MASKS
from ecornn.echo.graph import NotUnderstood
from ecornn.echo.passes import Passes
from ecornn.echo.plan.prices import DRAWN
from ecornn.echo.rewrite import duplicate
from ecornn.echo.verify import joint_differences

#: A mask, and those that read it in the backward pass.
Mask = tuple[fx.Node, list[fx.Node]]


def with_masks_as_bits(
    module: fx.GraphModule, passes: Passes
) -> tuple[fx.GraphModule, tuple[str, ...], frozenset[str]]:
    """Another graph of the same computation, and the names of what are bits there and of what makes
    masks of them again. `passes` are those of the graph."""
    changed = duplicate(module)
    masks = [*_of_booleans(changed, passes), *_of_gradients(changed, passes)]
    order = {node: k for k, node in enumerate(changed.graph.nodes)}
    names: list[str] = []
    makes_again: set[str] = set()
    for mask, readers in masks:
        like: Tensor = mask.meta["val"]
        with changed.graph.inserting_before(mask.next):
            *_, bits = _inserted_like(mask, BITS.there, [mask])
        bits._rename(BITS.names(mask.name)[0])
        with changed.graph.inserting_before(min(readers, key=order.__getitem__)):
            made = _inserted_like(mask, lambda b: (BITS.back((b,), like),), [bits])  # noqa: B023
        for reader in readers:
            reader.replace_input_with(mask, made[-1])
        names.append(bits.name)
        makes_again |= {node.name for node in made}
    changed.graph.lint()
    changed.recompile()
    if wrong := joint_differences(module, changed, passes):
        raise NotUnderstood(f"not the same computation: {wrong[0]}")
    return changed, tuple(names), frozenset(makes_again)


def _of_booleans(changed: fx.GraphModule, passes: Passes) -> list[Mask]:
    """Those that the graph has. What can be made again of something that is there anyway need not
    be kept, and is not worth its bits."""
    nodes, operations = _by_name(changed), passes.graph.operations
    holders = Counter(s for i in passes.needed for s in operations[i].holds)
    found = []
    for i in sorted(passes.needed):
        mask, operation = nodes[operations[i].name], operations[i]
        value = mask.meta.get("val")
        if not isinstance(value, Tensor) or value.dtype is not torch.bool or why_no_bits(value):
            continue
        if any(operations[used].target.startswith(DRAWN) for used in operation.uses):
            continue  # its seed takes less
        alone = all(holders[s] == 1 and s not in passes.held_anyway for s in operation.holds)
        of = {s for used in operation.uses for s in operations[used].holds}
        there = all(holders[s] or s in passes.held_anyway for s in of)
        if alone and not (operation.kind == "cheap" and of and there):
            names = {operations[r].name for r in passes.readers[i] if r in passes.backward}
            found.append((mask, [nodes[name] for name in sorted(names)]))
    return [(mask, readers) for mask, readers in found if readers]


def _of_gradients(changed: fx.GraphModule, passes: Passes) -> list[Mask]:
    """Masks of results that gradients only compare; the graph has these gradients written out then,
    as far as the backward pass reads such results for nothing else."""
    operations, nodes = passes.graph.operations, _by_name(changed)
    place = {operation.name: i for i, operation in enumerate(operations)}
    found: list[Mask] = []
    for target, by in BY_MASKS.items():
        for node in changed.graph.find_nodes(op="call_function", target=target):
            gradient, result, *further = node.args
            value: Tensor = result.meta["val"]
            i = place[result.name]
            if node.kwargs or i in passes.backward or why_no_bits(value):
                continue
            if not _only_compared(passes, nodes, i):
                continue
            _move_to_its_memory_s_maker(result)
            with changed.graph.inserting_before(result.next):
                *_, mask = _inserted_like(result, lambda x: (by.mask(x, *further),), [result])  # noqa: B023
            with changed.graph.inserting_before(node):
                made = _inserted_like(
                    node,
                    lambda m, g: (by.gradient(m, g, *further),),  # noqa: B023
                    [mask, gradient],
                )
            node.replace_all_uses_with(made[-1])
            changed.graph.erase_node(node)
            found.append((mask, list(mask.users)))
    return found


def _only_compared(passes: Passes, nodes: dict[str, fx.Node], i: int) -> bool:
    """Is a result's memory there between the passes for such gradients alone?"""
    operations = passes.graph.operations
    mine = set(operations[i].holds)
    if not mine or mine & passes.held_anyway:
        return False
    returned = {k for k in passes.graph.outputs if k is not None}
    for k in passes.needed:
        if mine.isdisjoint(operations[k].holds):
            continue
        for r in passes.readers[k]:
            reader: Any = nodes.get(operations[r].name)
            if r in passes.backward and reader is not None:
                name = operations[k].name
                if reader.target not in BY_MASKS or reader.args[0].name == name:
                    return False
        if k in returned:
            return False
    return True


def _move_to_its_memory_s_maker(view: fx.Node) -> None:
    """Its mask is made as soon as that is: the result need not be there until the backward pass."""
    root = maker(view)
    after = root
    for call in way(view, root, ()) or ():
        after.append(call)
        after = call


def _inserted_like(like: fx.Node, function: Any, sources: list[fx.Node]) -> list[fx.Node]:
    """All that makes one result, which is the last. Told as a part of what it stands beside: the
    module and the line of code."""
    before = set(like.graph.nodes)
    inserted(like.graph, function, sources)
    made = [node for node in like.graph.nodes if node not in before]
    told = {k: v for k, v in like.meta.items() if k in _ORIGINS}
    for node in made:
        node.meta = {**told, "val": node.meta["val"]}
    return made


_ORIGINS = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "partitioner_tag")


def _by_name(module: fx.GraphModule) -> dict[str, fx.Node]:
    return {node.name: node for node in module.graph.nodes}
