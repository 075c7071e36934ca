"""Kept results in other forms (`forms.py`), written into the two passes.

A result takes its other form after it was read last in the forward pass, and is made again in the
backward pass just before it is first read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.reductions import StorageWeakRef

from ecornn.echo.forms import BITS, Form
from ecornn.echo.graph import number_of_the_call

Modules = tuple[fx.GraphModule, fx.GraphModule]
#: Which form a kept result takes; None if it stays as it is.
Choose = Callable[[fx.Node], Form | None]


def encode(modules: Modules, own_outputs: int, choose: Choose) -> list[tuple[fx.Node, Form]]:
    """Change both graphs in place; told is what took which form. `own_outputs`: how many of the
    forward graph's outputs are the model's; the others are kept. What the model is given, or
    returns, stays as it is, and so does what lies in memory that anything else keeps."""
    forward, backward = modules
    (out,) = forward.graph.find_nodes(op="output")
    results: list[Any] = list(out.args[0])
    theirs = [*results[:own_outputs], *forward.graph.find_nodes(op="placeholder")]
    kept = [node for node in results[own_outputs:] if isinstance(node, fx.Node)]
    holders = [memory for node in (*theirs, *kept) if (memory := _memory(node)) is not None]
    places = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    # of each graph by itself; what is inserted reads no other result
    order = {node: k for module in modules for k, node in enumerate(module.graph.nodes)}
    found: list[tuple[fx.Node, Form]] = []
    for node in kept:
        there = places.get(node.name)
        if there is None or not there.users or node in theirs or not _alone(node, holders):
            continue
        form = choose(node)
        if form is None:
            continue
        # as soon as the forward pass has read it: from then on it takes less
        last = max((node, *(u for u in node.users if u is not out)), key=order.__getitem__)
        with forward.graph.inserting_before(last.next):
            packed = _inserted(forward.graph, form.there, [node])
        arrives = _arriving(backward, there, packed, form)
        first = min(there.users, key=order.__getitem__)
        like: Tensor = node.meta["val"]
        with backward.graph.inserting_before(first):
            (made,) = _inserted(backward.graph, lambda *g: (form.back(g, like),), arrives)  # noqa: B023
        there.replace_all_uses_with(made)
        backward.graph.erase_node(there)
        k = results.index(node, own_outputs)
        results[k : k + 1] = packed
        found.append((node, form))
    out.args = (tuple(results),)
    for module in modules:
        module.graph.lint()
        module.recompile()
    return found


def masks_as_bits(modules: Modules, own_outputs: int) -> Modules:
    encode(modules, own_outputs, lambda node: BITS if can_be_bits(node) else None)
    return modules


def can_be_bits(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, FakeTensor) or value.dtype is not torch.bool:
        return False
    if any(not isinstance(size, int) for size in value.shape):
        return False  # a size that is a symbol: the number of bits is not known
    # one that is not dense would change its strides
    return value.is_contiguous() and value.numel() > 8


def _arriving(
    backward: fx.GraphModule, there: fx.Node, packed: Sequence[fx.Node], form: Form
) -> list[fx.Node]:
    """What is handed over is known by its name, in both passes."""
    arrives: list[fx.Node] = []
    for name, node in zip(form.names(there.name), packed, strict=False):
        with backward.graph.inserting_after(arrives[-1] if arrives else there):
            arrives.append(backward.graph.placeholder(name))
        arrives[-1].meta["val"] = node.meta["val"]
        node._rename(arrives[-1].name)
    return arrives


def _memory(node: Any) -> Any:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, FakeTensor) or value.layout is not torch.strided:
        return None
    return StorageWeakRef(value.untyped_storage())


def _alone(node: fx.Node, holders: Sequence[Any]) -> bool:
    """Nothing else refers to its memory, and it refers to all of that: a view of a larger result
    keeps all of it in any case."""
    memory = _memory(node)
    if memory is None or holders.count(memory) != 1:
        return False
    value: Tensor = node.meta["val"]
    size, shown = value.untyped_storage().nbytes(), value.numel() * value.itemsize
    return bool(number_of_the_call(size) == number_of_the_call(shown))


def _inserted(
    graph: fx.Graph, function: Callable[..., tuple[Tensor, ...]], sources: Sequence[fx.Node]
) -> list[fx.Node]:
    """The operators of a function, where nodes are inserted now; its results."""
    values = [source.meta["val"] for source in sources]
    with values[0].fake_mode, torch.no_grad():
        traced = make_fx(function)(*values)
    (out,) = traced.graph.find_nodes(op="output")
    made = dict(zip(traced.graph.find_nodes(op="placeholder"), sources, strict=True))
    for node in traced.graph.nodes:
        if node.op not in ("placeholder", "output"):
            made[node] = graph.node_copy(node, made.__getitem__)
    return [made[result] for result in out.args[0]]
