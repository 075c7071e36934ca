"""Runs of a graph on real tensors that count the bytes held, beside their simulation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from ecornn.echo.analysis.liveness import simulate
from ecornn.echo.graph import read_graph


class Replay(fx.Interpreter):
    """Runs a graph on real tensors as its generated code would: gives results up after their last
    use, those that nobody uses at once; and counts."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.bytes_at: list[int] = []

    def run_node(self, n: fx.Node) -> Any:
        for node in [node for node in self.env if not node.users]:
            del self.env[node]
        result = super().run_node(n)
        if n.op == "output":
            return result
        held: dict[int, int] = {}
        # what a placeholder will get is held before its turn comes
        waiting = list(self.args_iter) if n.op == "placeholder" else []
        if n.op == "placeholder":
            self.args_iter = iter(waiting)
        for tensor in tree_leaves([*self.env.values(), result, waiting]):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                held[storage._cdata] = storage.nbytes()
        self.bytes_at.append(sum(held.values()))
        return result


def assert_simulated_as_replayed(module: fx.GraphModule, inputs: list[Any]) -> None:
    graph = read_graph(module)
    replay = Replay(module)
    with torch.no_grad():
        replay.run(*inputs)
    # the replay's caller holds the inputs in the list
    simulated = simulate(graph, ())
    assert list(simulated.bytes_at) == replay.bytes_at
    assert simulated.peak_bytes == max(replay.bytes_at)
    assert simulate(graph, graph.inputs).peak_bytes >= simulated.peak_bytes
