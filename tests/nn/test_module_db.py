"""torch's own samples for its recurrent modules (`module_db`), ours against torch.nn itself."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence

import ecornn
from support.side_by_side import (
    CELLS,
    LAYERS,
    assert_identical,
    assert_near,
    measure,
    pair,
    tensors,
)

#: Samples that torch 2.13 has; fewer would mean that a keyword here lost its effect.
AT_LEAST = {"LSTM": 32, "GRU": 32, "RNN": 64, "LSTMCell": 2, "GRUCell": 2, "RNNCell": 3}
ERRORS_AT_LEAST = {"LSTM": 14, "GRU": 14, "RNN": 14, "LSTMCell": 4, "GRUCell": 6, "RNNCell": 6}


def load_module_db() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        # torch's test modules forbid `torch.backends.x.y = …` for the rest of the process; the
        # other tests of this run are not torch's
        patch.setattr(torch.backends, "disable_global_flags", lambda: None)
        from torch.testing._internal.common_modules import module_db
    names = {f"nn.{name}": name for name in LAYERS + CELLS}
    return {names[info.name]: info for info in module_db if info.name in names}


MODULE_DB = load_module_db()


@cache
def samples(name: str, dtype: torch.dtype, training: bool, packed: bool = True) -> tuple[Any, ...]:
    torch.manual_seed(20181)  # also called while tests are collected, when nothing is seeded
    info = MODULE_DB[name]
    common = {"device": "cpu", "dtype": dtype, "requires_grad": True, "training": training}
    return tuple(info.module_inputs_func(info, with_packed_sequence=packed, **common))


def error_samples(name: str) -> list[Any]:
    info = MODULE_DB[name]
    common = {"device": "cpu", "dtype": torch.float32, "requires_grad": False, "training": True}
    return list(info.module_error_inputs_func(info, **common))


def indices(of: Any) -> list[tuple[str, int]]:
    return [(name, i) for name in MODULE_DB for i in range(len(of(name)))]


@pytest.mark.parametrize("name", LAYERS + CELLS)
def test_module_db_has_samples(name: str) -> None:
    for training in (True, False):
        assert len(samples(name, torch.float32, training)) >= AT_LEAST[name]
    assert len(error_samples(name)) >= ERRORS_AT_LEAST[name]


def test_loading_module_db_leaves_torchs_flags_free() -> None:
    assert not torch.backends.flags_frozen()


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
@pytest.mark.parametrize(
    ("name", "index"), indices(lambda name: samples(name, torch.float32, True))
)
def test_sample_equals_torch(name: str, index: int, dtype: torch.dtype, training: bool) -> None:
    sample = samples(name, dtype, training)[index]
    made, called = sample.constructor_input, sample.forward_input
    ours, theirs = pair(name, *made.args, **made.kwargs)
    ours.to(dtype).train(training)
    theirs.to(dtype).train(training)
    found = measure(ours, *called.args, **called.kwargs)
    expected = measure(theirs, *called.args, **called.kwargs)
    if isinstance(called.args[0], PackedSequence):
        # torch runs packed sequences by kernels of their own, which round differently
        assert_near(found, expected, dtype, steps=len(called.args[0].batch_sizes))
    else:
        assert_identical(found, expected)
    assert {f"gradient of {n}" for n, _ in theirs.named_parameters()} <= found.keys()
    assert sum(key.startswith("gradient of argument") for key in found) == sum(
        t.requires_grad for t in tensors(called.args)
    )


# a packed sequence has its batch dimension already, so module_db's reference cannot add one
@pytest.mark.parametrize(
    ("name", "index"), indices(lambda name: samples(name, torch.float64, True, packed=False))
)
def test_sample_passes_torchs_reference(name: str, index: int) -> None:
    """module_db's own check: without a batch as with a batch of one."""
    sample = samples(name, torch.float64, True, packed=False)[index]
    called = sample.forward_input
    ours, _ = pair(name, *sample.constructor_input.args, **sample.constructor_input.kwargs)
    ours.double()
    expected = sample.reference_fn(ours, *called.args, **called.kwargs)
    torch.testing.assert_close(tensors(ours(*called.args, **called.kwargs)), tensors(expected))


@pytest.mark.parametrize(("name", "index"), indices(error_samples))
def test_error_sample_is_refused(name: str, index: int) -> None:
    """Ours raises what torch's tests expect, with torch's message at construction; a call's
    message is ours, which names argument, got, expected and remedy where torch's is one line."""
    error = error_samples(name)[index]
    made, called = (
        error.module_error_input.constructor_input,
        error.module_error_input.forward_input,
    )
    cls = getattr(ecornn, name)
    if error.error_on.name == "CONSTRUCTION_ERROR":
        with pytest.raises(error.error_type, match=error.error_regex):
            cls(*made.args, **made.kwargs)
        return
    module = cls(*made.args, **made.kwargs)
    with pytest.raises(error.error_type, match=r"got .*, expected .*; ") as caught:
        module(*called.args, **called.kwargs)
    assert isinstance(caught.value, ecornn.InvalidInput)
