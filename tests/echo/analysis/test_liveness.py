"""The simulated peak of a graph is the peak of a run of it, byte for byte; random graphs are in
`tests/echo/test_random_programs.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_function, aot_module, make_boxed_func
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch.utils._pytree import tree_leaves

from ecornn.echo.analysis.liveness import simulate
from ecornn.echo.graph import Graph, NotUnderstood, Operation, read_graph
from support.replay import assert_simulated_as_replayed


def graphs_of(
    function: Callable[..., Any], *inputs: Tensor, partition: Any = default_partition
) -> list[tuple[fx.GraphModule, list[Any]]]:
    """The forward and backward graphs of a call, each with the real inputs it was run on."""
    found: list[tuple[fx.GraphModule, list[Any]]] = []

    def compiler(module: fx.GraphModule, example: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            found.append((module, list(args)))
            return module(*args)

        return make_boxed_func(run)

    trace = aot_module if isinstance(function, nn.Module) else aot_function
    compiled = trace(function, fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)
    outputs = [t for t in tree_leaves(compiled(*inputs)) if t.requires_grad]
    torch.autograd.backward(outputs, [torch.randn_like(t) for t in outputs])
    assert len(found) == 2
    return found


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.score = nn.Linear(6, 6), nn.Linear(6, 1)
        self.norm = nn.LayerNorm(6)

    def forward(self, keys_BSH: Tensor, query_BH: Tensor) -> Tensor:
        mixed = torch.tanh(self.norm(keys_BSH + self.query(query_BH).unsqueeze(1)))
        weights = F.softmax(self.score(mixed).squeeze(-1), -1)
        return torch.bmm(weights.unsqueeze(1), keys_BSH).squeeze(1)


MODELS: dict[str, Callable[[], tuple[Callable[..., Any], tuple[Tensor, ...]]]] = {
    "mlp": lambda: (
        nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Dropout(0.5), nn.Linear(7, 3)),
        (torch.randn(4, 5, requires_grad=True),),
    ),
    "convolutions with batch norm": lambda: (
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2)),
        (torch.randn(2, 2, 8, 8, requires_grad=True),),
    ),
    "attention": lambda: (
        Attention(),
        (torch.randn(2, 5, 6, requires_grad=True), torch.randn(2, 6, requires_grad=True)),
    ),
    "transformer layer": lambda: (
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        (torch.randn(2, 4, 8, requires_grad=True),),
    ),
    "lstm cell, three steps": lambda: (_three_steps, (torch.randn(3, 2, 4, requires_grad=True),)),
}


def _three_steps(x_TBH: Tensor) -> Tensor:
    h = c = torch.zeros_like(x_TBH[0])
    for x in x_TBH:
        i, f, g, o = (x.repeat(1, 4) + h.repeat(1, 4)).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
    return h


@pytest.mark.parametrize("partition", [default_partition, min_cut_rematerialization_partition])
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, partition: Any) -> None:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    for module, given_inputs in graphs_of(model, *inputs, partition=partition):
        assert_simulated_as_replayed(module, given_inputs)


def make(operations: list[tuple[str, tuple[int, ...], tuple[int, ...]]], *storages: int) -> Graph:
    named = tuple(
        Operation(f"op{i}", target, "input" if target == "input" else "cheap", uses, holds)
        for i, (target, uses, holds) in enumerate(operations)
    )
    return Graph(named, storages, (len(named) - 1,))


def test_a_view_holds_its_base() -> None:
    graph = make(
        [
            ("input", (), (0,)),
            ("tanh", (0,), (1,)),
            ("view", (1,), (1,)),
            ("exp", (0,), (2,)),  # the tanh's result was used last before, its view was not
            ("add", (2, 3), (3,)),
        ],
        *(1, 10, 100, 1000),
    )
    assert simulate(graph, graph.inputs).bytes_at == (1, 11, 11, 111, 1111)
    assert simulate(graph, ()).bytes_at == (1, 11, 11, 111, 1110)


def test_results_that_nobody_takes_are_held_with_those_that_are() -> None:
    graph = make(
        [
            ("input", (), (0,)),
            ("layer_norm", (0,), (1, 2)),
            ("getitem", (1,), (1,)),
            ("tanh", (2,), (3,)),
        ],
        *(1, 10, 100, 1000),
    )
    timeline = simulate(graph, graph.inputs)
    assert timeline.bytes_at == (1, 111, 111, 1011)
    assert (timeline.peak_bytes, timeline.peak_at) == (1011, 3)


def test_what_nobody_uses_is_given_up_at_once() -> None:
    graph = make([("input", (), (0,)), ("tanh", (0,), (1,)), ("exp", (0,), (2,))], 1, 10, 100)
    assert simulate(graph, graph.inputs).bytes_at == (1, 11, 101)


def test_symbolic_sizes_are_those_of_the_call() -> None:
    found: list[fx.GraphModule] = []

    def compiler(module: fx.GraphModule, example: Any) -> Any:
        found.append(module)
        return module

    compiled = aot_function(lambda x: x.tanh() * 2, fw_compiler=compiler, dynamic=True)
    compiled(torch.randn(3, 4))
    assert simulate(read_graph(found[0]), ()).peak_bytes == 2 * 3 * 4 * 4
    with pytest.raises(NotUnderstood, match="does not say"):
        read_graph(fx.symbolic_trace(nn.Tanh()))
