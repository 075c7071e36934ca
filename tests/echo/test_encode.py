"""Kept masks as bits: the same gradients bit for bit, an eighth of the bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_module, make_boxed_func
from torch._functorch.partitioners import default_partition

from ecornn.echo.analysis.liveness import simulate
from ecornn.echo.encode import bits_of, mask_of, masks_as_bits
from ecornn.echo.graph import read_graph


@pytest.mark.parametrize("shape", [(1,), (7,), (8,), (3, 5), (2, 4, 9), (0, 3)])
def test_there_and_back(shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape) > 0.5
    bits = bits_of(mask)
    assert bits.dtype is torch.uint8
    assert bits.numel() == -(-mask.numel() // 8)
    assert torch.equal(mask_of(bits, mask.shape), mask)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 40), nn.Linear(40, 12)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.dropout(self.first(x), 0.5)
        return self.second(torch.where(y > 0.1, y * 2, y.exp()))


def trained(encode: bool) -> tuple[list[Tensor], list[fx.GraphModule]]:
    torch.manual_seed(0)
    model, modules = Masked(), []

    def partition(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        found = default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs)
        modules.extend(masks_as_bits(found, num_fwd_outputs) if encode else found)
        return tuple(modules)

    def compiler(module: fx.GraphModule, example: Any) -> Any:
        return make_boxed_func(module.forward)

    run = aot_module(model, fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)
    x = torch.randn(10, 12, requires_grad=True)
    torch.manual_seed(1)
    out = run(x)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *model.parameters()])], modules


def kept_masks(module: fx.GraphModule) -> list[int]:
    values = [n.meta["val"] for n in module.graph.find_nodes(op="placeholder")]
    return [v.numel() for v in values if v.dtype in (torch.bool, torch.uint8)]


def test_gradients_are_the_same_bit_for_bit_and_masks_take_an_eighth() -> None:
    (plain, before), (encoded, after) = trained(False), trained(True)
    for a, b in zip(encoded, plain, strict=True):
        assert torch.equal(a, b)
    # of dropout and of the comparison
    assert kept_masks(before[1]) == [400, 400]
    assert kept_masks(after[1]) == [50, 50]
    arriving = [
        sum(graph.storages[s] for i in graph.inputs for s in graph.operations[i].holds)
        for graph in (read_graph(modules[1]) for modules in (before, after))
    ]
    assert arriving[0] - arriving[1] == 700
    for module, was in zip(after, before, strict=True):
        assert (
            simulate(read_graph(module), ()).peak_bytes < simulate(read_graph(was), ()).peak_bytes
        )


def test_a_mask_that_the_model_returns_stays() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    mask = graph.call_function(torch.ops.aten.gt.Scalar, (x, 0))
    graph.output((mask, mask))
    with torch._subclasses.FakeTensorMode():
        x.meta["val"], mask.meta["val"] = torch.empty(64), torch.empty(64, dtype=torch.bool)
    backward = fx.Graph()
    there = backward.placeholder(mask.name)
    there.meta["val"] = mask.meta["val"]
    backward.output((backward.call_function(torch.ops.aten.logical_not.default, (there,)),))
    modules = masks_as_bits((fx.GraphModule({}, graph), fx.GraphModule({}, backward)), 1)
    assert [n.name for n in modules[1].graph.find_nodes(op="placeholder")] == [mask.name]
