"""When things are run again: as late as can be, just before something reads them."""

from __future__ import annotations

from torch import fx


def as_late_as_possible(module: fx.GraphModule) -> fx.GraphModule:
    """Reorder a backward graph in place. What depends on an arriving gradient keeps its order;
    everything else is moved to just before its first reader there. Otherwise all that is
    recomputed would be made first, and be held all at once: nothing would be won."""
    graph = module.graph
    depends: set[fx.Node] = set()
    for node in graph.nodes:
        arrives = node.op == "placeholder" and "tangents" in str(node.target)
        if arrives or any(used in depends for used in node.all_input_nodes):
            depends.add(node)
    moved: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node.op == "placeholder" or (node not in depends and node.op != "output"):
            continue
        for again in _sources(node, depends | moved):
            node.prepend(again)
            moved.add(again)
    graph.lint()
    module.recompile()
    return module


def _sources(node: fx.Node, there: set[fx.Node]) -> list[fx.Node]:
    """What must run before a node and is not there yet, in an order in which it can."""
    found: list[fx.Node] = []
    seen: set[fx.Node] = set()
    waiting: list[tuple[fx.Node, bool]] = [(used, False) for used in node.all_input_nodes[::-1]]
    while waiting:
        source, ready = waiting.pop()
        if ready:
            found.append(source)
            continue
        if source in there or source in seen or source.op == "placeholder":
            continue
        seen.add(source)
        waiting.append((source, True))
        waiting += [(used, False) for used in source.all_input_nodes[::-1]]
    return found
