"""Operations written into a traced graph in the place of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

Call = Callable[..., fx.Node]


def calls_like(joint: fx.GraphModule, replaced: fx.Node) -> Call:
    """Makes calls, where the graph is being written to, that later stages take for a part of what
    is replaced: its module, its pass and, on tensors without numbers, its sizes."""

    def call(target: Any, *args: Any) -> fx.Node:
        made = joint.graph.call_function(target, args)
        made.meta = dict(replaced.meta)
        made.meta["val"] = target(*fx.node.map_arg(args, lambda node: node.meta["val"]))
        made.meta.pop("tensor_meta", None)
        return made

    return call
