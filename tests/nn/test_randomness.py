"""Noise of training: reproducible from torch's generator, drawn as often as promised, and right.

Layers whose weights are the identity show their masks; where they do not, the masks are read off
the results and given to the oracle.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import ecornn
from support import oracle
from support.cases import CELLS, Case, call_layer, draw, draw_values, make_layer, pull_back
from support.tolerances import assert_matches, tolerance

NOISE: dict[str, dict[str, Any]] = {
    "zoneout": {"zoneout": 0.5},
    "zoneout of h": {"zoneout": (0.5, 0.0)},
    "recurrent dropout": {"recurrent_dropout": 0.5},
    "input dropout": {"input_dropout": 0.5},
    "output dropout": {"output_dropout": 0.5},
    "dropout": {"dropout": 0.5},
    "variational dropout": {"dropout": 0.5, "variational": True},
}
KINDS = {"lstm": ecornn.LSTM, "gru": ecornn.GRU, "rnn_tanh": ecornn.RNN}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lengths": {"lengths": [5, 9, 1]},
    "resets": {"resets": torch.eye(9, 3).bool()},
}
P, WIDE = 0.25, 400


def sigmas(share: float, p: float, count: int) -> float:
    """How far a share of `count` draws is from its expectation, in standard deviations."""
    return abs(share - p) / (p * (1 - p) / count) ** 0.5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_result_and_gradients(
    kind: str, noise: str, form: str
) -> None:
    layer = KINDS[kind](4, 6, 2, bidirectional=True, **NOISE[noise])
    x = draw(9, 3, 4, seed=1).float().requires_grad_()

    def run(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        output, state = layer(x, **FORMS[form])
        sources = [x, *layer.parameters()]
        return [output, *state, *torch.autograd.grad(output.square().sum(), sources)]

    first, again, other = run(0), run(0), run(1)
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], other[0])
    layer.eval()
    assert torch.equal(run(0)[0], run(1)[0])


@pytest.mark.parametrize("noise", NOISE)
def test_two_calls_draw_two_masks(noise: str) -> None:
    layer, x = ecornn.GRU(4, 6, 2, **NOISE[noise]), torch.randn(9, 3, 4)
    assert not torch.equal(layer(x)[0], layer(x)[0])


def test_explaining_draws_nothing() -> None:
    layer, x = ecornn.LSTM(4, 6, 2, **NOISE["zoneout"], input_dropout=0.5), torch.randn(9, 3, 4)
    before = torch.get_rng_state()
    layer.explain(x)
    assert torch.equal(torch.get_rng_state(), before)


def transparent(layers: int = 1, **options: Any) -> ecornn.RNN:
    """A layer that returns its non-negative input: no recurrence, identity weights."""
    layer = ecornn.RNN(WIDE, WIDE, layers, nonlinearity="relu", bias=False, **options)
    for name, p in layer.named_parameters():
        torch.nn.init.zeros_(p) if "weight_hh" in name else torch.nn.init.eye_(p)
    return layer


@pytest.mark.parametrize(
    ("layers", "options"),
    [
        (1, {"input_dropout": P}),
        (1, {"output_dropout": P}),
        (2, {"dropout": P, "variational": True}),
    ],
    ids=str,
)
def test_one_mask_a_sequence(layers: int, options: dict[str, Any]) -> None:
    """The same at every step, another for every sequence, kept values scaled."""
    output, _ = transparent(layers, **options)(torch.ones(7, 20, WIDE))
    assert torch.equal(output, output[:1].expand_as(output))
    mask = output[0]
    assert set(mask.unique().tolist()) == {0.0, torch.tensor(1 / (1 - P)).item()}
    assert sigmas((mask == 0).float().mean().item(), P, mask.numel()) < 4
    assert len(mask.unique(dim=0)) == 20


def test_plain_dropout_draws_a_mask_a_step() -> None:
    output, _ = transparent(2, dropout=P)(torch.ones(7, 20, WIDE))
    assert len(output.flatten(0, 1).unique(dim=0)) == 7 * 20
    assert sigmas((output == 0).float().mean().item(), P, output.numel()) < 4


def test_output_dropout_leaves_the_state_alone() -> None:
    output, h_n = transparent(output_dropout=P)(torch.ones(7, 20, WIDE))
    assert (output == 0).any()
    assert torch.equal(h_n, torch.ones_like(h_n))


@pytest.mark.parametrize("backend", ["aten", "reference"])
def test_recurrent_dropout_drops_weights_once_a_call(backend: str) -> None:
    """An input of one unit vector shows a column of the weights at every later step."""
    size, steps = 60, 4
    layer = ecornn.RNN(
        size, size, nonlinearity="relu", bias=False, recurrent_dropout=P, backend=backend
    ).double()
    torch.nn.init.eye_(layer.weight_ih_l0)
    torch.nn.init.uniform_(layer.weight_hh_l0, 0.01, 0.02)
    x = torch.cat([torch.eye(size).double()[None], torch.zeros(steps - 1, size, size).double()])
    output, _ = layer(x)
    dropped = output[1].T  # of sequence b: the b-th column of the weights that were used
    scaled = layer.weight_hh_l0.detach() / (1 - P)
    assert_matches(dropped, torch.where(dropped == 0, 0.0, scaled), tolerance(torch.float64))
    assert sigmas((dropped == 0).double().mean().item(), P, size * size) < 4
    for t in range(2, steps):
        assert_matches(output[t], output[t - 1] @ dropped.T, tolerance(torch.float64))
    (gradient,) = torch.autograd.grad(output.sum(), layer.weight_hh_l0)
    assert torch.equal(gradient == 0, dropped == 0)


@pytest.mark.parametrize("share", [(0.5, 0.0), (0.0, 0.5), (0.3, 0.6)], ids=str)
@pytest.mark.parametrize(
    "case", [*(Case(cell, hidden=5) for cell in CELLS), Case("lstm", hidden=5, proj=3)], ids=str
)
def test_zoneout_keeps_units_and_computes_the_others(
    case: Case, share: tuple[float, float]
) -> None:
    """A unit kept its value exactly where the value stands; all else is the oracle's."""
    case = replace(case, zoneout=share, steps=12, cell_states=case.lstm)
    layer, values = make_layer(case).train(), draw_values(case).requiring_grad()
    results = call_layer(layer, case, values)
    masks = [None, None]
    for i, (name, initial) in enumerate((("output", values.h0), ("cells", values.c0))):
        if share[i] > 0 and name in results:
            before = torch.cat([initial, results[name][:-1]])
            masks[i] = (results[name] == before).double().unsqueeze(0).detach()
            # ReLUs stand at zero by themselves, which the oracle's arithmetic does not mind
            assert case.cell == "rnn_relu" or 0 < masks[i].mean() < 1
    parameters, exact = oracle.parameters_of(layer), draw_values(case).requiring_grad()
    wanted = oracle.expect(
        layer, parameters, exact.x, exact.h0, exact.c0, zoneout=(masks[0], masks[1])
    ).named()
    for name, value in results.items():
        assert_matches(value, wanted[name], tolerance(torch.float64, 12), name)
    if case.cell == "rnn_relu":
        return  # whether a zero was kept or computed cannot be told, and decides its gradient
    gradients = pull_back(results, values.sources() | dict(layer.named_parameters()))
    expected = pull_back(wanted, exact.sources() | parameters)
    for name, value in gradients.items():
        assert_matches(value, expected[name], tolerance(torch.float64, 12), f"gradient of {name}")


@pytest.mark.parametrize("keep", ["states", "gates"])
@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh"])
def test_zoneout_is_drawn_for_every_unit_step_and_sequence(cell: str, keep: str) -> None:
    case = Case(cell, steps=20, batch=30, hidden=40, zoneout=(P, 0.5), cell_states=cell == "lstm")
    layer = make_layer(case, keep=keep).train()
    results = call_layer(layer, case, draw_values(case))
    for name, p in (("output", P), ("cells", 0.5)):
        if name not in results:
            continue
        kept = results[name][1:] == results[name][:-1]
        assert sigmas(kept.double().mean().item(), p, kept.numel()) < 4
        flat = kept.flatten(0, 1)
        assert len(flat.unique(dim=0)) == len(flat)
