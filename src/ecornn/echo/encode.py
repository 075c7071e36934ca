"""Kept results in other forms (`forms.py`), written into the two passes.

A result takes its other form after it was read last in the forward pass, and is made again in the
backward pass just before it is first read.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.reductions import StorageWeakRef

from ecornn.echo.forms import BITS, Form
from ecornn.echo.graph import number_of_the_call, writes_to

Modules = tuple[fx.GraphModule, fx.GraphModule]
#: Which form a kept result takes; or why it stays as it is, "" where there is nothing to tell.
Choose = Callable[[fx.Node], "Form | str"]

#: As many would take a byte in any case.
FEWEST_BITS = 8


@dataclass
class Encoded:
    """What took which form, and of what did not, why."""

    encoded: list[tuple[fx.Node, Form]] = field(default_factory=list)
    left: list[tuple[fx.Node, str]] = field(default_factory=list)


def encode(modules: Modules, own_outputs: int, choose: Choose) -> Encoded:
    """Change both graphs in place. `own_outputs`: how many of the forward graph's outputs are the
    model's; the others are kept. What the model is given, or returns, stays as it is. Kept results
    that lie in one memory, as a result and its views do, take another form together: the one that
    made the memory does, and the others are made of it again."""
    forward, backward = modules
    (out,) = forward.graph.find_nodes(op="output")
    results: list[Any] = list(out.args[0])
    inputs = forward.graph.find_nodes(op="placeholder")
    given = {memory for node in inputs if (memory := memory_of(node)) is not None}
    returned = {m for node in results[:own_outputs] if (m := memory_of(node)) is not None}
    places = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    # of each graph by itself; what is inserted reads no other result
    order = {node: k for module in modules for k, node in enumerate(module.graph.nodes)}
    lying: dict[Any, list[fx.Node]] = {}
    for node in forward.graph.nodes:
        lying.setdefault(memory_of(node), []).append(node)
    found = Encoded()
    for memory, members in _by_memory(results[own_outputs:], given, places).items():
        chosen = _chosen(members, choose, set(places))
        if memory in returned and not isinstance(chosen, str):
            chosen = "the model returns it, or what lies in its memory"
        if isinstance(chosen, str):
            found.left += [(members[0], chosen)] if chosen else []
            continue
        source, form = chosen
        # as soon as the forward pass has read it: from then on it takes less
        sharing = lying[memory]
        readers = (u for node in sharing for u in node.users if u is not out)
        last = max((*sharing, *readers), key=order.__getitem__)
        with forward.graph.inserting_before(last.next):
            packed = inserted(forward.graph, form.there, [source])
        there = [places[member.name] for member in members]
        arrives = _arriving(backward, source.name, there[0], packed, form)
        first = min((u for place in there for u in place.users), key=order.__getitem__)
        like: Tensor = source.meta["val"]
        with backward.graph.inserting_before(first):
            (made,) = inserted(backward.graph, lambda *g: (form.back(g, like),), arrives)  # noqa: B023
            for member, place in zip(members, there, strict=True):
                place.replace_all_uses_with(_copied(backward.graph, member, source, made, places))
                backward.graph.erase_node(place)
        k = results.index(members[0], own_outputs)
        results[k : k + 1] = packed
        results[own_outputs:] = [one for one in results[own_outputs:] if one not in members]
        found.encoded.append((source, form))
    out.args = (tuple(results),)
    for module in modules:
        module.graph.lint()
        module.recompile()
    return found


def _by_memory(
    kept: Sequence[Any], given: Collection[Any], places: Mapping[str, fx.Node]
) -> dict[Any, list[fx.Node]]:
    """Kept results that the backward pass reads, those of the model's inputs left out."""
    found: dict[Any, list[fx.Node]] = {}
    for node in kept:
        memory = memory_of(node)
        there = places.get(node.name) if memory is not None else None
        if there is not None and there.users and memory not in given:
            found.setdefault(memory, []).append(node)
    return found


