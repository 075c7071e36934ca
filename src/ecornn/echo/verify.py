"""Is what was rewritten the same computation? Answered by structure, before anything runs.

Every value of the joint graph gets a number: equal operators on equal values have equal numbers,
and whatever draws, writes or is not known has one of its own. The two passes must return values of
the same numbers as the joint graph does, and run whatever has a number of its own exactly once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from ecornn.echo.forms import BITS, FORMS, Form
from ecornn.echo.gradients_by_masks import BY_MASKS, written_out
from ecornn.echo.graph import SYMBOLS
from ecornn.echo.passes import Passes
from ecornn.echo.rewrite import Modules


def refusal(module: fx.GraphModule, passes: Passes) -> str | None:
    """Why a joint graph must be left to torch's own partitioners; None if it need not."""
    for node in module.graph.nodes:
        if node.meta.get("recompute") is not None:
            return (
                "the model uses torch.utils.checkpoint inside; torch's partitioner carries it out"
            )
        if "with_effects" in str(node.target):
            return f"{node.name} has effects whose order matters"
        special = ("seed", "base_offset", "rng_state", "backward_state")
        if node.op == "placeholder" and any(word in str(node.target) for word in special):
            return f"the graph takes {node.target}, a state that only torch's partitioner passes on"
    names = {op.name: i for i, op in enumerate(passes.graph.operations)}
    for node in module.graph.nodes:
        own = names.get(node.name) in passes.backward
        tagged = "backward" in str(node.meta.get("partitioner_tag"))
        if writes(node) and (own or tagged):
            return f"{node.name} writes to memory in the backward pass"
    return None


def differences(module: fx.GraphModule, passes: Passes, modules: Modules) -> list[str]:
    """What is wrong with two passes that a joint graph was split into; nothing if they are right.
    `passes` are those of `module`."""
    forward, backward = modules
    table: dict[Any, int] = {}
    once = {op.name for op in passes.graph.operations if op.kind in ("random", "opaque")}
    joint = value_numbers(module, table, once, {})
    if _know_other_forms(module, joint, table, (BITS,)):
        joint = value_numbers(module, table, once, {})
    ahead = value_numbers(forward, table, once, {})
    outputs, given = passes.forward_outputs, _leaving(forward)
    between = [node for node in given[outputs:] if isinstance(node, fx.Node)]
    _know_other_forms(forward, ahead, table)
    behind = value_numbers(backward, table, once, {node.name: ahead[node] for node in between})
    expected, results, gradients = _leaving(module), given[:outputs], _leaving(backward)
    return [
        *_compared("result", expected[:outputs], joint, results, ahead),
        *_compared("gradient", expected[outputs:], joint, gradients, behind),
        *_passed_on(between, backward),
        *_run_once(module, forward, backward, once),
    ]


def joint_differences(module: fx.GraphModule, changed: fx.GraphModule, passes: Passes) -> list[str]:
    """What is wrong with a joint graph in which masks took another form and gradients are made of
    masks; `passes` are those of `module`."""
    table: dict[Any, int] = {}
    once = {op.name for op in passes.graph.operations if op.kind in ("random", "opaque")}
    joint = value_numbers(module, table, once, {})
    for node in module.graph.nodes:
        if node.target in BY_MASKS:
            sources = [joint[argument] for argument in node.args[:2]]
            _know(written_out(node), sources, joint[node], table)
    _know_other_forms(changed, value_numbers(changed, table, once, {}), table, (BITS,))
    numbers = value_numbers(changed, table, once, {})
    empty = fx.GraphModule({}, fx.Graph())
    return [
        *_compared("result", _leaving(module), joint, _leaving(changed), numbers),
        *_run_once(module, changed, empty, once),
    ]


def value_numbers(
    module: fx.GraphModule, table: dict[Any, int], once: set[str], given: dict[str, int]
) -> dict[fx.Node, int]:
    """Nodes of equal numbers have equal values. `table`: numbers that are known, which are added
    to. `once`: names of nodes that are like no other. `given`: numbers of inputs, by name."""
    found: dict[fx.Node, int] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            key: Any = ("input", node.name)
            found[node] = given.get(node.name, table.setdefault(key, len(table)))
        elif node.op != "output":
            key = (node.op, node.target, _frozen(node.args, found), _frozen(node.kwargs, found))
            if node.name in once or _draws_orwrites(node):
                key = (*key, node.name)
            found[node] = table.setdefault(key, len(table))
    return found


