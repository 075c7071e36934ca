"""Masks as bits that a plan keeps: ReLU's and others, to the same bits of every gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._functorch.partitioners import default_partition
from torch._subclasses import FakeTensorMode

import ecornn
from ecornn.echo import bits_choice
from ecornn.echo.gradients_by_masks import BY_MASKS, written_out
from ecornn.echo.graph import read_graph
from ecornn.echo.joint import make_joint
from ecornn.echo.mask_bits import with_masks_as_bits
from ecornn.echo.options import Memory
from ecornn.echo.passes import Passes
from ecornn.echo.plan.budget import Limits
from ecornn.echo.request import Request
from ecornn.echo.verify import joint_differences
from ecornn.errors import InvalidInput

pytestmark = pytest.mark.usefixtures("fresh_compiler")
NAN, INFINITE = float("nan"), float("inf")
aten = torch.ops.aten


def same_bits(one: Tensor, other: Tensor) -> bool:
    as_integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.itemsize]
    return one.dtype is other.dtype and torch.equal(one.view(as_integers), other.view(as_integers))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("target", "further"),
    [
        (aten.threshold_backward.default, (0,)),
        (aten.threshold_backward.default, (0.5,)),
        (aten.threshold_backward.default, (-0.0,)),
    ],
)
def test_gradients_of_a_mask_have_the_bits_of_torch_s_operators(
    target: Any, further: tuple[Any, ...], dtype: torch.dtype
) -> None:
    """In vectors and in what is left over, of every pair of numbers that compare oddly."""
    odd = [NAN, -NAN, 0.0, -0.0, INFINITE, -INFINITE, 0.5, 1e-7, -1e-7, 3.0, -3.0]
    pairs = torch.cartesian_prod(torch.tensor(odd), torch.tensor(odd)).to(dtype)
    gradient, result = (column.repeat(3).contiguous() for column in pairs.unbind(1))
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in ("gradient", "result")]
    with FakeTensorMode() as mode:
        for node, value in zip(nodes, (gradient, result), strict=True):
            node.meta["val"] = mode.from_tensor(value)
    call = graph.call_function(target, (*nodes, *further))
    assert target in BY_MASKS
    for count in (len(result), 7, 1):
        expected = target(gradient[:count], result[:count], *further)
        assert same_bits(written_out(call)(gradient[:count], result[:count]), expected)


class Rectified(nn.Module):
    """Of the ReLU's result the backward pass needs nothing but where it is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 120), nn.Linear(120, 24)

    def forward(self, x: Tensor) -> Tensor:
        summed = F.relu(self.first(x)).view(-1, 10, 120).sum(1)
        return self.second(summed.sin()).cos()


def trained(model: nn.Module, x: Tensor, **asked: Any) -> tuple[list[Tensor], list[Tensor], Any]:
    """(result and gradients, what is kept of neither, the compiled model)"""
    torch._dynamo.reset()
    run = ecornn.compile(copy.deepcopy(model), **{"codegen": "eager", **asked})
    held: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        out = run(x)
    found = torch.autograd.grad(out.square().sum(), list(run.parameters()))
    return [out.detach(), *found], held, run


def bits_among(held: list[Tensor]) -> list[int]:
    return [kept.numel() for kept in held if kept.dtype is torch.uint8]


@pytest.mark.parametrize("memory", ["auto", "min", 1.0])
def test_relu_keeps_bits_where_they_are_asked_for(memory: str | float) -> None:
    model, x = Rectified(), torch.randn(50, 16)
    plain, before, _ = trained(model, x, memory=memory, masks="bytes")
    mine, after, run = trained(model, x, memory=memory, masks="bits")
    assert all(map(same_bits, mine, plain))
    assert bits_among(before) == []
    assert 50 * 120 // 8 in bits_among(after)
    assert not any(kept.shape == (50, 120) for kept in after), "nothing of the result itself"
    assert "masks of which the plan keeps bits" in str(run.explain())
    assert run.explain().graphs[0].refused == []


def test_a_plan_for_less_takes_bits_by_itself_and_auto_does_not() -> None:
    model, x = Rectified(), torch.randn(50, 16)
    plain, _, auto = trained(model, x)
    assert auto.explain().graphs[0].forms == []
    mine, held, least = trained(model, x, memory="min")
    assert all(map(same_bits, mine, plain))
    assert bits_among(held)
    (graph,) = least.explain().graphs
    assert graph.chosen.strategy.endswith("masks as bits")
    (without,) = trained(model, x, memory="min", masks="bytes")[2].explain().graphs
    assert graph.chosen.peak_bytes < without.chosen.peak_bytes
    between = (graph.chosen.peak_bytes + without.chosen.peak_bytes) // 2
    mine, held, _ = trained(model, x, memory=between)
    assert all(map(same_bits, mine, plain))
    assert bits_among(held)
    with pytest.raises(InvalidInput, match="the smallest peak that was found"):
        trained(model, x, memory=between, masks="bytes")


