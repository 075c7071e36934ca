"""Weights are read as they are at the call: whatever is done to them, ours equals torch.nn with
the same values."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import ecornn
from support.side_by_side import LAYERS, assert_identical, assert_near, measure, pair, tensors

SIZE = 6  # input and hidden size alike, so that weights may be shared between any two places
WEIGHT = "weight_hh_l0"

over_layers = pytest.mark.parametrize("name", LAYERS)


def fresh(value: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.randn_like(value))


def as_torchs(ours: nn.RNNBase) -> nn.Module:
    """torch.nn's layer with the weights that `ours` has now, in the same memory."""
    kind = getattr(nn, type(ours).__name__)
    theirs = kind(ours.input_size, ours.hidden_size, ours.num_layers)
    for key in theirs.state_dict():
        setattr(theirs, key, nn.Parameter(getattr(ours, key).detach()))
    return theirs


def make(name: str) -> Any:
    return getattr(ecornn, name)(SIZE, SIZE, num_layers=2)


def make_input() -> Tensor:
    return torch.randn(5, 3, SIZE, requires_grad=True)


# --- changes to the parameters themselves ------------------------------------------------------


def assign(layer: Any) -> None:
    setattr(layer, WEIGHT, fresh(layer.weight_hh_l0))


def assign_a_plain_tensor(layer: Any) -> None:
    value = getattr(layer, WEIGHT).detach() * 2
    delattr(layer, WEIGHT)
    setattr(layer, WEIGHT, value)


def change_in_place(layer: Any) -> None:
    with torch.no_grad():
        layer.weight_hh_l0.mul_(-2)
        layer.bias_ih_l1.add_(1)


def change_data(layer: Any) -> None:
    layer.weight_hh_l0.data = torch.randn_like(layer.weight_hh_l0)


def make_non_contiguous(layer: Any) -> None:
    layer.weight_hh_l0 = nn.Parameter(torch.randn(SIZE, len(layer.weight_hh_l0)).T)
    layer.weight_ih_l1.data = torch.randn(2 * len(layer.weight_ih_l1), SIZE)[::2]
    assert not layer.weight_hh_l0.is_contiguous()


def swap(layer: Any) -> None:
    torch.utils.swap_tensors(layer.weight_hh_l0, fresh(layer.weight_hh_l0))


def load_assigned(layer: Any) -> None:
    layer.load_state_dict(
        {k: torch.randn_like(v) for k, v in layer.state_dict().items()}, assign=True
    )


def freeze_some(layer: Any) -> None:
    layer.weight_ih_l0.requires_grad_(False)
    layer.bias_hh_l1.requires_grad_(False)


def freeze_all(layer: Any) -> None:
    layer.requires_grad_(False)


CHANGES = [
    assign,
    assign_a_plain_tensor,
    change_in_place,
    change_data,
    make_non_contiguous,
    swap,
    load_assigned,
    freeze_some,
    freeze_all,
]


@pytest.mark.parametrize("change", CHANGES)
@over_layers
def test_changed_weights_equal_torchs(name: str, change: Callable[[Any], None]) -> None:
    ours, x = make(name), make_input()
    before = ours(x)[0].detach()
    change(ours)
    expected = measure(as_torchs(ours), x)
    for key in as_torchs(ours).state_dict():
        if not getattr(ours, key).requires_grad:
            del expected[f"gradient of {key}"]
    found = measure(ours, x)
    assert_identical(found, expected)
    assert torch.equal(found["result 0"], before) == (change in (freeze_some, freeze_all))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("weight_hh_l0", "weight_hh_l1"),
        ("weight_ih_l0", "weight_hh_l0"),
        ("bias_ih_l1", "bias_hh_l1"),
    ],
)
@over_layers
def test_weight_in_two_places_gets_both_gradients(name: str, first: str, second: str) -> None:
    ours, x = make(name), make_input()
    setattr(ours, second, getattr(ours, first))
    expected = measure(as_torchs(ours), x)
    expected[f"gradient of {first}"] += expected.pop(f"gradient of {second}")
    assert_near(measure(ours, x), expected, torch.float32, steps=len(x))