def _chosen(
    members: Sequence[fx.Node], choose: Choose, arriving: Collection[str]
) -> tuple[fx.Node, Form] | str:
    """What takes another form for all that lie in its memory, and which; or why nothing does."""
    root = maker(members[0])
    sources = [*members, root] if len(members) == 1 else [root]
    reasons = []
    for source in dict.fromkeys(sources):
        form = choose(source)
        if isinstance(form, str):
            reasons.append(form)
        elif not _has_all_of_its_memory(source):
            reasons.append("it is a part of a larger memory")
        elif any(way(member, source, arriving) is None for member in members):
            reasons.append("others that are kept lie in its memory, and cannot be made of it again")
        else:
            return source, form
    return reasons[0]


def maker(node: fx.Node) -> fx.Node:
    """Of the memory that a result lies in."""
    while (view := _view(node)) is not None:
        node = _first_argument(view[0])
    return node


def _view(node: fx.Node) -> list[fx.Node] | None:
    """The calls that make a view: one, or one that makes several and the taking out of this one."""
    if node.op != "call_function":
        return None
    calls = [_first_argument(node), node] if node.target is operator.getitem else [node]
    of, memory = _first_argument(calls[0]), memory_of(node)
    other = memory_of(of)
    if memory is None or other is None or memory != other or any(map(writes_to, calls)):
        return None
    return calls


def _first_argument(node: fx.Node) -> Any:
    return node.args[0] if node.args else None


def way(member: fx.Node, source: fx.Node, arriving: Collection[str]) -> list[fx.Node] | None:
    """The calls that make a result of another one; None where the backward pass cannot run them:
    a size that they take does not arrive there."""
    found: list[fx.Node] = []
    while member is not source:
        if (calls := _view(member)) is None:
            return None
        found[:0] = calls
        member = _first_argument(calls[0])
    known = {source, *found}
    needed = (used for call in found for used in call.all_input_nodes)
    return found if all(n in known or n.name in arriving for n in needed) else None


def _copied(
    graph: fx.Graph,
    member: fx.Node,
    source: fx.Node,
    made: fx.Node,
    places: Mapping[str, fx.Node],
) -> fx.Node:
    """A result of which the source was made again."""
    known = {source: made}
    for view in way(member, source, places) or ():
        made = graph.node_copy(view, lambda old: known.get(old) or places[old.name])
        known[view] = made
    return made


def masks_as_bits(modules: Modules, own_outputs: int) -> Modules:
    def choose(node: fx.Node) -> Form | str:
        value: Tensor = node.meta["val"]
        return (why_no_bits(value) or BITS) if value.dtype is torch.bool else ""

    encode(modules, own_outputs, choose)
    return modules


def why_no_bits(mask: Tensor) -> str:
    if any(not isinstance(size, int) for size in mask.shape):
        return "a mask of a size that is a symbol: the number of bits is not known"
    if mask.numel() <= FEWEST_BITS:
        return f"a mask of no more than {FEWEST_BITS} entries"
    return "" if mask.is_contiguous() else "a mask whose strides bits would not keep"


def _arriving(
    backward: fx.GraphModule, name: str, there: fx.Node, packed: Sequence[fx.Node], form: Form
) -> list[fx.Node]:
    """What is handed over is known by its name, in both passes."""
    arrives: list[fx.Node] = []
    for one, node in zip(form.names(name), packed, strict=False):
        with backward.graph.inserting_after(arrives[-1] if arrives else there):
            arrives.append(backward.graph.placeholder(one))
        arrives[-1].meta["val"] = node.meta["val"]
        node._rename(arrives[-1].name)
    return arrives


def memory_of(node: Any) -> Any:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, FakeTensor) or value.layout is not torch.strided:
        return None
    return StorageWeakRef(value.untyped_storage())


def _has_all_of_its_memory(node: fx.Node) -> bool:
    """A view of a larger result keeps all of that in any case."""
    value: Tensor = node.meta["val"]
    size, shown = value.untyped_storage().nbytes(), value.numel() * value.itemsize
    return bool(number_of_the_call(size) == number_of_the_call(shown))


def inserted(
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
