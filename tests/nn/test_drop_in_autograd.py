"""Autograd and random draws through ours as through torch.nn's layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import ecornn
from support.side_by_side import (
    LAYERS,
    assert_identical,
    assert_near,
    measure,
    pair,
    tensors,
)

SIZE = 6
T, B = 5, 3

over_layers = pytest.mark.parametrize("name", LAYERS)
over_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
over_stacks = pytest.mark.parametrize(
    "options",
    [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True}],
    ids=["plain", "deep"],
)


def make_input(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(T, B, SIZE, dtype=dtype, requires_grad=True)


def seeded(module: nn.Module, *args: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Results and gradients of a call from a fixed seed, and where it leaves the generator."""
    torch.manual_seed(11)
    return measure(module, *args), torch.get_rng_state()


# --- dropout between layers ----------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("bidirectional", [False, True], ids=["one_way", "two_ways"])
@pytest.mark.parametrize("probability", [0.0, 0.4, 1.0])
@over_dtypes
@over_layers
def test_dropout_draws_what_torch_draws(
    name: str, dtype: torch.dtype, probability: float, bidirectional: bool, training: bool
) -> None:
    ours, theirs = pair(
        name, SIZE, SIZE, 3, dropout=probability, bidirectional=bidirectional, dtype=dtype
    )
    ours.train(training)
    theirs.train(training)
    x = make_input(dtype)
    (found, after), (expected, after_torchs) = seeded(ours, x), seeded(theirs, x)
    assert_identical(found, expected)
    assert torch.equal(after, after_torchs)


@over_layers
def test_dropout_draws_anew_in_training_and_nothing_in_eval(name: str) -> None:
    layer, x = getattr(ecornn, name)(SIZE, SIZE, 2, dropout=0.5), make_input()
    assert not torch.equal(layer(x)[0], layer(x)[0])
    layer.eval()
    state = torch.get_rng_state()
    assert torch.equal(layer(x)[0], layer(x)[0])
    assert torch.equal(torch.get_rng_state(), state)


@over_layers
def test_dropout_of_a_packed_sequence_is_reproducible(name: str) -> None:
    """The draws are not torch's, which are of the packed values' shape; the seed fixes ours too."""
    layer = getattr(ecornn, name)(SIZE, SIZE, 2, dropout=0.5)
    packed = pack_padded_sequence(torch.randn(T, B, SIZE), [5, 3, 2])
    (first, _), (second, _) = seeded(layer, packed), seeded(layer, packed)
    assert_identical(first, second)
    layer.eval()
    theirs = getattr(nn, name)(SIZE, SIZE, 2, dropout=0.5).eval()
    theirs.load_state_dict(layer.state_dict())
    assert_near(measure(layer, packed), measure(theirs, packed), torch.float32, T)


def test_dropout_of_one_layer_warns_as_torch_does() -> None:
    with pytest.warns(UserWarning, match="dropout option adds dropout after all but last"):
        ecornn.LSTM(SIZE, SIZE, dropout=0.5)


# --- changing results in place -------------------------------------------------------------------

CHANGES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "relu_ of the output": lambda output, h: output.relu_(),
    "mul_ of the output": lambda output, h: output.mul_(2),
    "a slice of the output": lambda output, h: output[0].zero_(),
    "mul_ of the last state": lambda output, h: h.mul_(2),
    "both": lambda output, h: (output.add_(1), h.add_(1)),
}


