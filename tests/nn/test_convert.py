"""`convert`: a model's torch.nn layers become ours in place, and nothing else changes."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import ecornn
from ecornn.nn.base import RecurrentLayer
from support.side_by_side import CELLS, LAYERS, assert_identical, measure, tensors

SIZE = 6


class Tagger(nn.Module):
    """Layers and cells at several depths, one of them in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(SIZE, SIZE)
        self.encoder = nn.ModuleDict({"lstm": nn.LSTM(SIZE, SIZE, 2, dropout=0.2)})
        self.stack = nn.ModuleList([nn.GRU(SIZE, SIZE), nn.RNN(SIZE, SIZE, nonlinearity="relu")])
        self.cells = nn.ModuleList([nn.LSTMCell(SIZE, SIZE), nn.GRUCell(SIZE, SIZE)])
        self.cell = nn.RNNCell(SIZE, SIZE)
        self.again = self.stack[0]

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder["lstm"](self.embed(x))[0]
        for layer in (*self.stack, self.again):
            x = layer(x)[0]
        h, _ = self.cells[0](x[-1])
        return self.cell(self.cells[1](h))


def make_input() -> Tensor:
    return torch.randn(5, 3, SIZE, requires_grad=True)


def make(name: str) -> Any:
    return getattr(nn, name)(SIZE, SIZE)


def input_of(name: str) -> Tensor:
    return make_input() if name in LAYERS else torch.randn(3, SIZE, requires_grad=True)


def seeded(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(2)
    return measure(model, x)


def test_every_layer_and_cell_of_a_model_becomes_ours() -> None:
    model = ecornn.convert(Tagger())
    kinds = {name: type(module) for name, module in model.named_modules(remove_duplicate=False)}
    assert kinds["encoder.lstm"] is ecornn.LSTM
    assert kinds["stack.0"] is kinds["again"] is ecornn.GRU
    assert kinds["stack.1"] is ecornn.RNN
    assert kinds["cells.0"] is ecornn.LSTMCell
    assert kinds["cells.1"] is ecornn.GRUCell
    assert kinds["cell"] is ecornn.RNNCell
    assert kinds["embed"] is nn.Linear
    assert kinds[""] is Tagger
    assert model.again is model.stack[0]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_converted_model_computes_the_same(training: bool) -> None:
    model, x = Tagger().train(training), make_input()
    expected = seeded(model, x)
    assert ecornn.convert(model) is model
    assert model.training == training
    assert_identical(seeded(model, x), expected)


@pytest.mark.parametrize("name", LAYERS + CELLS)
def test_layer_itself_may_be_the_model(name: str) -> None:
    layer, x = make(name), input_of(name)
    expected = measure(layer, x)
    assert ecornn.convert(layer) is layer
    assert type(layer) is getattr(ecornn, name)
    assert_identical(measure(layer, x), expected)
    assert repr(layer) == repr(make(name))


def test_parameters_keys_and_hooks_stay() -> None:
    model, seen = Tagger(), []
    for module in (model.encoder["lstm"], model.cell):
        module.register_forward_hook(lambda *_: seen.append("forward"))
        module.register_full_backward_hook(lambda *_: seen.append("backward"))
    model.encoder["lstm"].weight_hh_l0.register_hook(lambda _: seen.append("gradient"))
    model.encoder["lstm"].note = "a user's own attribute"
    model.stack[1].weight_ih_l0.requires_grad_(False)
    before, keys = list(model.parameters()), list(model.state_dict())

    ecornn.convert(model)
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert list(model.state_dict()) == keys
    assert model.encoder["lstm"].note == "a user's own attribute"
    assert not model.stack[1].weight_ih_l0.requires_grad
    model(make_input()).sum().backward()
    assert sorted(seen) == ["backward", "backward", "forward", "forward", "gradient"]


def test_optimizer_goes_on() -> None:
    model, x = Tagger().eval(), make_input()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (model, twin)]
    for step in range(4):
        if step == 2:
            ecornn.convert(model)
        for m, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.zero_grad()
            m(x).square().sum().backward()
            optimizer.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_converting_twice_changes_nothing_more() -> None:
    model = ecornn.convert(Tagger())
    modules, kinds = list(model.modules()), [type(m) for m in model.modules()]
    attributes = [dict(vars(m)) for m in modules]
    ecornn.convert(model)
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert [type(m) for m in model.modules()] == kinds
    for module, before in zip(modules, attributes, strict=True):
        assert vars(module).keys() == before.keys()


def test_options_of_our_own_layers_stay() -> None:
    layer = ecornn.LSTM(SIZE, SIZE, layer_norm=True, zoneout=0.25, backend="reference")
    before = repr(layer)
    ecornn.convert(nn.Sequential(layer))
    assert repr(layer) == before
    assert "zoneout=(0.25, 0.25)" in before