@over_layers
def test_weights_tied_between_two_layers_stay_tied(name: str) -> None:
    class Two(nn.Module):
        def __init__(self, kind: Any) -> None:
            super().__init__()
            self.a, self.b = kind(SIZE, SIZE), kind(SIZE, SIZE)
            self.b.weight_hh_l0 = self.a.weight_hh_l0

        def forward(self, x: Tensor) -> Any:
            return self.b(self.a(x)[0])

    ours, theirs = Two(getattr(ecornn, name)), Two(getattr(nn, name))
    ours.load_state_dict(theirs.state_dict())
    x = make_input()
    assert_identical(measure(ours, x), measure(theirs, x))
    for model in (ours, theirs):
        torch.optim.SGD(model.parameters(), lr=1.0).step()
    again = copy.deepcopy(ours)
    assert again.a.weight_hh_l0 is again.b.weight_hh_l0
    assert_identical(measure(again, x), measure(theirs, x))


# --- parametrizations, pruning, functional calls -------------------------------------------------


class Doubled(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return 2 * value


REPARAMETRIZATIONS: dict[str, Callable[[Any], Any]] = {
    "weight_norm": lambda layer: parametrizations.weight_norm(layer, WEIGHT),
    "orthogonal": lambda layer: parametrizations.orthogonal(layer, WEIGHT),
    "spectral_norm": lambda layer: parametrizations.spectral_norm(layer, WEIGHT),
    "custom": lambda layer: parametrize.register_parametrization(layer, WEIGHT, Doubled()),
    "old_weight_norm": lambda layer: nn.utils.weight_norm(layer, WEIGHT),
    "old_spectral_norm": lambda layer: nn.utils.spectral_norm(layer, WEIGHT),
    "pruned_by_size": lambda layer: prune.l1_unstructured(layer, WEIGHT, 0.5),
    "pruned_rows": lambda layer: prune.ln_structured(layer, "weight_ih_l1", 0.5, n=2, dim=0),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("method", REPARAMETRIZATIONS)
@over_layers
def test_reparametrized_layer_equals_torchs(name: str, method: str) -> None:
    ours, theirs = pair(name, SIZE, SIZE, num_layers=2)
    x = make_input()
    before = ours(x)[0]
    for layer in (ours, theirs):
        torch.manual_seed(3)
        REPARAMETRIZATIONS[method](layer)
        # each look at the weight in training is a power iteration, and torch.nn looks twice
        layer.train(method != "spectral_norm")
    found = measure(ours, x)
    assert_identical(found, measure(theirs, x))
    changes_values = method not in ("weight_norm", "old_weight_norm")
    assert not changes_values or not torch.equal(found["result 0"], before)
    for layer in (ours, theirs):
        torch.optim.SGD(layer.parameters(), lr=0.5).step()
    assert_identical(measure(ours, x), measure(theirs, x))


@over_layers
def test_parametrization_runs_once_a_call(name: str) -> None:
    class Counting(nn.Module):
        calls = 0

        def forward(self, value: Tensor) -> Tensor:
            self.calls += 1
            return value

    ours, counting = make(name), Counting()
    parametrize.register_parametrization(ours, WEIGHT, counting)
    counting.calls = 0
    ours(make_input())
    assert counting.calls == 1


@over_layers
def test_removed_pruning_leaves_the_pruned_weights(name: str) -> None:
    ours, theirs = pair(name, SIZE, SIZE, num_layers=2)
    for layer in (ours, theirs):
        prune.l1_unstructured(layer, WEIGHT, 0.5)
        prune.remove(layer, WEIGHT)
    x = make_input()
    assert_identical(measure(ours, x), measure(theirs, x))


@over_layers
def test_functional_call_uses_the_weights_it_is_given(name: str) -> None:
    ours, theirs = pair(name, SIZE, SIZE, num_layers=2)
    x = make_input()
    own = measure(ours, x)
    given = {key: fresh(value) for key, value in ours.state_dict().items()}
    theirs.load_state_dict({key: value.detach() for key, value in given.items()})

    found = torch.func.functional_call(ours, given, (x,))
    torch.autograd.backward(found[0].sum())
    expected = theirs(x)
    torch.autograd.backward(expected[0].sum())
    assert torch.equal(found[0], expected[0])
    for key, parameter in theirs.named_parameters():
        assert torch.equal(given[key].grad, parameter.grad), key
    assert_identical(measure(ours, x), own)  # and gives the layer's own back


# --- copies --------------------------------------------------------------------------------------


def through_torch_save(layer: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def replica(layer: Any) -> Any:
    """As torch.nn.parallel.replicate makes one: parameters become attributes of no Parameter."""
    made = layer._replicate_for_data_parallel()
    for key, value in layer.named_parameters():
        setattr(made, key, value.clone())
    return made


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "torch.save": through_torch_save,
    "replica": replica,
}


@pytest.mark.parametrize("how", COPIES)
@over_layers
def test_copy_equals_torchs_and_is_independent(name: str, how: str) -> None:
    ours, theirs = pair(name, SIZE, SIZE, num_layers=2)
    x = make_input()
    ours(x)  # a copy taken after a call carries nothing of it
    made = COPIES[how](ours)
    assert type(made) is type(ours)
    with torch.no_grad():
        ours.weight_hh_l0.zero_()
    for found, expected in zip(tensors(made(x)), tensors(theirs(x)), strict=True):
        assert torch.equal(found, expected)


@over_layers
def test_gradients_of_a_replica_reach_the_original(name: str) -> None:
    ours, theirs = pair(name, SIZE, SIZE, num_layers=2)
    x = make_input()
    replica(ours)(x)[0].sum().backward()
    theirs(x)[0].sum().backward()
    for key, parameter in theirs.named_parameters():
        assert torch.equal(getattr(ours, key).grad, parameter.grad), key


def test_options_of_ours_survive_a_copy() -> None:
    options = {"layer_norm": True, "zoneout": (0.1, 0.2), "variational": True, "keep": "gates"}
    layer = ecornn.LSTM(SIZE, SIZE, **options)
    for how in ("deepcopy", "pickle", "torch.save"):
        made = COPIES[how](layer)
        assert repr(made) == repr(layer)
        assert {key: getattr(made, key) for key in options} == options
        assert made.state_dict().keys() == layer.state_dict().keys()


# --- moves ---------------------------------------------------------------------------------------


@contextmanager
def conversion(by_swapping: bool) -> Iterator[None]:
    """How `.to` and `load_state_dict` change parameters: through `.data`, or by swapping."""
    torch.__future__.set_swap_module_params_on_conversion(by_swapping)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


MOVES: dict[str, Callable[[Any], Any]] = {
    "double": lambda layer: layer.double(),
    "half": lambda layer: layer.half(),
    "bfloat16_and_back": lambda layer: layer.bfloat16().float(),
    "to_dtype": lambda layer: layer.to(torch.float64),
    "to_cpu": lambda layer: layer.to("cpu"),
    "to_empty": lambda layer: _zeroed(layer.to("meta").to_empty(device="cpu")),
}


def _zeroed(layer: Any) -> Any:
    for parameter in layer.parameters():
        nn.init.constant_(parameter, 0.1)
    return layer


@pytest.mark.parametrize("by_swapping", [False, True], ids=["by_data", "by_swapping"])
@pytest.mark.parametrize("move", MOVES)
@over_layers
def test_moved_layer_equals_torchs(name: str, move: str, by_swapping: bool) -> None:
    ours, theirs = pair(name, SIZE, SIZE, num_layers=2)
    optimizer = torch.optim.SGD(ours.parameters(), lr=1.0)
    with conversion(by_swapping):
        moved, expected = MOVES[move](ours), MOVES[move](theirs)
    assert moved is ours
    x = make_input().detach().to(ours.weight_hh_l0.dtype).requires_grad_()
    assert_identical(measure(moved, x), measure(expected, x))
    held = optimizer.param_groups[0]["params"]
    assert all(a is b for a, b in zip(held, moved.parameters(), strict=True)) or move == "to_empty"


@over_layers
def test_state_is_loaded_by_swapping(name: str) -> None:
    """torch.nn's layers cannot: they hold weak references to their weights."""
    ours, x = make(name), make_input()
    values = {key: torch.randn_like(value) for key, value in ours.state_dict().items()}
    with conversion(by_swapping=True):
        ours.load_state_dict(values)
    assert_identical(measure(ours, x), measure(as_torchs(ours), x))
    assert torch.equal(ours.weight_hh_l1, values["weight_hh_l1"])


@over_layers
def test_flatten_parameters_is_accepted_and_changes_nothing(name: str) -> None:
    layer = make(name)
    x = make_input()
    before = [(p, p.data_ptr(), p.detach().clone()) for p in layer.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = layer(x)[0]
        assert layer.flatten_parameters() is None
        assert torch.equal(layer(x)[0], expected)
        copy.deepcopy(layer)(x)
    for parameter, (same, pointer, value) in zip(layer.parameters(), before, strict=True):
        assert parameter is same
        assert parameter.data_ptr() == pointer
        assert torch.equal(parameter, value)