@pytest.mark.parametrize("change", CHANGES)
@over_stacks
@over_dtypes
@over_layers
def test_results_may_be_changed_in_place_where_torchs_may(
    name: str, dtype: torch.dtype, options: dict[str, Any], change: str
) -> None:
    ours, theirs = pair(name, SIZE, SIZE, **options, dtype=dtype)

    class Changing(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Any:
            result = self.layer(x)
            CHANGES[change](result[0], tensors(result)[1])
            return result

    x = make_input(dtype)
    expected, found = measure_if_allowed(Changing(theirs), x), measure_if_allowed(Changing(ours), x)
    assert_identical(found, expected)


def measure_if_allowed(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Nothing where autograd refuses, as for an LSTM in float32: oneDNN keeps its output for the
    backward pass."""
    try:
        return measure(module, x)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return {}


# --- backward passes -----------------------------------------------------------------------------


@over_stacks
@over_dtypes
@over_layers
def test_gradients_in_eval_mode_equal_torchs(
    name: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    ours, theirs = pair(name, SIZE, SIZE, **options, dtype=dtype)
    x = make_input(dtype)
    assert_identical(measure(ours.eval(), x), measure(theirs.eval(), x))


@over_stacks
@over_dtypes
@over_layers
def test_two_backward_passes_add_up(name: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    ours, theirs = pair(name, SIZE, SIZE, **options, dtype=dtype)
    x = make_input(dtype)
    found = {}
    for layer in (ours, theirs):
        x.grad = None
        output, state = layer(x)
        output.sum().backward(retain_graph=True)
        sum(t.square().sum() for t in tensors(state)).backward()
        found[layer] = {name: p.grad for name, p in layer.named_parameters()} | {"x": x.grad}
        with pytest.raises(RuntimeError, match="second time"):
            output.sum().backward()
    assert_identical(found[ours], found[theirs])


@pytest.mark.parametrize("used", [0, 1], ids=["output", "state"])
@over_layers
def test_gradient_of_one_result_alone_equals_torchs(name: str, used: int) -> None:
    ours, theirs = pair(name, SIZE, SIZE, num_layers=2)
    x = make_input()
    grads = {}
    for layer in (ours, theirs):
        loss = tensors(layer(x))[used].square().sum()
        grads[layer] = torch.autograd.grad(loss, [x, *layer.parameters()], allow_unused=True)
    for found, expected in zip(grads[ours], grads[theirs], strict=True):
        assert (found is None) == (expected is None)
        assert found is None or torch.equal(found, expected)


@pytest.mark.parametrize("hold", ["input", "weights"])
@over_layers
def test_gradients_are_only_computed_where_asked(name: str, hold: str) -> None:
    ours, theirs = pair(name, SIZE, SIZE, num_layers=2)
    x = make_input()
    if hold == "input":
        x = x.detach()
    else:
        ours.requires_grad_(False)
        theirs.requires_grad_(False)
    found = measure(ours, x)
    assert_identical(found, measure(theirs, x))
    assert any(key.startswith("gradient") for key in found)


@over_stacks
@over_dtypes
@over_layers
def test_saved_tensors_may_be_kept_elsewhere(
    name: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """What autograd keeps passes through hooks, as `save_on_cpu` needs."""
    ours, theirs = pair(name, SIZE, SIZE, **options, dtype=dtype)
    x, moved = make_input(dtype), []

    def pack(value: Tensor) -> Tensor:
        moved.append(value)
        return value.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        found = measure(ours, x)
    assert moved
    with torch.autograd.graph.save_on_cpu():
        again = measure(ours, x)
    expected = measure(theirs, x)
    assert_identical(found, expected)
    assert_identical(again, expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
@over_layers
def test_checkpointed_layer_equals_torchs(name: str, use_reentrant: bool) -> None:
    ours, theirs = pair(name, SIZE, SIZE, num_layers=2, dropout=0.3)

    class Checkpointed(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.layer, x, use_reentrant=use_reentrant)

    x = make_input()
    (found, _), (expected, _) = seeded(Checkpointed(ours), x), seeded(Checkpointed(theirs), x)
    assert_identical(found, expected)


@over_layers
def test_state_carries_gradients_from_chunk_to_chunk(name: str) -> None:
    """Back-propagation through two calls, and truncated where the state is detached."""
    ours, theirs = pair(name, SIZE, SIZE)

    class Chunked(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Any:
            first, state = self.layer(x[:2])
            second, state = self.layer(x[2:4], state)
            held = tuple(s.detach() for s in state) if name == "LSTM" else state.detach()
            third, state = self.layer(x[4:], held)
            return first, second, third, state

    x = make_input()
    found = measure(Chunked(ours), x)
    assert_identical(found, measure(Chunked(theirs), x))


@over_layers
def test_hooks_of_modules_and_parameters_run_once(name: str) -> None:
    layer, x, seen = getattr(ecornn, name)(SIZE, SIZE), make_input(), []
    layer.register_forward_pre_hook(lambda module, args: seen.append("before"))
    layer.register_forward_hook(lambda module, args, result: seen.append("after"))
    layer.register_full_backward_hook(lambda module, given, came: seen.append("backward"))
    layer.weight_hh_l0.register_hook(lambda grad: seen.append("gradient"))
    layer.weight_hh_l0.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    layer(x)[0].sum().backward()
    assert seen[:2] == ["before", "after"]
    assert sorted(seen[2:]) == ["accumulated", "backward", "gradient"]


@over_layers
def test_second_derivative_equals_torchs_where_torch_has_one(name: str) -> None:
    """In float64, for which torch's CPU kernels can be differentiated again; ours also in
    float32, where torch's LSTM cannot."""
    ours, theirs = pair(name, SIZE, SIZE, dtype=torch.float64)

    def twice(layer: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        (slope,) = torch.autograd.grad(layer(x)[0].square().sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), [x, *layer.parameters()])

    x = make_input(torch.float64)
    expected = twice(theirs, x)
    single = twice(copy.deepcopy(ours).float(), x.detach().float().requires_grad_())
    found = twice(ours, x)
    for short, long, value in zip(single, found, expected, strict=True):
        assert_near({"twice": long}, {"twice": value}, torch.float64, T * T)
        assert_near({"twice": short}, {"twice": value}, torch.float32, T * T)
