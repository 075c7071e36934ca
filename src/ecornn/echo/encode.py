"""Kept results in fewer bytes, without loss: booleans as bits.

What the forward pass hands over as a boolean a byte (masks of dropout, of comparisons) is packed
eight to a byte after it was read there last, and unpacked in the backward pass just before it is
first read. Plain torch operators, and the exact inverse.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx

Modules = tuple[fx.GraphModule, fx.GraphModule]


def bits_of(mask: Tensor) -> Tensor:
    """A byte for eight booleans, in the order of the dimensions; the last one filled with zeros."""
    flat = mask.reshape(-1)
    padded = torch.nn.functional.pad(flat, (0, -flat.shape[0] % 8)).view(-1, 8)
    return torch.where(padded, _powers(mask), 0).sum(-1, dtype=torch.uint8)


def mask_of(bits: Tensor, shape: torch.Size) -> Tensor:
    flat = torch.bitwise_and(bits.unsqueeze(-1), _powers(bits)).ne(0).view(-1)
    return flat[: shape.numel()].view(shape)


def there_and_back(mask: FakeTensor) -> fx.GraphModule:
    """The operators that pack a mask and unpack it."""
    with mask.fake_mode, torch.no_grad():
        return make_fx(lambda given: mask_of(bits_of(given), mask.shape))(mask)


def _powers(like: Tensor) -> Tensor:
    eight = torch.arange(8, dtype=torch.uint8, device=like.device)
    return torch.bitwise_left_shift(torch.ones_like(eight), eight)


def masks_as_bits(modules: Modules, own_outputs: int) -> Modules:
    """Change both graphs in place. `own_outputs`: how many of the forward graph's outputs are the
    model's; the others are kept. Masks that the model is given, or returns, stay as they are."""
    forward, backward = modules
    (out,) = forward.graph.find_nodes(op="output")
    results: list[Any] = list(out.args[0])
    theirs = {*results[:own_outputs], *forward.graph.find_nodes(op="placeholder")}
    places = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    # of each graph by itself; what is inserted reads no mask
    order = {node: k for module in modules for k, node in enumerate(module.graph.nodes)}
    for k, kept in enumerate(results[own_outputs:], own_outputs):
        there = places.get(kept.name) if isinstance(kept, fx.Node) else None
        if there is None or not there.users or kept in theirs or not _is_worth_it(kept):
            continue
        shape = kept.meta["val"].shape
        # as soon as the forward pass has read it: from then on it takes an eighth
        last = max((kept, *(u for u in kept.users if u is not out)), key=order.__getitem__)
        with forward.graph.inserting_before(last.next):
            packed = _inserted(forward.graph, bits_of, kept)
        results[k] = packed
        with backward.graph.inserting_after(there):
            arrives = backward.graph.placeholder(f"{there.name}_bits")
        arrives.meta["val"] = packed.meta["val"]
        packed._rename(arrives.name)  # what is handed over is known by its name
        first = min(there.users, key=order.__getitem__)
        with backward.graph.inserting_before(first):
            unpacked = _inserted(backward.graph, partial(mask_of, shape=shape), arrives)
        there.replace_all_uses_with(unpacked)
        backward.graph.erase_node(there)
    out.args = (tuple(results),)
    for module in modules:
        module.graph.lint()
        module.recompile()
    return modules


def _is_worth_it(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, FakeTensor) or value.dtype is not torch.bool:
        return False
    if any(not isinstance(size, int) for size in value.shape):
        return False  # a size that is a symbol: the number of bits is not known
    # a view of a larger mask keeps all of it; one that is not dense would change its strides
    whole = value.untyped_storage().nbytes() == value.numel()
    return whole and value.is_contiguous() and value.numel() > 8


def _inserted(graph: fx.Graph, function: Callable[[Tensor], Tensor], source: fx.Node) -> fx.Node:
    """The operators of a function of one result, where nodes are inserted now."""
    value: FakeTensor = source.meta["val"]
    with value.fake_mode, torch.no_grad():
        traced = make_fx(function)(value)
    (given,) = traced.graph.find_nodes(op="placeholder")
    (out,) = traced.graph.find_nodes(op="output")
    made = {given: source}
    for node in traced.graph.nodes:
        if node.op not in ("placeholder", "output"):
            made[node] = graph.node_copy(node, made.__getitem__)
    return made[out.args[0]]
