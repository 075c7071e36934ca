"""How long Echo plans a large graph, and how near its plans of small ones are to the best.

The large graph is the decoder of the translator, unrolled. The small ones are those of a few lines
of a model each, for which the exact plan can be solved; there Echo is asked for least memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_export_joint_simple, aot_module
from torch.fx import _lazy_graph_module

from ecornn.bench.models.tasks import task_named
from ecornn.bench.training.cases import ModelCase
from ecornn.echo.graph import read_graph
from ecornn.echo.options import Memory
from ecornn.echo.passes import Passes
from ecornn.echo.pipeline import decide
from ecornn.echo.plan.exact import exact
from ecornn.echo.request import Request


@dataclass(frozen=True)
class Joint:
    """A graph of both passes, as a partitioner is given it."""

    module: fx.GraphModule
    inputs: Sequence[Any]
    forward_outputs: int


class _Traced(BaseException):
    """Nothing is compiled once the graph is there; torch does not catch this."""

    def __init__(self, joint: Joint) -> None:
        self.joint = joint


class Unrolled(nn.Module):
    """The decoder of the translator over all words."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.decoder: Any = model.decoder

    def forward(self, words_TBH: Tensor, keys_BSH: Tensor, values_BSH: Tensor) -> Tensor:
        fed_BH = torch.zeros_like(values_BSH[:, 0])
        states, outputs = [(fed_BH, fed_BH)] * 2, []
        for word_BH in words_TBH.unbind():
            fed_BH, states = self.decoder(word_BH, fed_BH, states, keys_BSH, values_BSH)
            outputs.append(fed_BH)
        return torch.stack(outputs).sum()


def unrolled_decoder(case: ModelCase, device: torch.device) -> Joint:
    task, batch = task_named(case.model), case.batch
    assert batch is not None
    size = task.size(case.size, case.length)

    def partition(
        joint: fx.GraphModule, inputs: Sequence[Any], *, num_fwd_outputs: int, **_: Any
    ) -> Any:
        raise _Traced(Joint(joint, inputs, num_fwd_outputs))

    def never(*_: Any) -> Any:
        raise AssertionError("nothing is compiled")

    with device:
        model = Unrolled(task.make_model(size))
        words = torch.zeros(size.length, batch, size.hidden)
        keys, values = (
            torch.zeros(batch, size.length, size.hidden, requires_grad=True) for _ in range(2)
        )
    try:
        traced = aot_module(model, fw_compiler=never, bw_compiler=never, partition_fn=partition)
        traced(words, keys, values)
    except _Traced as found:
        return found.joint
    raise AssertionError("the graph was not divided into passes")


def planned(joint: Joint) -> dict[str, float | str]:
    """As for inductor, whose graphs write no code of their own until they run."""
    request = Request(settings={"compiler": "inductor"})
    with _lazy_graph_module._use_lazy_graph_module(True):
        start = time.perf_counter()
        decide(joint.module, joint.inputs, joint.forward_outputs, request)
        taken = time.perf_counter() - start
    return {"plan_s": taken, "plan_nodes": len(joint.module.graph.nodes)}


def feed_forward(x: Tensor, w: Tensor) -> tuple[Tensor]:
    return (F.gelu(F.layer_norm(x @ w, (w.shape[1],))) @ w,)


def attention(query: Tensor, keys: Tensor) -> tuple[Tensor]:
    shares = torch.tanh(query.unsqueeze(1) + keys).sum(-1).softmax(-1)
    return ((shares.unsqueeze(-1) * keys).sum(1),)


def residual(x: Tensor, w: Tensor) -> tuple[Tensor]:
    for _ in range(3):
        x = x + torch.tanh(x @ w)
    return (x,)


def cell(x: Tensor, w: Tensor) -> tuple[Tensor]:
    gates = x @ w
    state = gates.sigmoid() * gates.tanh() + x
    return ((state.tanh() * gates.sigmoid()) @ w,)


def dropped(x: Tensor, w: Tensor) -> tuple[Tensor]:
    return (F.dropout(F.relu(x @ w), 0.3) @ w,)


def gated(x: Tensor, w: Tensor) -> tuple[Tensor]:
    y = x @ w
    return ((y * torch.sigmoid(y.exp())) @ w,)


#: With the shapes of their two arguments.
SMALL: tuple[tuple[Callable[..., tuple[Tensor]], tuple[int, ...], tuple[int, ...]], ...] = (
    (feed_forward, (32, 16), (16, 16)),
    (attention, (8, 16), (8, 10, 16)),
    (residual, (32, 16), (16, 16)),
    (cell, (32, 16), (16, 16)),
    (dropped, (32, 16), (16, 16)),
    (gated, (32, 16), (16, 16)),
)


def beside_the_best() -> dict[str, float | str]:
    """The worst of Echo's peaks over the exact plan's. That one runs no product again; Echo may, so
    that this can be below one."""
    worst = 0.0
    for function, *shapes in SMALL:
        inputs = tuple(torch.randn(shape, requires_grad=True) for shape in shapes)
        joint = aot_export_joint_simple(function, inputs, trace_joint=True)
        assert isinstance(joint, fx.GraphModule)
        best = exact(Passes(read_graph(joint), 1))
        assert best.optimal
        found = decide(joint, inputs, 1, Request(Memory("min"))).chosen.estimate.peak()
        worst = max(worst, found / best.peak)
    return {"plan_over_exact": worst, "exact_graphs": len(SMALL)}
