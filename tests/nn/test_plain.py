"""The quick reading of a plain call is the planner's answer, and nothing else passes for plain."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import ecornn
from ecornn.nn import stack
from ecornn.nn.plain import plain_call
from ecornn.nn.stack import _whole
from ecornn.planner import ExecutionPlan
from ecornn.spec import RnnSpec

LAYERS: tuple[dict[str, Any], ...] = (
    {},
    {"num_layers": 2, "bidirectional": True, "dropout": 0.3},
    {"batch_first": True, "bias": False},
)


def is_plain(layer: Any, x: Any, hx: Any = None) -> bool:
    return plain_call(layer, x, hx) is not None


@pytest.mark.parametrize("options", LAYERS, ids=str)
@pytest.mark.parametrize("cell", ["LSTM", "GRU", "RNN"])
def test_a_plain_call_is_read_as_the_planner_would(cell: str, options: dict[str, Any]) -> None:
    layer, x = getattr(ecornn, cell)(4, 5, **options), torch.randn(6, 3, 4)
    for trained in (True, False):
        layer.requires_grad_(trained)
        call = plain_call(layer, x, None)
        assert call is not None
        plan = layer.explain(x)
        assert (plan.backend, plan.scope) == ("aten", "network")
        assert plan.spec.needs_grad == call.needs_grad == trained
        full = _whole(layer._read(x, None, None, "zeros", None, "zero", False).stack, trained)
        for name, quick, slow in zip(call._fields, call, full, strict=True):
            same = torch.equal(quick, slow) if isinstance(slow, torch.Tensor) else quick is slow
            if isinstance(slow, list):
                same = all(a is b for a, b in zip(quick, slow, strict=True))
            assert same or quick == slow, name


@pytest.mark.parametrize(
    "option",
    [
        {"layer_norm": True},
        {"zoneout": 0.1},
        {"recurrent_dropout": 0.1},
        {"input_dropout": 0.1},
        {"output_dropout": 0.1},
        {"num_layers": 2, "dropout": 0.1, "variational": True},
        {"keep": "states"},
        {"backend": "reference"},
        {"backend": "aten"},
    ],
    ids=str,
)
def test_an_option_is_not_plain(option: dict[str, Any]) -> None:
    assert not is_plain(ecornn.LSTM(4, 5, **option), torch.randn(6, 3, 4))


@pytest.mark.parametrize(
    "argument", [{"after_end": "never"}, {"reset_to": 0}, {"return_cell_states": 0}], ids=str
)
def test_a_bad_argument_that_would_change_nothing_is_refused(argument: dict[str, Any]) -> None:
    with pytest.raises(ecornn.InvalidInput, match=next(iter(argument))):
        ecornn.LSTM(4, 5)(torch.randn(6, 3, 4), **argument)


def test_an_option_set_later_is_not_plain() -> None:
    layer, x = ecornn.LSTM(4, 5), torch.randn(6, 3, 4)
    assert is_plain(layer, x)
    layer.backend = "reference"
    assert not is_plain(layer, x)


def test_weights_that_are_not_parameters_are_not_plain() -> None:
    x = torch.randn(6, 3, 4)
    pruned = prune.l1_unstructured(ecornn.LSTM(4, 5), "weight_hh_l0", amount=0.5)
    assert not is_plain(pruned, x)
    changed = ecornn.LSTM(4, 5)
    parametrize.register_parametrization(changed, "weight_ih_l0", nn.Identity())
    assert not is_plain(changed, x)
    assert not is_plain(ecornn.LSTM(4, 5)._replicate_for_data_parallel(), x)


def test_what_is_watched_is_not_plain() -> None:
    layer, x = ecornn.LSTM(4, 5), torch.randn(6, 3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not is_plain(layer, x)
    with torch.autograd.forward_ad.dual_level():
        assert not is_plain(layer, x)
    seen = []
    torch.func.vmap(lambda part: seen.append(is_plain(layer, part)) or part)(x.unsqueeze(0))
    assert seen == [False]


def test_a_tuple_is_no_state_of_a_gru() -> None:
    layer, x, h0 = ecornn.GRU(4, 5), torch.randn(6, 3, 4), torch.zeros(1, 3, 5)
    assert is_plain(layer, x, h0)
    assert not is_plain(layer, x, (h0,))
    with pytest.raises(ecornn.InvalidInput, match="hx"):
        layer(x, (h0,))


@pytest.mark.parametrize(
    ("x", "hx"),
    [
        (torch.randn(6, 4), None),
        (torch.randn(6, 3, 5), None),
        (torch.randn(0, 3, 4), None),
        (torch.randn(6, 3, 4).double(), None),
        (torch.randn(6, 3, 4, device="meta"), None),
        (torch.randn(6, 3, 4), torch.zeros(1, 3, 5)),
        (torch.randn(6, 3, 4), (torch.zeros(1, 2, 5), torch.zeros(1, 3, 5))),
        (torch.randn(6, 3, 4), (torch.zeros(1, 3, 5), torch.zeros(1, 3, 5).double())),
        (torch.randn(6, 3, 4), [torch.zeros(1, 3, 5), torch.zeros(1, 3, 5)]),
        ([1.0], None),
    ],
    ids=[
        "unbatched",
        "features",
        "no steps",
        "dtype",
        "device",
        "one state",
        "batch of h",
        "dtype of c",
        "list",
        "no tensor",
    ],
)
def test_anything_else_is_left_to_the_full_reading(x: Any, hx: Any) -> None:
    assert not is_plain(ecornn.LSTM(4, 5), x, hx)


def test_plans_follow_torch_s_setting_for_float32_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is not multiplied as TF32 the kernels are others, and may not fit on the chip."""
    made: list[RnnSpec] = []
    monkeypatch.setattr(stack, "_PLANS", {})
    monkeypatch.setattr(
        stack, "plan", lambda spec: made.append(spec) or ExecutionPlan(spec, *["a test"] * 4)
    )
    spec = RnnSpec("lstm", 4, 4, device="cuda")
    asked = (("tf32", 1), ("tf32", 1), ("tf32x3", 2), ("tf32", 2), ("ieee", 3), ("tf32x3", 3))
    for numbers, plans in asked:
        monkeypatch.setattr(stack, "numbers_of", lambda _, numbers=numbers: numbers)
        stack.plan_from(*astuple(spec))
        assert len(made) == plans
