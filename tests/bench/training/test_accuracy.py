from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ecornn.bench.models.step import make_step
from ecornn.bench.training.accuracy import (
    BOUNDS,
    SMALL,
    Passes,
    TracedBatchNorm,
    bound,
    compare,
    compare_with_eager,
    difference,
    has_draws,
    make_comparable,
    take_passes,
)

EXPECTED = Passes(
    torch.tensor(2.0),
    {"large": torch.full((100,), 1.0), "small": torch.full((4,), 1e-9)},
    {"mean": torch.ones(3)},
)


def test_equal_ones_are_equal() -> None:
    found = compare(EXPECTED, EXPECTED)
    assert (found.error, found.state_error, found.bitwise) == (0, 0, True)
    assert found.metrics() == {"error": 0.0, "state_error": 0.0, "bitwise": 1}


def test_the_worst_is_named() -> None:
    gradients = {**EXPECTED.gradients, "large": EXPECTED.gradients["large"] * 1.25}
    found = compare(replace(EXPECTED, gradients=gradients), EXPECTED)
    assert found.error == pytest.approx(0.25)
    assert found.where == "gradient of large"
    assert not found.bitwise


def test_the_loss_counts_too() -> None:
    found = compare(replace(EXPECTED, loss=torch.tensor(3.0)), EXPECTED)
    assert (found.error, found.where) == (0.5, "loss")


def test_a_gradient_that_is_only_rounding_is_seen_beside_the_others() -> None:
    gradients = {**EXPECTED.gradients, "small": -EXPECTED.gradients["small"]}
    found = compare(replace(EXPECTED, gradients=gradients), EXPECTED)
    assert 0 < found.error == pytest.approx(4e-9 / (SMALL * 10))


def test_a_gradient_that_is_missing_is_wrong() -> None:
    fewer = replace(EXPECTED, gradients={"large": EXPECTED.gradients["large"]})
    for pair in ((fewer, EXPECTED), (EXPECTED, fewer)):
        found = compare(*pair)
        assert found.error == 1
        assert "small" in found.where


def test_buffers_are_counted_apart() -> None:
    found = compare(replace(EXPECTED, buffers={"mean": torch.full((3,), 1.5)}), EXPECTED)
    assert (found.error, found.state_error, found.bitwise) == (0, 0.5, False)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_wrong(bad: float) -> None:
    assert difference(torch.tensor([1.0, bad]), torch.ones(2)) == 1
    assert difference(torch.ones(2), torch.zeros(2)) == 1


def test_a_step_is_compared_from_its_own_weights_and_seed() -> None:
    step, eager = (
        make_step("nmt", size="tiny", device="cpu", seed=seed, batch=3) for seed in (1, 2)
    )
    eager.batch = step.batch
    assert compare_with_eager(step, eager, seed=4).bitwise
    with torch.no_grad():
        next(iter(eager.model.parameters())).mul_(2)
    assert compare_with_eager(step, eager, seed=4).bitwise, "the weights are given again"


def test_passes_of_another_kind_are_taken() -> None:
    """A replayed graph's: they leave gradients without being asked for each pass."""
    step = make_step("resnet50", size="tiny", device="cpu")

    def replay() -> Tensor:
        step.clear()
        return step.passes()

    found = take_passes(step, 3, replay)
    assert set(found.gradients) == {name for name, _ in step.model.named_parameters()}


def test_models_that_draw_are_known() -> None:
    draws = {
        name: has_draws(make_step(name, size="tiny", device="cpu").model)
        for name in ("nmt", "speech", "lstm-lm", "gpt2", "transformer", "resnet50")
    }
    assert [name for name, drawn in draws.items() if not drawn] == ["speech", "resnet50"]


@pytest.mark.parametrize("training", [True, False])
def test_the_traced_batch_norm_is_a_batch_norm(training: bool) -> None:
    one = torch.nn.BatchNorm2d(3).train(training)
    one.weight.data.normal_()
    other = copy.deepcopy(one)
    x = torch.randn(4, 3, 5, 5)
    results = []
    for layer, mode in ((one, nullcontext()), (other, TracedBatchNorm())):
        given = x.clone().requires_grad_()
        with mode:
            y = layer(given)
        y.square().sum().backward()
        results.append((y, given.grad, layer.weight.grad, *layer.buffers()))
    assert "NativeBatchNorm" in type(results[1][0].grad_fn).__name__
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_a_model_is_compared_in_its_own_numbers() -> None:
    step = make_step("resnet50", size="tiny", device="cpu")
    assert step.autocast
    make_comparable(step)
    assert not step.autocast
    assert {p.dtype for p in step.model.parameters()} == {torch.float64}
    assert [t.dtype for t in step.batch] == [torch.float64, torch.int64]
    assert bound(step) == BOUNDS["float64"] < BOUNDS["ieee"]
    assert torch.isfinite(step.passes())
