"""What recurrent layers of this package keep for the backward pass, as a property of a joint graph.

Such a layer is one operator, and one more in the backward pass; a constant of both says what is
kept between them. Where the user asked for nothing it says so, and the same computation has a joint
graph for every choice. What a choice frees and costs is declared by the operator
(`ops/keeping.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ecornn.backends.protocol import LayerCall
from ecornn.echo.analysis.machine import machine_of
from ecornn.echo.graph import number_of_the_call
from ecornn.echo.rewrite import duplicate
from ecornn.echo.work import Work
from ecornn.ops.keeping import (
    KEEP_ARGUMENT,
    KEPT_ARGUMENT,
    KEPT_RESULT,
    OPEN,
    OUTPUT_ARGUMENT,
    Gates,
    gates_of,
)
from ecornn.ops.recurrence import read_call, recurrence, recurrence_backward

#: The operators as they are traced.
FORWARD = recurrence._opoverload
BACKWARD = recurrence_backward._opoverload
#: Hand on what they are given.
_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


@dataclass(frozen=True)
class RecurrentCall:
    """A layer's call in a joint graph that has a backward pass there, by the names of its nodes.
    `seconds`: of making its gates again."""

    name: str
    backward: tuple[str, ...]
    cell: str
    asked: str  # "auto": the choice is free
    bytes: int
    few: bool
    seconds: float

    @property
    def free(self) -> bool:
        return self.asked == OPEN


def recurrent_calls(module: fx.GraphModule) -> list[RecurrentCall]:
    """Those that could keep their gates, or do."""
    readers: dict[fx.Node, list[str]] = {}
    for node in module.graph.find_nodes(op="call_function", target=BACKWARD):
        forward = _maker(node.args[OUTPUT_ARGUMENT])
        if forward is not None and forward.args[KEEP_ARGUMENT] == node.args[KEEP_ARGUMENT]:
            readers.setdefault(forward, []).append(node.name)
    return [_described(node, tuple(names)) for node, names in readers.items() if _can_keep(node)]


def _maker(output: Any) -> fx.Node | None:
    """The forward operator whose first result this is."""
    while isinstance(output, fx.Node) and output.target in _SAME:
        output = output.args[0]
    if not isinstance(output, fx.Node) or output.target is not operator.getitem:
        return None
    made, place = output.args
    forward = isinstance(made, fx.Node) and made.target is FORWARD and place == 0
    return made if forward else None  # type: ignore[return-value]


def _can_keep(node: fx.Node) -> bool:
    return node.args[KEEP_ARGUMENT] in (OPEN, "states", "gates")


def _described(node: fx.Node, backward: tuple[str, ...]) -> RecurrentCall:
    call = read_call(*_values(node.args))
    gates, seconds = gates_made_again(call)
    asked = str(node.args[KEEP_ARGUMENT])
    return RecurrentCall(node.name, backward, call.cell, asked, gates.bytes, gates.few, seconds)


def gates_made_again(call: LayerCall) -> tuple[Gates, float]:
    """(a call's gates, the seconds of making them again, by a roofline)"""
    found, x = gates_of(call), call.input_TBI
    numbers = (found.bytes, found.bytes_of_direction, found.flops, found.read_bytes)
    gates = Gates(*map(number_of_the_call, numbers))
    work = Work(None, gates.read_bytes, gates.bytes, gates.flops, x.dtype, x.device)
    return gates, machine_of(x.device).seconds(work, product=True)


def _values(args: Any) -> Any:
    return fx.node.map_arg(args, lambda node: node.meta["val"])


def with_modes(
    module: fx.GraphModule, calls: Iterable[RecurrentCall], gates: Collection[str]
) -> fx.GraphModule:
    """A graph of its own in which calls of free choice keep their gates, those named so, or the
    states alone."""
    found = duplicate(module)
    nodes = {node.name: node for node in found.graph.nodes}
    for call in calls:
        if not call.free:
            continue
        keep = "gates" if call.name in gates else "states"
        forward = nodes[call.name]
        _set(forward, KEEP_ARGUMENT, keep)
        kept = _kept_results(forward, keep)
        for name in call.backward:
            _set(nodes[name], KEEP_ARGUMENT, keep)
            _set(nodes[name], KEPT_ARGUMENT, kept)
            _tell_strides(nodes[name], kept)
    found.graph.lint()
    found.recompile()
    return found


def _set(node: fx.Node, place: int, value: Any) -> None:
    args = list(node.args)
    args[place] = value
    node.args = tuple(args)


def _kept_results(forward: fx.Node, keep: str) -> list[fx.Node]:
    """Nodes for what the operator keeps now, and its sizes known anew."""
    before = forward.meta["val"]
    mode = before[0].fake_mode
    with mode, torch.no_grad():
        kept = FORWARD(*_values(forward.args))[KEPT_RESULT] if keep == "gates" else []
    # the other results are what they were, to the same memory: others refer to these
    forward.meta["val"] = (*before[:KEPT_RESULT], list(kept))
    if not kept:
        return []
    graph = forward.graph
    with graph.inserting_after(forward):
        several = _taken(graph, forward, KEPT_RESULT, kept, f"{forward.name}_kept")
    found, last = [], several
    for place, value in enumerate(kept):
        with graph.inserting_after(last):
            last = _taken(graph, several, place, value, f"{forward.name}_gates_{place}")
        found.append(last)
    return found


def _taken(graph: fx.Graph, of: fx.Node, place: int, value: Any, name: str) -> fx.Node:
    node = graph.create_node("call_function", operator.getitem, (of, place), {}, name)
    told = ("nn_module_stack", "stack_trace", "seq_nr", "partitioner_tag")
    node.meta = {key: of.meta[key] for key in told if key in of.meta}
    node.meta["val"] = value
    return node


def _tell_strides(backward: fx.Node, kept: list[fx.Node]) -> None:
    """torch has noted what the operator was given in eager mode: code generation lays tensors out
    in the same way, place by place."""
    noted = backward.meta.get("eager_input_vals")
    if noted is None:
        return
    args, kwargs = noted
    values = [node.meta["val"] for node in kept]
    args = tuple(values if k == KEPT_ARGUMENT else one for k, one in enumerate(args))
    backward.meta = {**backward.meta, "eager_input_vals": (args, kwargs)}
