"""Scores in rows that begin at multiples of a cache line."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils._pytree import tree_leaves

import ecornn
from echo.test_single_sums import traced
from ecornn.echo import aligned_scores
from ecornn.echo.aligned_scores import (
    FEWEST_CLASSES,
    FEWEST_ROWS,
    LINE_BYTES,
    AlignScores,
    with_aligned_scores,
)

pytestmark = pytest.mark.usefixtures("fresh_compiler")

STEPS, WIDTH, CLASSES = 2, 8, FEWEST_CLASSES + 6
aligned_here = partial(with_aligned_scores, device="cpu")


def loss(x_TBH: Tensor, weight: Tensor, bias: Tensor | None, targets_TB: Tensor) -> Tensor:
    scores = F.linear(x_TBH, weight, bias)
    return F.cross_entropy(scores.flatten(0, 1), targets_TB.flatten())


def given(
    *, biased: bool = True, rows: int = FEWEST_ROWS, classes: int = CLASSES
) -> tuple[Any, ...]:
    torch.manual_seed(0)
    x = torch.randn(STEPS, rows // STEPS, WIDTH, requires_grad=True)
    weight = torch.randn(classes, WIDTH, requires_grad=True)
    bias = torch.randn(classes, requires_grad=True) if biased else None
    return x, weight, bias, torch.randint(classes, x.shape[:2])


def joint_of(function: Callable[..., Any], inputs: tuple[Any, ...]) -> fx.GraphModule:
    tensors = [one for one in inputs if one is not None]
    return traced(_with_none(function, inputs), *tensors)[0]


def _with_none(function: Callable[..., Any], inputs: tuple[Any, ...]) -> Callable[..., Any]:
    places = [one is not None for one in inputs]

    def run(*tensors: Tensor) -> Any:
        waiting = iter(tensors)
        return function(*(next(waiting) if there else None for there in places))

    return run


@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
def test_loss_and_gradients_stay_what_they_are(biased: bool) -> None:
    inputs = given(biased=biased)
    joint = joint_of(loss, inputs)
    tensors = [one for one in inputs if one is not None]
    expected = tree_leaves(joint(tensors, [torch.tensor(1.0)]))
    assert aligned_here(joint) == 1
    assert aligned_here(joint) == 0
    found = tree_leaves(joint(tensors, [torch.tensor(1.0)]))
    torch.testing.assert_close(found, expected)
    (eager,) = torch.autograd.grad(loss(*inputs), inputs[1])
    torch.testing.assert_close(found[2], eager)


def test_rows_begin_at_lines_and_what_is_known_of_them_says_so() -> None:
    joint = joint_of(loss, given())
    aligned_here(joint)
    (product,) = joint.graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default)
    row_bytes = product.meta["val"].stride(0) * product.meta["val"].element_size()
    assert row_bytes % LINE_BYTES == 0
    assert 0 < product.meta["val"].shape[1] - CLASSES < LINE_BYTES // 4
    views = [n for n in joint.graph.nodes if n.target is torch.ops.aten.view.default]
    of_scores = [n for n in views if n.meta["val"].shape[-1] == CLASSES and n.users]
    assert of_scores
    inputs = [one for one in given() if one is not None]
    seen: dict[str, Tensor] = {}

    class Watching(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            if n in of_scores:
                seen[n.name] = value
            return value

    Watching(joint).run(*inputs, torch.tensor(1.0))
    for node in of_scores:
        assert seen[node.name].stride() == node.meta["val"].stride()


def returned_too(*inputs: Any) -> tuple[Tensor, Tensor]:
    x, weight, bias, targets = inputs
    scores = F.linear(x, weight, bias)
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten()), scores


def squared(*inputs: Any) -> Tensor:
    return F.linear(*inputs[:3]).square().mean()


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (returned_too, given()),
        (squared, given()),
        (loss, given(rows=FEWEST_ROWS - 2)),
        (loss, given(classes=FEWEST_CLASSES - 6)),
        (loss, given(classes=FEWEST_CLASSES + LINE_BYTES // 4)),
    ],
    ids=["scores that are returned", "no scores", "few rows", "few classes", "aligned already"],
)
def test_what_stays_as_it_is(function: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
    assert aligned_here(joint_of(function, inputs)) == 0


def test_only_scores_on_cuda() -> None:
    assert with_aligned_scores(joint_of(loss, given())) == 0


def test_under_autocast() -> None:
    def cast(*inputs: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(*inputs)

    joint = joint_of(cast, given())
    assert aligned_here(joint) == 1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(WIDTH, CLASSES)

    def forward(self, x_TBH: Tensor, targets_TB: Tensor) -> Tensor:
        return loss(x_TBH, self.output.weight, self.output.bias, targets_TB)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_code_has_eager_s_gradients(
    monkeypatch: pytest.MonkeyPatch, dynamic: bool
) -> None:
    monkeypatch.setattr(aligned_scores, "with_aligned_scores", aligned_here)
    torch.manual_seed(1)
    model = Model()
    run = ecornn.compile(model, codegen="inductor", dynamic=dynamic)
    for rows in (FEWEST_ROWS, FEWEST_ROWS + 4):
        x, *_, targets = given(rows=rows)
        model.zero_grad()
        run(x, targets).backward()
        found = [x.grad, *(weight.grad for weight in model.parameters())]
        x.grad = None
        model.zero_grad()
        model(x, targets).backward()
        expected = [x.grad, *(weight.grad for weight in model.parameters())]
        torch.testing.assert_close(found, expected)
    assert "scores whose rows are made longer to be aligned: 1" in str(run.explain())


class Noting(CustomGraphPass):
    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: fx.Graph) -> None:
        self.graphs += 1

    def uuid(self) -> Any:
        return "noting"


def test_a_user_s_own_pass_is_called_as_well() -> None:
    mine = Noting()
    with torch._inductor.config.patch(joint_custom_pre_pass=mine):
        ecornn.compile(Model(), codegen="inductor")(*given()[::3]).backward()
    assert mine.graphs == 1


def test_the_cache_s_key() -> None:
    assert AlignScores(None, None, "key").uuid() == ("key",)
    assert AlignScores([Noting()], None, "key").uuid() == ("key", "noting")
    assert AlignScores(lambda graph: None, None, "key").uuid() is None
    assert pickle.loads(pickle.dumps(AlignScores(None, None, "key"))).uuid() == ("key",)
