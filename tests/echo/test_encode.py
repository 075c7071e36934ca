"""Kept masks as bits: the same gradients bit for bit, an eighth of the bytes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_module, make_boxed_func
from torch._functorch.partitioners import default_partition

import ecornn
from ecornn.echo.analysis.liveness import simulate
from ecornn.echo.encode import masks_as_bits
from ecornn.echo.forms import bits_of, mask_of
from ecornn.echo.graph import read_graph
from ecornn.echo.kept_forms import in_other_forms
from ecornn.echo.options import AUTO, Options
from ecornn.echo.passes import Passes
from ecornn.echo.report import GraphReport
from ecornn.echo.rewrite import duplicate, without_unread_draws
from ecornn.echo.verify import differences
from ecornn.errors import InvalidInput


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


def compiled_gradients(masks: str, memory: str) -> tuple[list[Tensor], Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Masked()
    run = ecornn.compile(model, masks=masks, memory=memory, codegen="eager")
    x = torch.randn(10, 12, requires_grad=True)
    held = []

    def pack(kept: Tensor) -> Tensor:
        held.append(kept)
        return kept

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        out = run(x)
    sizes = sorted(kept.nbytes for kept in held if kept.dtype in (torch.bool, torch.uint8))
    gradients = torch.autograd.grad(out.square().sum(), [x, *model.parameters()])
    assert run.explain().graphs[0].refused == []
    return [out.detach(), *gradients], sizes


@pytest.mark.parametrize("memory", ["auto", "min"])
def test_a_compiled_model_keeps_bits_and_the_same_gradients(memory: str) -> None:
    (plain, bytes_kept), (encoded, bits_kept) = (
        compiled_gradients(masks, memory) for masks in ("bytes", "bits")
    )
    for a, b in zip(encoded, plain, strict=True):
        assert torch.equal(a, b)
    assert bytes_kept
    # a plan that knows of bits may find that it can do without one of them
    assert bits_kept
    assert set(bits_kept) <= {size // 8 for size in bytes_kept}


def test_bits_that_are_unpacked_otherwise_are_found() -> None:
    """The verification knows exactly one way back."""
    wrong: list[list[str]] = []

    def partition(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        passes = Passes(read_graph(joint), num_fwd_outputs)
        found = default_partition(duplicate(joint), inputs, num_fwd_outputs=num_fwd_outputs)
        encoded = masks_as_bits(without_unread_draws(found), num_fwd_outputs)
        wrong.append(differences(joint, passes, encoded))
        for node in encoded[1].graph.nodes:
            if node.target is torch.ops.aten.bitwise_right_shift.Tensor:
                node.target = torch.ops.aten.bitwise_left_shift.Tensor
        wrong.append(differences(joint, passes, encoded))
        return default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs)

    def compiler(module: fx.GraphModule, example: Any) -> Any:
        return make_boxed_func(module.forward)

    run = aot_module(Masked(), fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)
    run(torch.randn(10, 12)).sum().backward()
    assert wrong[0] == []
    assert any("is computed otherwise" in one for one in wrong[1])


def test_where_masks_stay_it_is_told() -> None:
    with pytest.raises(InvalidInput, match="masks: got 'nibbles'"):
        ecornn.compile(Masked(), masks="nibbles")
    modules = (fx.GraphModule({}, fx.Graph()), fx.GraphModule({}, fx.Graph()))
    chosen = SimpleNamespace(joint=None)
    left: Any = SimpleNamespace(passes=None, modules=modules, chosen=chosen)
    told = GraphReport("graph", "eager", "", AUTO)
    assert in_other_forms(modules[0], left, told, Options()) is modules
    assert told.refused == []
    for asked in (Options(masks="bits"), Options(maps="bf16")):
        told = GraphReport("graph", "eager", "", AUTO)
        assert in_other_forms(modules[0], left, told, asked) is modules
        assert told.refused == [("other forms of what is kept", "the graph was left to torch")]
