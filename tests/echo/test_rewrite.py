"""Split graphs give the gradients of the model they came from, whatever is kept."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_module, make_boxed_func
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

from ecornn.echo.analysis.liveness import simulate
from ecornn.echo.graph import read_graph
from ecornn.echo.passes import Passes
from ecornn.echo.plan.bidirectional import bidirectional
from ecornn.echo.rewrite import duplicate, split
from ecornn.echo.schedule import FOR_ALL
from ecornn.echo.verify import differences


class Decoder(nn.Module):
    """Additive attention over shared keys at every step of an LSTM cell."""

    def __init__(self, hidden: int = 8, steps: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(hidden, hidden)
        self.query, self.score = nn.Linear(hidden, hidden), nn.Linear(hidden, 1)
        self.norm, self.steps, self.dropout = nn.LayerNorm(hidden), steps, dropout

    def forward(self, keys_BSH: Tensor) -> Tensor:
        h = c = keys_BSH.mean(1)
        shared = self.query(keys_BSH)
        outputs = []
        for _ in range(self.steps):
            mixed = torch.tanh(self.norm(shared + self.query(h).unsqueeze(1)))
            mixed = F.dropout(mixed, self.dropout, self.training)
            weights = F.softmax(self.score(mixed).squeeze(-1), -1)
            context = torch.bmm(weights.unsqueeze(1), keys_BSH).squeeze(1)
            h, c = self.cell(context, (h, c))
            outputs.append(h)
        return torch.stack(outputs)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6)), (4, 6)),
    "attention decoder": (Decoder, (2, 5, 8)),
    "attention decoder with dropout": (lambda: Decoder(dropout=0.4), (2, 5, 8)),
    "transformer layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True),
        (2, 4, 8),
    ),
    "convolutions with batch norm": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)),
        (2, 2, 8, 8),
    ),
}


class Compiled:
    """A model run through a partition; `kept_bytes` is what went between its passes."""

    def __init__(self, model: nn.Module, partition: Any) -> None:
        self.kept_bytes = self.backward_peak = 0

        def compiler(module: fx.GraphModule, example: Any) -> Any:
            return make_boxed_func(module.forward)

        def counted(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
            forward, backward = partition(joint, inputs, **options)
            primals = {n.name for n in joint.graph.nodes if n.op == "placeholder"}
            saved = [n for n in backward.graph.nodes if n.op == "placeholder"]
            self.kept_bytes = sum(
                n.meta["val"].untyped_storage().nbytes() for n in saved if n.name not in primals
            )
            self.backward_peak = simulate(read_graph(backward), ()).peak_bytes
            return forward, backward

        self.run = aot_module(
            model, fw_compiler=compiler, bw_compiler=compiler, partition_fn=counted
        )


def echo_partition(
    joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **_: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    passes = Passes(read_graph(joint), num_fwd_outputs)
    modules = split(duplicate(joint), passes, bidirectional(passes), FOR_ALL)
    assert differences(joint, passes, modules) == []
    return modules


def gradients(run: Callable[..., Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(3)  # the same masks
    x = x.detach().clone().requires_grad_()
    output = run(x)
    weight = torch.linspace(-1, 1, output.numel()).view_as(output)
    grads = torch.autograd.grad((output * weight).sum(), [x, *model.parameters()])
    return [output.detach(), *grads]


@pytest.mark.parametrize("name", MODELS)
def test_results_and_gradients_are_those_of_the_model(name: str) -> None:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model, x = make(), torch.randn(shape)
    twin = copy.deepcopy(model)
    expected = gradients(twin, twin, x)
    found = gradients(Compiled(model, echo_partition).run, model, x)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    for a, b in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(a, b)  # running statistics moved once


def test_the_generator_is_moved_as_by_the_model() -> None:
    states = []
    for partition in (None, echo_partition):
        torch.manual_seed(0)
        model = Decoder(dropout=0.4)
        run = model if partition is None else Compiled(model, partition).run
        gradients(run, model, torch.randn(2, 5, 8))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("steps", [2, 6])
def test_an_attention_decoder_keeps_less_than_torchs_partitions(steps: int) -> None:
    kept, peak = {}, {}
    for name, partition in (
        ("all", default_partition),
        ("min-cut", min_cut_rematerialization_partition),
        ("echo", echo_partition),
    ):
        torch.manual_seed(0)
        model = Decoder(hidden=16, steps=steps)
        compiled = Compiled(model, partition)
        gradients(compiled.run, model, torch.randn(4, 30, 16))
        kept[name], peak[name] = compiled.kept_bytes, compiled.backward_peak
    assert kept["echo"] < kept["min-cut"] / 2
    assert kept["echo"] < kept["all"] / 2
    # and what is made again is not held all at once
    assert peak["echo"] < peak["min-cut"]
    assert peak["echo"] < peak["all"]


def test_gradients_with_dropout_are_those_of_finite_differences() -> None:
    """The mask that is drawn forwards is the one used backwards."""
    torch.manual_seed(0)
    model = Decoder(hidden=4, steps=2, dropout=0.5).double()
    compiled = Compiled(model, echo_partition)
    x = torch.randn(1, 3, 4, dtype=torch.float64)

    def loss(value: Tensor) -> Tensor:
        torch.manual_seed(11)
        return compiled.run(value).square().sum()

    x.requires_grad_()
    (grad,) = torch.autograd.grad(loss(x), x)
    direction = torch.randn_like(x)
    step = 1e-6
    with torch.no_grad():
        ahead, behind = loss(x + step * direction), loss(x - step * direction)
    difference = (ahead - behind) / (2 * step)
    torch.testing.assert_close((grad * direction).sum(), difference, rtol=1e-6, atol=1e-8)
