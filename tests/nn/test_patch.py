"""`patch`: for a while, torch.nn's constructors make our layers."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import GRU as ImportedGRU
from torch.nn import LSTM as ImportedLSTM
from torch.nn import LSTMCell as ImportedLSTMCell
from torch.nn.utils.parametrizations import weight_norm

import ecornn
from support.side_by_side import CELLS, LAYERS, assert_identical, measure

SIZE = 6
NAMES = LAYERS + CELLS


class OwnForward(nn.LSTM):
    """A user's class, made before any patch."""

    def __init__(self, size: int, *, scale: float = 1.0) -> None:
        super().__init__(size, size, batch_first=True)
        self.scale = scale

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        output, state = super().forward(input, hx)
        return output * self.scale, state


class OwnNew(nn.GRU):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__new__(cls)
        made.__dict__["marked"] = True
        return made


def is_ours(module: nn.Module) -> bool:
    return type(module).__module__.startswith("ecornn.")


def make(name: str) -> Any:
    return getattr(nn, name)(SIZE, SIZE)


def input_of(name: str) -> Tensor:
    return torch.randn(*((5, 3, SIZE) if name in LAYERS else (3, SIZE)), requires_grad=True)


@pytest.fixture(autouse=True)
def _torch_makes_its_own_layers_afterwards() -> Iterator[None]:
    yield
    for name in NAMES:
        assert type(make(name)) is getattr(nn, name)


@pytest.mark.parametrize("name", NAMES)
def test_layers_made_in_the_block_are_ours(name: str) -> None:
    kind = getattr(nn, name)
    with ecornn.patch():
        assert getattr(nn, name) is kind
        layer = make(name)
    assert type(layer) is getattr(ecornn, name)
    assert isinstance(layer, kind)
    assert type(make(name)) is kind


@pytest.mark.parametrize("name", NAMES)
def test_patched_layer_computes_the_same(name: str) -> None:
    torch.manual_seed(8)
    theirs = make(name)
    with ecornn.patch():
        torch.manual_seed(8)
        ours = make(name)
    x = input_of(name)
    assert_identical(measure(ours, x), measure(theirs, x))


def test_arguments_reach_our_constructor() -> None:
    with ecornn.patch():
        layer = nn.LSTM(4, SIZE, 2, False, batch_first=True, dtype=torch.float64, zoneout=0.5)
        with pytest.raises(ValueError, match="hidden_size must be greater than zero"):
            nn.GRU(4, 0)
    assert repr(layer) == (
        "LSTM(4, 6, num_layers=2, bias=False, batch_first=True, zoneout=(0.5, 0.5))"
    )
    assert layer.weight_hh_l1.dtype == torch.float64


def test_names_imported_before_make_ours_too() -> None:
    with ecornn.patch():
        made = [ImportedLSTM(SIZE, SIZE), ImportedGRU(SIZE, SIZE), ImportedLSTMCell(SIZE, SIZE)]
    assert [type(m) for m in made] == [ecornn.LSTM, ecornn.GRU, ecornn.LSTMCell]
    assert type(ImportedLSTM(SIZE, SIZE)) is nn.LSTM


def test_instance_checks_hold_throughout() -> None:
    before = make("LSTM")
    with ecornn.patch():
        during = make("LSTM")
        for layer in (before, during):
            assert isinstance(layer, nn.LSTM)
            assert isinstance(layer, ImportedLSTM)
            assert not isinstance(layer, nn.GRU)
        assert not is_ours(before)
        assert issubclass(ecornn.LSTM, nn.LSTM)
    assert isinstance(during, nn.LSTM)
    assert not isinstance(before, ecornn.LSTM)


def test_layer_made_before_computes_on_inside_the_block() -> None:
    layer, x = make("GRU"), input_of("GRU")
    expected = measure(layer, x)
    with ecornn.patch():
        assert_identical(measure(layer, x), expected)
    assert type(layer) is nn.GRU


def test_our_own_constructors_work_inside_the_block() -> None:
    with ecornn.patch():
        made = [getattr(ecornn, name)(SIZE, SIZE) for name in NAMES]
    assert [type(m) for m in made] == [getattr(ecornn, name) for name in NAMES]


# --- how long it lasts ---------------------------------------------------------------------------


def test_global_patch_lasts_until_undone() -> None:
    patched = ecornn.patch()
    try:
        assert is_ours(make("RNN"))
        assert is_ours(make("RNN"))
    finally:
        patched.undo()
    assert not is_ours(make("RNN"))


def test_undoing_twice_is_undoing_once() -> None:
    outer, inner = ecornn.patch(), ecornn.patch()
    inner.undo()
    inner.undo()
    assert is_ours(make("LSTM"))
    outer.undo()
    outer.undo()
    assert not is_ours(make("LSTM"))


