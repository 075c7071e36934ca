"""What "auto" leaves alone: memory that is hardly any, where saving it takes kernels. And that
"min" leaves nothing that another request would find."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ecornn.echo.graph import read_graph
from ecornn.echo.options import read_memory
from ecornn.echo.passes import Passes
from ecornn.echo.pipeline import Decision, decide
from ecornn.echo.plan.bidirectional import bidirectional
from ecornn.echo.plan.budget import LITTLE, without_the_least
from ecornn.echo.plan.groups import run_again
from ecornn.echo.plan.prices import fused, read_by_heavy
from ecornn.echo.plan.search import Search
from ecornn.echo.request import Request
from ecornn.errors import InvalidInput
from support.joints import joint_of, leaf


def cast(x: Tensor, large: Tensor, *small: Tensor) -> Tensor:
    """As under autocast: every weight is cast for its product, and once more or not for its
    gradient."""
    y = (x.bfloat16() @ large.bfloat16())[:, :16]
    for weight in small:
        y = y @ weight.bfloat16()
    return y.float()


def test_a_kernel_for_each_small_weight_is_not_worth_it() -> None:
    small = [leaf((16, 16)) for _ in range(4)]
    passes = Passes(read_graph(joint_of(cast, leaf((8, 512)), leaf((512, 512)), *small)), 1)
    operations = passes.graph.operations
    products = [float(op.kind == "product") for op in operations]
    prices = fused(passes, products, bandwidth=1e9, launch=1e-3)
    search = Search(passes, prices)
    least = search.look_at("least", bidirectional(passes))
    without_the_least(search, least)
    (taken,) = (one for one in search.found.values() if one is not least)
    assert taken.estimate.seconds_added <= least.estimate.seconds_added - len(small) * 1e-3
    more = taken.estimate.kept_bytes - least.estimate.kept_bytes
    assert 0 < more <= LITTLE * least.estimate.peak()
    large = 512 * 512 * 2
    again = {
        one.plan.label: {passes.graph.shown_bytes(i) for i in run_again(passes, one.plan.kept)}
        for one in (least, taken)
    }
    assert again[least.plan.label] >= {16 * 16 * 2, large}
    assert large in again[taken.plan.label]
    assert 16 * 16 * 2 not in again[taken.plan.label]


def convolved(x: Tensor, weight: Tensor) -> Tensor:
    return F.relu(F.conv2d(x.bfloat16(), weight.bfloat16())).float()


def test_what_a_convolution_s_gradient_reads_is_in_memory() -> None:
    joint = joint_of(convolved, leaf((2, 3, 8, 8)), leaf((4, 3, 3, 3)))
    passes = Passes(read_graph(joint), 1)
    operations = passes.graph.operations
    (backward,) = (op for op in operations if op.target.startswith("aten.convolution_backward"))
    assert backward.kind == "product"
    casts = {i for i in passes.needed if "_to_copy" in operations[i].target}
    assert len(casts) == 2, [operations[i].target for i in passes.needed]
    assert casts <= read_by_heavy(passes)
    # the ReLU's mask is computed where the gradient is read
    others = {operations[i].target for i in passes.needed - read_by_heavy(passes)}
    assert len(others) == 1, others


def normed(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    y = F.conv2d(x, weight, padding=1)
    y = F.batch_norm(y, None, None, scale, training=True)
    return F.conv2d(F.relu(y), weight, padding=1).tanh()


def branched(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = F.relu(F.conv2d(x, weight, padding=1) + bias.view(1, -1, 1, 1))
    z = torch.tanh(F.conv2d(y, weight, padding=1))
    return F.conv2d(torch.sigmoid(z) * y, weight, padding=1).exp()


def gated(x: Tensor, weight: Tensor) -> Tensor:
    for _ in range(4):
        x = torch.tanh(x @ (weight * 1.0)) * torch.sigmoid(x)
    return x


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (normed, [(4, 8, 16, 16), (8, 8, 3, 3), (8,)]),
        (branched, [(2, 8, 16, 16), (8, 8, 3, 3), (8,)]),
        (gated, [(64, 32), (32, 32)]),
    ],
    ids=["batch norm", "convolutions", "products"],
)
@pytest.mark.parametrize("compiler", [{}, {"compiler": "inductor"}], ids=["one by one", "fused"])
def test_nothing_else_that_is_asked_for_holds_less_than_min(
    function: Any, shapes: list[tuple[int, ...]], compiler: dict[str, Any]
) -> None:
    joint = joint_of(function, *map(leaf, shapes))
    inputs = [node.meta["val"] for node in joint.graph.find_nodes(op="placeholder")]

    def of(memory: str | float) -> Decision:
        request = Request(read_memory(memory), settings=dict(compiler))
        return decide(joint, inputs, 1, request)

    least, others = of("min"), [of("auto")]
    for fraction in (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3):
        with contextlib.suppress(InvalidInput):
            others.append(of(fraction))
    assert len(others) > 1
    peak = least.chosen.estimate.peak()
    assert peak <= min(other.chosen.estimate.peak() for other in others)
    # nor is a part of a plan taken, which keeps more between the passes, where all of it does
    parts = {c.strategy for c in least.candidates if c.strategy.endswith(" groups")}
    within = (c for c in least.candidates if c.estimate.seconds_added <= least.limits.seconds)
    whole = min(c.estimate.peak() for c in within if c.strategy not in parts)
    assert (least.chosen.strategy in parts) == (peak < whole)
