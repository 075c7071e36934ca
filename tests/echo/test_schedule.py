"""What a backward graph runs again is run just before it is read."""

from __future__ import annotations

from torch import fx

from ecornn.echo.schedule import as_late_as_possible


def graph_of() -> fx.GraphModule:
    """Two values made from what was kept, each read by one of two steps with a gradient."""
    graph = fx.Graph()
    kept, tangent = graph.placeholder("kept"), graph.placeholder("tangents_1")
    first = graph.call_method("sin", (kept,))
    second = graph.call_method("cos", (first,))
    unused = graph.call_method("exp", (kept,))
    one = graph.call_method("mul", (tangent, second))
    two = graph.call_method("mul", (one, first))
    three = graph.call_method("mul", (two, unused))
    graph.output((two, three))
    return fx.GraphModule({}, graph)


def test_order_follows_the_gradient() -> None:
    module = as_late_as_possible(graph_of())
    order = [str(n.target) for n in module.graph.nodes if n.op == "call_method"]
    assert order == ["sin", "cos", "mul", "mul", "exp", "mul"]


def test_twice_is_as_once() -> None:
    once = as_late_as_possible(graph_of())
    names = [n.name for n in once.graph.nodes]
    assert [n.name for n in as_late_as_possible(once).graph.nodes] == names


def test_a_result_without_a_gradient_is_made_at_the_end() -> None:
    graph = fx.Graph()
    kept, tangent = graph.placeholder("kept"), graph.placeholder("tangents_1")
    alone = graph.call_method("sin", (kept,))
    through = graph.call_method("neg", (tangent,))
    graph.output((alone, through))
    module = as_late_as_possible(fx.GraphModule({}, graph))
    order = [str(n.target) for n in module.graph.nodes if n.op == "call_method"]
    assert order == ["neg", "sin"]