@pytest.mark.parametrize("first", [0, 1], ids=["outer_first", "inner_first"])
def test_nested_patches_last_until_the_last_is_undone(first: int) -> None:
    both = [ecornn.patch(), ecornn.patch()]
    both[first].undo()
    assert is_ours(make("LSTM"))
    both[1 - first].undo()
    assert not is_ours(make("LSTM"))


def test_nested_blocks() -> None:
    with ecornn.patch():
        with ecornn.patch():
            assert is_ours(make("GRU"))
        assert is_ours(make("GRU"))
    assert not is_ours(make("GRU"))


def test_undo_inside_the_block() -> None:
    with ecornn.patch() as patched:
        patched.undo()
        assert not is_ours(make("GRU"))


def test_same_patch_entered_again_patches_again() -> None:
    patched = ecornn.patch()
    for _ in range(2):
        with patched:
            assert is_ours(make("GRU"))
        assert not is_ours(make("GRU"))


def test_error_in_the_block_is_raised_and_undoes_the_patch() -> None:
    with pytest.raises(KeyError, match="from inside"), ecornn.patch():
        raise KeyError("from inside")
    assert not is_ours(make("LSTM"))


def test_constructor_that_fails_leaves_the_patch_working() -> None:
    with ecornn.patch():
        with suppress(TypeError):
            nn.LSTM()
        assert is_ours(make("LSTM"))


# --- subclasses, copies, pickles -----------------------------------------------------------------


@pytest.mark.parametrize("kind", [OwnForward, OwnNew])
def test_subclasses_stay_what_they_are(kind: Any) -> None:
    def build() -> Any:
        torch.manual_seed(1)
        return OwnForward(SIZE, scale=0.5) if kind is OwnForward else OwnNew(SIZE, SIZE, 2)

    x, expected = input_of("LSTM"), build()
    with ecornn.patch():
        made = build()
    for layer in (made, build()):
        assert type(layer) is kind
        assert_identical(measure(layer, x), measure(expected, x))
        assert kind is OwnForward or layer.marked


def test_subclass_defined_in_the_block_works_in_it_and_after() -> None:
    with ecornn.patch():

        class Local(nn.RNN):
            def __init__(self, size: int) -> None:
                super().__init__(size, size)
                self.head = nn.LSTM(size, size)

        made = Local(SIZE)
        assert is_ours(made.head)
    assert type(made) is Local
    assert type(Local(SIZE).head) is nn.LSTM


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["deepcopy", "copy", "pickle", "torch.save"])
def test_torchs_layer_copied_in_the_block_computes_the_same(name: str, how: str) -> None:
    layer, x = make(name), input_of(name)
    expected, buffer = measure(layer, x), io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    with ecornn.patch():
        made = {
            "deepcopy": lambda: copy.deepcopy(layer),
            "copy": lambda: copy.copy(layer),
            "pickle": lambda: pickle.loads(pickle.dumps(layer)),
            "torch.save": lambda: torch.load(buffer, weights_only=False),
        }[how]()
        assert isinstance(made, getattr(nn, name))
        assert_identical(measure(made, x), expected)
    assert_identical(measure(made, x), expected)
    assert_identical(measure(copy.deepcopy(made), x), expected)


@pytest.mark.parametrize("name", NAMES)
def test_layer_made_in_the_block_is_copied_and_pickled_after_it(name: str) -> None:
    with ecornn.patch():
        layer = make(name)
        saved = pickle.dumps(layer)
    x = input_of(name)
    for made in (copy.deepcopy(layer), pickle.loads(saved), pickle.loads(pickle.dumps(layer))):
        assert type(made) is getattr(ecornn, name)
        assert_identical(measure(made, x), measure(layer, x))


def test_parametrized_layer_is_made_and_converted_in_the_block() -> None:
    theirs = weight_norm(nn.LSTM(SIZE, SIZE), "weight_hh_l0")
    x = input_of("LSTM")
    expected = measure(theirs, x)
    with ecornn.patch():
        made = weight_norm(nn.LSTM(SIZE, SIZE), "weight_hh_l0")
        made.load_state_dict(theirs.state_dict())
        assert isinstance(made, ecornn.LSTM)
        assert_identical(measure(made, x), expected)
        assert_identical(measure(ecornn.convert(theirs), x), expected)


@pytest.mark.parametrize("inside", [True, False], ids=["in_the_block", "after_it"])
@pytest.mark.parametrize("name", NAMES)
def test_parametrized_layer_can_still_be_copied(name: str, inside: bool) -> None:
    """`parametrize` copies by `module.__new__(cls)`, called on the instance."""
    layer, x = make(name), input_of(name)
    weight_norm(layer, "weight_hh_l0" if name in LAYERS else "weight_hh")
    patched = ecornn.patch()
    try:
        if not inside:
            patched.undo()
        made = copy.deepcopy(layer)
    finally:
        patched.undo()
    assert_identical(measure(made, x), measure(layer, x))