def test_subclasses_are_left_alone() -> None:
    class Renamed(nn.LSTM):
        pass

    class Halved(nn.GRU):
        def forward(self, input: Tensor, hx: Any = None) -> Any:
            output, state = super().forward(input, hx)
            return output / 2, state

    model = nn.ModuleList([Renamed(SIZE, SIZE), Halved(SIZE, SIZE)])
    x = make_input()
    expected = [measure(layer, x) for layer in model]
    ecornn.convert(model)
    assert [type(layer) for layer in model] == [Renamed, Halved]
    for layer, value in zip(model, expected, strict=True):
        assert_identical(measure(layer, x), value)


# --- layers whose weights are not plain parameters -----------------------------------------------


class Doubled(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return 2 * value


def parametrized(name: str) -> Any:
    layer = make(name)
    weight = "weight_hh_l0" if name in LAYERS else "weight_hh"
    parametrize.register_parametrization(layer, weight, Doubled())
    return layer


@pytest.mark.parametrize("name", LAYERS + CELLS)
def test_parametrized_layer_is_converted(name: str) -> None:
    layer, x = parametrized(name), input_of(name)
    expected = measure(layer, x)
    ecornn.convert(layer)
    assert isinstance(layer, getattr(ecornn, name))
    assert parametrize.is_parametrized(layer)
    assert_identical(measure(layer, x), expected)
    assert_identical(measure(ecornn.convert(layer), x), expected)
    weight = "weight_hh_l0" if name in LAYERS else "weight_hh"
    parametrize.remove_parametrizations(layer, weight)
    assert type(layer) is getattr(ecornn, name)
    for found, value in zip(tensors(layer(x)), expected.values(), strict=False):
        assert torch.equal(found, value)


@pytest.mark.parametrize("name", LAYERS)
def test_only_the_given_copy_of_a_parametrized_layer_is_converted(name: str) -> None:
    """Copies of a parametrized module share the class that parametrize made for the first."""
    original, x = parametrized(name), make_input()
    other = copy.deepcopy(original)  # torch.nn's layers can be copied before the first call only
    expected = measure(original, x)
    ecornn.convert(other)
    assert_identical(measure(other, x), expected)
    assert_identical(measure(original, x), expected)
    assert not isinstance(original, getattr(ecornn, name))


@pytest.mark.parametrize("name", LAYERS + CELLS)
def test_all_copies_of_a_parametrized_layer_in_one_model_are_converted(name: str) -> None:
    layer, x = parametrized(name), input_of(name)
    model = nn.ModuleList([layer, copy.deepcopy(layer), copy.deepcopy(layer)])
    expected = measure(layer, x)
    ecornn.convert(model)
    for one in model:
        assert isinstance(one, getattr(ecornn, name))
        assert_identical(measure(one, x), expected)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize(
    "change",
    [
        lambda layer: prune.l1_unstructured(layer, "weight_hh_l0", 0.5),
        lambda layer: nn.utils.weight_norm(layer, "weight_hh_l0"),
        lambda layer: parametrizations.orthogonal(layer, "weight_hh_l0"),
        lambda layer: setattr(layer, "weight_hh_l0", nn.Parameter(layer.weight_hh_l0 * 2)),
    ],
    ids=["pruned", "weight_norm", "orthogonal", "assigned"],
)
@pytest.mark.parametrize("name", LAYERS)
def test_changed_layer_is_converted_as_it_is(name: str, change: Any) -> None:
    layer, x = make(name), make_input()
    change(layer)
    expected = measure(layer, x)
    assert_identical(measure(ecornn.convert(layer), x), expected)


# --- afterwards --------------------------------------------------------------------------------


def test_converted_model_can_be_copied_and_saved() -> None:
    model, x = ecornn.convert(nn.Sequential(nn.LSTM(SIZE, SIZE))), make_input()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert type(other[0]) is ecornn.LSTM
        assert_identical(measure(other, x), measure(model, x))


def test_converted_layer_takes_our_call_arguments() -> None:
    layer, x = ecornn.convert(nn.LSTM(SIZE, SIZE)), make_input()
    output, _ = layer(x, lengths=[5, 2, 1])
    assert output[2:, 1].count_nonzero() == 0
    assert "runs on" in str(layer.explain(x))


@pytest.mark.parametrize("wrong", [None, nn.LSTM, {"weight": 1}, torch.zeros(2), [nn.LSTM(2, 2)]])
def test_what_is_no_module_is_refused(wrong: Any) -> None:
    with pytest.raises(ecornn.InvalidInput, match=r"model: got .*, expected a torch\.nn\.Module; "):
        ecornn.convert(wrong)


def test_a_layer_can_be_called_while_it_becomes_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread: `ecornn.compile` converts at a model's first call."""
    layer, x = nn.LSTM(SIZE, SIZE), make_input()
    expected, found = layer(x)[0], []

    def called_meanwhile(made: Any) -> Any:
        if not found:
            found.append(None)
            found[0] = layer(x)[0]
        return make(made)

    make = RecurrentLayer._make
    monkeypatch.setattr(RecurrentLayer, "_make", called_meanwhile)
    ecornn.convert(layer)
    assert type(layer) is ecornn.LSTM
    assert torch.equal(found[0], expected)
    assert torch.equal(layer(x)[0], expected)