def test_generated_code_keeps_bits_too() -> None:
    model, x = Rectified(), torch.randn(50, 16)
    plain, before, _ = trained(model, x, masks="bytes", codegen="inductor")
    mine, after, run = trained(model, x, masks="bits", codegen="inductor")
    assert all(map(same_bits, mine, plain))
    assert any(kept.dtype is torch.bool for kept in before)
    assert not any(kept.dtype is torch.bool for kept in after)
    assert bits_among(after) == [50 * 120 // 8]
    assert "masks of which the plan keeps bits: 1, 750 B" in str(run.explain())


def joint_of(function: Any, *inputs: Tensor) -> tuple[fx.GraphModule, Passes]:
    found: list[Any] = []

    def partition(joint: fx.GraphModule, given: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        found.append((joint, Passes(read_graph(joint), num_fwd_outputs)))
        return default_partition(copy.deepcopy(joint), given, num_fwd_outputs=num_fwd_outputs)

    def compiler(module: fx.GraphModule, example: Any) -> Any:
        return make_boxed_func(module.forward)

    ways = {"fw_compiler": compiler, "bw_compiler": compiler, "partition_fn": partition}
    aot_function(function, **ways)(*(x.requires_grad_() for x in inputs)).sum().backward()
    joint, passes = found[0]
    return joint, passes


@pytest.mark.parametrize(
    ("function", "count"),
    [
        pytest.param(lambda x, w: F.relu(x @ w).sum(1), 1, id="alone"),
        pytest.param(lambda x, w: F.relu(x @ w) @ w, 0, id="a product reads the result"),
        pytest.param(lambda x, w: F.relu(x @ w), 0, id="the result is the model's own"),
        pytest.param(lambda x, w: F.relu(x @ w).sin().sum(1), 1, id="sin keeps its cosine"),
        pytest.param(lambda x, w: F.relu(x @ w).mul(w).sum(1), 0, id="a factor"),
        pytest.param(lambda x, w: F.relu((x @ w).t()).sum(1), 0, id="in another order"),
        pytest.param(lambda x, w: F.relu((x @ w)[:1, :3]).sum(1), 0, id="few entries"),
        pytest.param(lambda x, w: torch.where((x @ w).exp() > 1, x, w).sum(1), 1, id="compared"),
        pytest.param(lambda x, w: torch.where(x > 0, x.exp(), w).sum(1), 0, id="of an input"),
        pytest.param(lambda x, w: F.dropout(x @ w).sum(1), 1, id="drawn"),
    ],
)
def test_which_masks_have_bits(function: Any, count: int) -> None:
    joint, passes = joint_of(function, torch.randn(8, 8), torch.randn(8, 8))
    changed, bits, again = with_masks_as_bits(joint, passes)
    assert len(bits) == count
    assert bool(again) is bool(count)
    assert joint_differences(joint, changed, passes) == []


def test_what_is_not_the_same_is_found() -> None:
    joint, passes = joint_of(
        lambda x, w: F.relu(x @ w).sum(1), torch.randn(8, 8), torch.randn(8, 8)
    )
    for target, other in (
        (aten.bitwise_right_shift.Tensor, aten.bitwise_left_shift.Tensor),
        (aten.le.Scalar, aten.lt.Scalar),
    ):
        changed, _, _ = with_masks_as_bits(joint, passes)
        (node,) = changed.graph.find_nodes(op="call_function", target=target)
        node.target = other
        assert any("computed otherwise" in one for one in joint_differences(joint, changed, passes))


@pytest.mark.parametrize(
    ("masks", "kind", "fuses", "looked_at"),
    [
        ("auto", "auto", False, False),
        ("auto", "min", False, True),
        ("auto", "bytes", False, True),
        ("auto", "min", True, False),
        ("bits", "auto", True, True),
        ("bytes", "min", False, False),
    ],
)
def test_when_plans_with_bits_are_looked_at(
    masks: str, kind: str, fuses: bool, looked_at: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = torch.randn(8, 8), torch.randn(8, 8)
    module, passes = joint_of(lambda x, w: torch.where((x @ w).exp() > 1, x, w).sum(1), *inputs)
    settings = {"compiler": "inductor"} if fuses else {}
    request = Request(Memory(kind, 1), 1, settings, masks=masks)
    limits = Limits(None, 0.0)
    first = make_joint(module, passes.forward_outputs, (), frozenset(), pricing=request.pricing)
    tried: list[Any] = []
    monkeypatch.setattr(bits_choice, "in_bits", lambda *given: tried.append(given))
    assert bits_choice.plans_in_bits(request, limits, first, [], pytest.fail) == ([], limits)
    assert bool(tried) is looked_at
