"""Every mistake gets one error that says which argument, what came, what was expected and what to
do; and a call that failed has changed nothing."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils import _pytree as pytree

import ecornn

T, B, I, H = 5, 3, 4, 2  # noqa: E741  the letters of the shapes
KINDS: dict[str, Any] = {"lstm": ecornn.LSTM, "gru": ecornn.GRU, "rnn": ecornn.RNN}
#: Noise everywhere: had a failed call drawn any of it, the generator would have moved on.
NOISE = {"input_dropout": 0.5, "recurrent_dropout": 0.5, "zoneout": 0.5, "output_dropout": 0.5}

x, h, flags = torch.randn(T, B, I), torch.randn(1, B, H), torch.zeros(T, B, dtype=torch.bool)
unbatched = torch.randn(T, I)
packed = pack_padded_sequence(x, [2, 5, 1], enforce_sorted=False)


def on_meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


#: Name: argument that is named, and what differs from a good call `layer(x)`.
BAD_FOR_EVERY_LAYER: dict[str, tuple[str, dict[str, Any]]] = {
    "input is None": ("input", {"input": None}),
    "input is a list": ("input", {"input": x.tolist()}),
    "input is an array": ("input", {"input": np.zeros((T, B, I), np.float32)}),
    "input is 0-D": ("input", {"input": torch.tensor(1.0)}),
    "input is 1-D": ("input", {"input": x[0, 0]}),
    "input is 4-D": ("input", {"input": x.unsqueeze(0)}),
    "input has too many features": ("input", {"input": torch.randn(T, B, I + 1)}),
    "input has no features": ("input", {"input": torch.randn(T, B, 0)}),
    "unbatched input has too few features": ("input", {"input": torch.randn(T, I - 1)}),
    "input has no steps": ("input", {"input": torch.randn(0, B, I)}),
    "unbatched input has no steps": ("input", {"input": torch.randn(0, I)}),
    "input is float64": ("input", {"input": x.double()}),
    "input is float16": ("input", {"input": x.half()}),
    "input is int64": ("input", {"input": x.long()}),
    "input is bool": ("input", {"input": x > 0}),
    "input is complex": ("input", {"input": x + 0j}),
    "input is elsewhere": ("input", {"input": on_meta(x)}),
    "input is sparse": ("input", {"input": x.to_sparse()}),
    "input is nested": ("input", {"input": torch.nested.nested_tensor([x[0], x[1, :2]])}),
    "packed input has too many features": (
        "input",
        {"input": pack_padded_sequence(torch.randn(T, B, I + 1), [5, 5, 5])},
    ),
    "packed input is float64": ("input", {"input": packed.to(torch.float64)}),
    "packed input is elsewhere": (
        "input",
        {"input": PackedSequence(on_meta(packed.data), packed.batch_sizes)},
    ),
    "packed input is 3-D": (
        "input",
        {"input": PackedSequence(torch.randn(8, I, 1), packed.batch_sizes)},
    ),
    "lengths negative": ("lengths", {"lengths": torch.tensor([1, -1, 2])}),
    "lengths too long": ("lengths", {"lengths": torch.tensor([1, 2, T + 1])}),
    "lengths list too long": ("lengths", {"lengths": [1, 2, T + 1]}),
    "lengths list beyond int64": ("lengths", {"lengths": [1, 2, 2**70]}),
    "lengths float": ("lengths", {"lengths": torch.tensor([1.0, 2.0, 3.0])}),
    "lengths bool": ("lengths", {"lengths": torch.tensor([True, True, False])}),
    "lengths for another batch": ("lengths", {"lengths": torch.tensor([1, 2])}),
    "lengths 2-D": ("lengths", {"lengths": torch.ones(B, 1, dtype=torch.int64)}),
    "lengths 0-D for a batch": ("lengths", {"lengths": torch.tensor(2)}),
    "lengths a number": ("lengths", {"lengths": 3}),
    "lengths a string": ("lengths", {"lengths": "123"}),
    "lengths an array": ("lengths", {"lengths": np.array([1, 2, 3])}),
    "lengths a list of floats": ("lengths", {"lengths": [1.0, 2.0, 3.0]}),
    "lengths a list of bools": ("lengths", {"lengths": [True, True, True]}),
    "lengths a list with None": ("lengths", {"lengths": [1, None, 3]}),
    "lengths a list for another batch": ("lengths", {"lengths": [1, 2, 3, 4]}),
    "lengths elsewhere": ("lengths", {"lengths": on_meta(torch.tensor([1, 2, 3]))}),
    "lengths beside a PackedSequence": ("lengths", {"input": packed, "lengths": [2, 5, 1]}),
    "two lengths for an unbatched input": ("lengths", {"input": unbatched, "lengths": [1, 2]}),
    "length too long for an unbatched input": ("lengths", {"input": unbatched, "lengths": [6]}),
    "resets the wrong way round": ("resets", {"resets": flags.T}),
    "resets of another length": ("resets", {"resets": flags[1:]}),
    "resets 1-D for a batch": ("resets", {"resets": flags[:, 0]}),
    "resets 3-D": ("resets", {"resets": flags.unsqueeze(-1)}),
    "resets 2-D for an unbatched input": ("resets", {"input": unbatched, "resets": flags}),
    "resets float": ("resets", {"resets": flags.float()}),
    "resets int": ("resets", {"resets": flags.int()}),
    "resets a list": ("resets", {"resets": flags.tolist()}),
    "resets elsewhere": ("resets", {"resets": on_meta(flags)}),
    "resets beside a PackedSequence": ("resets", {"input": packed, "resets": flags}),
    "after_end unknown": ("after_end", {"lengths": [1, 2, 3], "after_end": "zero"}),
    "after_end is None": ("after_end", {"lengths": [1, 2, 3], "after_end": None}),
    "reset_to unknown": ("reset_to", {"resets": flags, "reset_to": "zeros"}),
    "reset_to a number": ("reset_to", {"resets": flags, "reset_to": 0}),
    "return_cell_states a string": ("return_cell_states", {"return_cell_states": "no"}),
}


def _states(first: Tensor | Any, second: Any = None) -> dict[str, Any]:
    """The bad state in place of h, beside a good c."""
    return {"hx": first, "second": h if second is None else second}


BAD_STATES: dict[str, tuple[str, dict[str, Any]]] = {
    "state of another size": ("hx", _states(torch.randn(1, B, H + 1))),
    "state of another batch": ("hx", _states(torch.randn(1, B + 1, H))),
    "state of more layers": ("hx", _states(torch.randn(2, B, H))),
    "state batch first": ("hx", _states(torch.randn(B, 1, H))),
    "state without its layers": ("hx", _states(h[0])),
    "state of an unbatched call for a batch": ("hx", {**_states(h[:, 0]), "input": x}),
    "state of a batch for an unbatched input": ("hx", {**_states(h), "input": unbatched}),
    "state of another batch than the packed input": (
        "hx",
        {**_states(torch.randn(1, B - 1, H)), "input": packed},
    ),
    "state is a list": ("hx", _states(h.tolist())),
    "state is float64": ("hx", _states(h.double())),
    "state is int64": ("hx", _states(h.long())),
    "state is elsewhere": ("hx", _states(on_meta(h))),
    "state is sparse": ("hx", _states(h.to_sparse())),
    "cell state of another size": ("hx", _states(h, torch.randn(1, B, H + 1))),
    "cell state is None": ("hx", _states(h, False)),
    "cell state is float64": ("hx", _states(h, h.double())),
    "cell state is elsewhere": ("hx", _states(h, on_meta(h))),
}
BAD_FOR_LSTM: dict[str, tuple[str, dict[str, Any]]] = {
    "one state for two": ("hx", {"hx": h}),
    "three states": ("hx", {"hx": (h, h, h)}),
    "no states in a tuple": ("hx", {"hx": ()}),
    "states in a dict": ("hx", {"hx": {"h": h, "c": h}}),
    "states both None": ("hx", {"hx": (None, None)}),
}
BAD_FOR_OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "two states for one": ("hx", {"hx": (h, h)}),
    "state is a number": ("hx", {"hx": 0}),
    "cell states where there are none": ("return_cell_states", {"return_cell_states": True}),
}


def _bad_calls() -> list[Any]:
    """(kind, argument, call) of every mistake that applies to a kind of layer."""
    rows = [("lstm", row) for row in (BAD_FOR_EVERY_LAYER | BAD_STATES | BAD_FOR_LSTM).items()]
    for kind in ("gru", "rnn"):
        own = BAD_FOR_EVERY_LAYER | BAD_STATES | BAD_FOR_OTHERS
        rows += [(kind, row) for row in own.items() if not row[0].startswith("cell state ")]
    found = []
    for kind, (name, (argument, changes)) in rows:
        call = {"input": x, **changes}
        if "second" in call:
            second = call.pop("second")
            call["hx"] = (call["hx"], second) if kind == "lstm" else call["hx"]
        found.append(pytest.param(kind, argument, call, id=f"{kind}: {name}"))
    return found


def snapshot(*held: Any) -> list[Any]:
    """All that a call could change: tensors with their versions, options, the generator, modes."""
    leaves: list[Any] = []
    for value in held:
        module = isinstance(value, torch.nn.Module)
        leaves += pytree.tree_leaves(dict(value.state_dict(keep_vars=True)) if module else value)
        if module:
            leaves += [(k, v) for k, v in vars(value).items() if not k.startswith("_")]
            leaves += [p.grad for p in value.parameters()]
    frozen = [
        (v.data_ptr(), v._version, v.tolist())
        if isinstance(v, Tensor) and not (v.is_meta or v.is_nested) and v.layout == torch.strided
        else repr(v)
        for v in leaves
    ]
    modes = (torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_autocast_enabled("cpu"))
    return [frozen, torch.get_rng_state().tolist(), modes]


def refused(call: Callable[[], Any], argument: str, *held: Any) -> ecornn.InvalidInput:
    """`call` raises an error that says all it should about `argument` and leaves all as it was."""
    before = snapshot(*held)
    with pytest.raises(ecornn.InvalidInput) as caught:
        call()
    error = caught.value
    assert snapshot(*held) == before
    assert error.argument.split(",")[0] == argument
    parts = (error.argument, error.got, error.expected, error.remedy)
    assert all(part and part in str(error) for part in parts)
    assert len(str(error).splitlines()) == 1
    return error


@pytest.mark.parametrize("options", [{}, NOISE], ids=["plain", "noisy"])
@pytest.mark.parametrize(("kind", "argument", "call"), _bad_calls())
def test_a_bad_call_is_refused_and_changes_nothing(
    kind: str, argument: str, call: dict[str, Any], options: dict[str, float]
) -> None:
    layer = KINDS[kind](I, H, **options)

    def good() -> list[Tensor]:
        torch.manual_seed(0)
        return pytree.tree_leaves(layer(x))

    before = good()
    refused(lambda: layer(**call), argument, layer, call)
    refused(lambda: layer.explain(**call), argument, layer, call)
    assert all(map(torch.equal, good(), before))


@pytest.mark.parametrize("kind", KINDS)
def test_batch_first_layers_name_their_own_order(kind: str) -> None:
    layer = KINDS[kind](I, H, batch_first=True)
    first = x.transpose(0, 1)
    assert "(B, T, I)" in refused(lambda: layer(first[None]), "input", layer, first).expected
    refused(lambda: layer(first[:, :0]), "input", layer, first)
    assert f"({B}, {T})" in refused(lambda: layer(first, resets=flags), "resets", layer).expected
    refused(lambda: layer(first, lengths=[1] * T), "lengths", layer, first)


def test_states_of_a_projected_layer_have_two_sizes() -> None:
    layer = ecornn.LSTM(I, H + 1, proj_size=H)
    good_h, good_c = torch.randn(1, B, H), torch.randn(1, B, H + 1)
    assert refused(lambda: layer(x, (good_c, good_c)), "hx", layer).argument == "hx, h_0"
    assert refused(lambda: layer(x, (good_h, good_h)), "hx", layer).argument == "hx, c_0"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("keep", "none"),
        ("keep", None),
        ("backend", "cudnn"),
        ("backend", 0),
        ("zoneout", 1.0),
        ("zoneout", -0.1),
        ("zoneout", float("nan")),
        ("zoneout", "0.1"),
        ("zoneout", True),
        ("zoneout", None),
        ("zoneout", ()),
        ("zoneout", (0.1,)),
        ("zoneout", (0.1, 0.1, 0.1)),
        ("zoneout", (0.1, 2.0)),
        ("zoneout", (0.1, True)),
        ("recurrent_dropout", 1.5),
        ("recurrent_dropout", (0.1, 0.1)),
        ("input_dropout", -1),
        ("input_dropout", True),
        ("output_dropout", float("inf")),
        ("output_dropout", torch.tensor([0.1, 0.2])),
        ("variational", 1),
        ("layer_norm", 1),
        ("layer_norm", "yes"),
    ],
)
def test_a_bad_option_is_refused(kind: str, argument: str, value: Any) -> None:
    refused(lambda: KINDS[kind](I, H, **{argument: value}), argument, value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "bad",
    [
        {"hidden_size": 0},
        {"hidden_size": 2.5},
        {"num_layers": 0},
        {"dropout": 1.5},
        {"dropout": True},
        {"proj_size": 3},
        {"nonlinearity": "sine"},
    ],
    ids=str,
)
def test_torchs_own_options_are_refused_as_torch_refuses_them(kind: str, bad: dict) -> None:
    theirs = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn": torch.nn.RNN}[kind]
    options = {"input_size": I, "hidden_size": H, **bad}
    with pytest.raises((ValueError, TypeError)) as wanted:
        theirs(**options)
    with pytest.raises(wanted.type) as found:
        KINDS[kind](**options)
    assert str(found.value) == str(wanted.value)


BAD_STEPS: dict[str, tuple[str, Any]] = {
    "input is a list": ("input", x[0].tolist()),
    "input is 0-D": ("input", torch.tensor(1.0)),
    "input is a sequence": ("input", x),
    "input has too many features": ("input", torch.randn(B, I + 1)),
    "input is float64": ("input", x[0].double()),
    "input is int64": ("input", x[0].long()),
    "input is elsewhere": ("input", on_meta(x[0])),
    "state of another size": ("hx", torch.randn(B, H + 1)),
    "state of another batch": ("hx", torch.randn(B + 1, H)),
    "state of a layer": ("hx", h),
    "state without a batch": ("hx", h[0, 0]),
    "state is a list": ("hx", h[0].tolist()),
    "state is float64": ("hx", h[0].double()),
    "state is elsewhere": ("hx", on_meta(h[0])),
}


@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell", "RNNCell"])
@pytest.mark.parametrize("name", BAD_STEPS)
def test_a_bad_step_of_a_cell_is_refused(kind: str, name: str) -> None:
    cell = getattr(ecornn, kind)(I, H)
    argument, value = BAD_STEPS[name]
    before = pytree.tree_leaves(cell(x[0]))
    if argument == "input":
        refused(lambda: cell(value), argument, cell, value)
    elif kind == "LSTMCell":
        refused(lambda: cell(x[0], (value, h[0])), argument, cell, value)
        refused(lambda: cell(x[0], (h[0], value)), argument, cell, value)
    else:
        refused(lambda: cell(x[0], value), argument, cell, value)
    assert all(map(torch.equal, pytree.tree_leaves(cell(x[0])), before))


@pytest.mark.parametrize(
    ("kind", "hx"),
    [("LSTMCell", h[0]), ("LSTMCell", (h[0],)), ("GRUCell", (h[0], h[0])), ("RNNCell", (h[0],))],
)
def test_a_cell_with_another_number_of_states_is_refused(kind: str, hx: Any) -> None:
    cell = getattr(ecornn, kind)(I, H)
    refused(lambda: cell(x[0], hx), "hx", cell, hx)


@pytest.mark.parametrize("model", [None, "model", {}, torch.nn.LSTM, torch.zeros(1)], ids=repr)
def test_only_modules_can_be_converted(model: Any) -> None:
    refused(lambda: ecornn.convert(model), "model")


@pytest.mark.parametrize(
    ("options", "call", "reason"),
    [
        ({"layer_norm": True}, {}, "layer norm"),
        ({"zoneout": 0.1}, {}, "zoneout"),
        ({"keep": "states"}, {}, "keep='states'"),
        ({"keep": "gates"}, {}, "keep='gates'"),
        ({}, {"return_cell_states": True}, "cell state"),
    ],
)
def test_a_backend_that_cannot_says_why(
    options: dict[str, Any], call: dict[str, Any], reason: str
) -> None:
    layer = ecornn.LSTM(I, H, backend="aten", recurrent_dropout=0.5, **options)
    before = snapshot(layer, x, call)
    for run in (layer, layer.explain):
        with pytest.raises(ecornn.NoBackend) as caught:
            run(x, **call)
        lines = str(caught.value).splitlines()
        assert any("aten:" in line and reason in line for line in lines)
        assert any("reference:" in line and "'aten' was asked for" in line for line in lines)
        assert "backend='auto'" in lines[0]
    assert snapshot(layer, x, call) == before
    layer.backend = "auto"
    assert layer.explain(x, **call).backend == "reference"


def test_lengths_are_checked_by_a_compiled_layer_too() -> None:
    layer = torch.compile(ecornn.LSTM(I, H), backend="aot_eager", fullgraph=True)
    assert torch.isfinite(layer(x, lengths=torch.tensor([1, 2, T]))[0]).all()
    for bad in ([1, 2, T + 1], [1, 2, -1]):
        refused(lambda bad=bad: layer(x, lengths=torch.tensor(bad)), "lengths")


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_lengths_are_checked_inside_torch_func_too(transform: str) -> None:
    layer = ecornn.LSTM(I, H)
    bad = torch.tensor([1, 2, T + 1])

    def total(values: Tensor) -> Tensor:
        return layer(values, lengths=bad)[0].sum()

    run = {
        "vmap": lambda: torch.func.vmap(total)(x[None]),
        "grad": lambda: torch.func.grad(total)(x),
        "jvp": lambda: torch.func.jvp(total, (x,), (x,)),
    }[transform]
    refused(run, "lengths", layer, x, bad)


def test_the_error_is_caught_by_code_written_for_torch() -> None:
    layer = ecornn.GRU(I, H)
    error = refused(lambda: layer(x[0, 0]), "input", layer)
    assert isinstance(error, ValueError)
    assert isinstance(error, RuntimeError)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.remedy) == (str(error), error.remedy)