def _know_other_forms(
    forward: fx.GraphModule,
    numbers: dict[fx.Node, int],
    table: dict[Any, int],
    forms: Sequence[Form] = FORMS,
) -> int:
    """A result that took another form and was made of it again counts as the result: what exactly
    these operators make gets its number. Told is of how many results."""
    found = 0
    names = {node.name for node in forward.graph.nodes}
    for node in forward.graph.nodes:
        for form in forms:
            if form.names(node.name)[0] not in names:
                continue
            _know(form.there_and_back(node.meta["val"]), [numbers[node]], numbers[node], table)
            found += 1
    return found


def _know(module: fx.GraphModule, given: Sequence[int], result: int, table: dict[Any, int]) -> None:
    """What exactly these operators make of values of these numbers has that number."""
    names = (placeholder.name for placeholder in _given(module))
    *_, last = (inner for inner in module.graph.nodes if inner.op != "output")
    found = value_numbers(module, table, set(), dict(zip(names, given, strict=True)))
    key = (last.op, last.target, _frozen(last.args, found), _frozen(last.kwargs, found))
    table[key] = result


def _given(module: fx.GraphModule) -> list[fx.Node]:
    return list(module.graph.find_nodes(op="placeholder"))


def _frozen(value: Any, numbers: dict[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return ("node", numbers[value])
    if isinstance(value, list | tuple):
        return tuple(_frozen(of, numbers) for of in value)
    if isinstance(value, dict):
        return tuple((name, _frozen(of, numbers)) for name, of in sorted(value.items()))
    if isinstance(value, slice):
        return ("slice", _frozen((value.start, value.stop, value.step), numbers))
    return (type(value).__name__, repr(value))


def writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _draws_orwrites(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return writes(node) or torch.Tag.nondeterministic_seeded in tags


def _leaving(module: fx.GraphModule) -> list[Any]:
    (output,) = module.graph.find_nodes(op="output")
    return tree_leaves(output.args[0], is_leaf=lambda leaf: leaf is None)


def _compared(
    what: str,
    expected: Sequence[Any],
    expected_numbers: dict[fx.Node, int],
    found: Sequence[Any],
    found_numbers: dict[fx.Node, int],
) -> list[str]:
    if len(expected) != len(found):
        return [f"{len(found)} {what}s instead of {len(expected)}"]
    wrong = []
    for k, (one, other) in enumerate(zip(expected, found, strict=True)):
        if isinstance(one, fx.Node) != isinstance(other, fx.Node):
            wrong.append(f"{what} {k} is {other} instead of {one}")
        elif isinstance(one, fx.Node) and expected_numbers[one] != found_numbers[other]:
            wrong.append(f"{what} {k}, {one.name}, is computed otherwise")
        elif isinstance(one, fx.Node) and _form(one) != _form(other):
            wrong.append(f"{what} {k}, {one.name}, has another form")
    return wrong


def _form(node: fx.Node) -> str:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.device}"
    return str(value)


def _passed_on(between: list[fx.Node], backward: fx.GraphModule) -> list[str]:
    """torch hands over tensors, then numbers, and takes numbers first."""
    numbers = [node for node in between if isinstance(node.meta.get("val"), SYMBOLS)]
    tensors = [node for node in between if node not in numbers]
    taken = backward.graph.find_nodes(op="placeholder")
    names = [node.name for node in taken if not str(node.target).startswith("tangents")]
    handed = [node.name for node in (*numbers, *tensors)]
    return [] if names == handed else [f"the backward pass takes {names}, it is handed {handed}"]


def _run_once(
    module: fx.GraphModule, forward: fx.GraphModule, backward: fx.GraphModule, once: set[str]
) -> list[str]:
    """What draws, writes or is not known runs as often as in the joint graph; what draws or writes
    also in the same order."""
    expected, found = (
        [n for g in graphs for n in g.graph.nodes] for graphs in ((module,), (forward, backward))
    )

    def names(nodes: list[fx.Node], known: set[str]) -> list[str]:
        calls = (node for node in nodes if node.op not in ("placeholder", "output"))
        return [node.name for node in calls if node.name in known or _draws_orwrites(node)]

    if sorted(names(expected, once)) != sorted(names(found, once)):
        before, after = Counter(names(expected, once)), Counter(names(found, once))
        return [f"run too often: {sorted(after - before)}; left out: {sorted(before - after)}"]
    if names(expected, set()) != names(found, set()):
        return ["what draws or writes runs in another order"]
    return []
