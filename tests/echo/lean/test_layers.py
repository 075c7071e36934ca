"""Recurrent layers that are run again: the same bits, and nothing kept but their arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import ecornn
from ecornn.echo.lean import layers
from ecornn.echo.lean.mode import LeanFunctions, Replaced
from support.alive import Alive


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "FEWEST_BYTES", 0)


def trained(layer: nn.Module, x: Any, replaced: Replaced | None, **context: Any) -> list[Tensor]:
    layer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bool(context)):
        if replaced is None:
            out, _ = layer(x)
        else:
            with LeanFunctions(replaced, again=layers.EVERY_CALL):
                out, _ = layer(x)
    out = out if isinstance(out, Tensor) else out.data
    out.float().square().sum().backward(retain_graph=True)
    out.float().sum().backward()  # twice: run again each time
    return [out.detach(), *(p.grad.clone() for p in layer.parameters())]


CASES: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    "gru": (nn.GRU, {"batch_first": True}),
    "tanh": (nn.RNN, {"num_layers": 2}),
    "relu": (nn.RNN, {"nonlinearity": "relu", "bias": False}),
    "projected": (nn.LSTM, {"proj_size": 3}),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_same_bits(case: str, packed: bool) -> None:
    kind, options = CASES[case]
    layer, x = kind(4, 6, **options), torch.randn(5, 3, 4)
    given = x
    if packed:
        first = options.get("batch_first", False)
        given = pack_padded_sequence(x, [3, 3, 2, 1, 1] if first else [5, 4, 2], first)
    replaced = Replaced()
    pairs = zip(trained(layer, given, replaced), trained(layer, given, None), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    assert replaced.layers == 1


def test_autocast_is_that_of_the_call() -> None:
    layer, x = nn.RNN(4, 6), torch.randn(5, 3, 4)  # torch's LSTM has bfloat16 on some CPUs only
    replaced = Replaced()
    found = trained(layer, x, replaced, autocast=True)
    assert all(map(torch.equal, found, trained(layer, x, None, autocast=True)))
    assert found[0].dtype is torch.bfloat16
    assert replaced.layers == 1


@pytest.mark.parametrize("which", ["input", "weight"])
def test_an_argument_that_was_changed_is_found(which: str) -> None:
    layer, x = nn.LSTM(4, 6), torch.randn(5, 3, 4)
    with LeanFunctions(Replaced(), again=layers.EVERY_CALL):
        out = layer(x)[0].sum()
    with torch.no_grad():
        (x if which == "input" else layer.weight_hh_l0).mul_(2)
    with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace"):
        out.backward()


class Looping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.step = nn.LSTM(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x)[0][-1]
        for _ in range(4):
            h = self.step(h)
        return h.sum()


def test_a_compiled_model_runs_them_again_where_asked_for() -> None:
    model, x = Looping(), torch.randn(5, 3, 4)
    expected = torch.autograd.grad(model(x), list(model.parameters()))
    for asked, calls in (
        ({"memory": "min"}, 1),
        ({"lean": "layers"}, 1),
        ({}, 0),
        ({"memory": "min", "lean": False}, 0),
    ):
        torch._dynamo.reset()
        compiled = ecornn.compile(model, **asked)
        found = torch.autograd.grad(compiled(x), list(model.parameters()))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
        assert ("run again in the backward pass" in str(compiled.explain())) == bool(calls)
    torch._dynamo.reset()


def test_draws_are_not_repeated_and_small_or_constant_layers_are_left() -> None:
    x, replaced = torch.randn(5, 3, 4), Replaced()
    with LeanFunctions(replaced, again=layers.EVERY_CALL):
        nn.LSTM(4, 6, num_layers=2, dropout=0.5)(x)
        nn.LSTM(4, 6).requires_grad_(False)(x)
        with torch.no_grad():
            nn.GRU(4, 6)(x)
    assert replaced.layers == 0
    with LeanFunctions(replaced, again=layers.EVERY_CALL):  # by a checkpoint of the model's own
        layer = nn.LSTM(4, 6)
        out = checkpoint(lambda given: layer(given)[0].sum(), x, use_reentrant=False)
    out.backward()
    with LeanFunctions(replaced):  # not asked for
        nn.LSTM(4, 6)(x)
    assert replaced.layers == 0
    with LeanFunctions(replaced, again=layers.EVERY_CALL):
        nn.LSTM(4, 6, num_layers=2, dropout=0.5).eval()(x)
    assert replaced.layers == 1
    assert "run again in the backward pass, 1 calls" in replaced.told()[0]


def test_nothing_but_the_arguments_is_kept() -> None:
    layer, x = nn.LSTM(8, 16), torch.randn(20, 4, 8)
    results = 20 * 4 * 16 * 4
    kept = {}
    for rerun in (False, True):
        with Alive() as alive:
            with LeanFunctions(Replaced(), again=layers.EVERY_CALL if rerun else layers.NO_CALL):
                out = layer(x)[0].sum()
            kept[rerun] = alive.bytes_now()
        out.backward()
    states = 2 * 4 * 16 * 4
    assert kept[False] > 3 * results
    assert kept[True] <= states + 4 + 1024


def test_calls_are_told_apart_by_their_order() -> None:
    """Also by those that are left to torch, such as the second one here."""
    made = [nn.GRU(4, 4), nn.GRU(4, 4).requires_grad_(False), nn.GRU(4, 4)]
    replaced = Replaced()
    functions = LeanFunctions(replaced, again=frozenset([1, 2]))
    with functions:
        for layer in made:
            layer(torch.randn(5, 3, 4))
    functions.end_of_call()
    assert (replaced.latest_able, replaced.latest_again, replaced.layers) == (2, 1, 1)
    with LeanFunctions(replaced, again=frozenset([0])) as evaluated, torch.no_grad():
        made[0](torch.randn(5, 3, 4))
    evaluated.end_of_call()
    assert (replaced.latest_able, replaced.layers) == (2, 1), "of calls for gradients alone"
