"""Graphs as torch.compile has traced them."""

from __future__ import annotations

from typing import Any

from torch import fx


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """Inductor changes the one it is given."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    found = fx.GraphModule(module, graph)
    found.meta = dict(module.meta)
    _say_where_inputs_are_from(found, module)
    return found


def _say_where_inputs_are_from(ours: Any, theirs: Any) -> None:
    """By that torch tells weights from other inputs. Of a copy without it torch's min-cut was
    another one, inductor asked at every call whether weights are aligned, and what was chosen ahead
    of a call was planned and generated anew when it was called."""
    if not hasattr(theirs, "_param_name_to_source"):
        return
    ours._param_name_to_source = theirs._param_name_to_source
    inputs = (one.graph.find_nodes(op="placeholder") for one in (ours, theirs))
    for its, given in zip(*inputs, strict=True):
        its._dynamo_source = given._dynamo_source
