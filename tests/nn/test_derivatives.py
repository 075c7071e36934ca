"""First and second derivatives against finite differences, and twice-differentiated float32."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call

import ecornn
from support import oracle
from support.cases import (
    CELLS,
    Case,
    Named,
    Values,
    call_arguments,
    call_layer,
    draw_values,
    make_layer,
)
from support.tolerances import assert_matches, relative_error, tolerance

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bidirectional": {"bidirectional": True},
    "two layers": {"layers": 2},
    "packed": {"form": "packed", "bidirectional": True},
    "lengths": {"lengths": True, "bidirectional": True},
    "frozen": {"lengths": True, "after_end": "frozen", "bidirectional": True},
    "resets": {"resets": True, "bidirectional": True},
    "to initial": {"resets": True, "reset_to": "initial", "bidirectional": True},
    "layer norm": {"layer_norm": True},
    "zoneout": {"zoneout": (0.25, 0.5)},
    "everything": {
        "steps": 2,
        "layers": 2,
        "bidirectional": True,
        "lengths": True,
        "after_end": "frozen",
        "resets": True,
        "reset_to": "initial",
        "layer_norm": True,
        "zoneout": (0.25, 0.5),
    },
}
LSTM_FEATURES: dict[str, dict[str, Any]] = {
    "projection": {"proj": 1},
    "cell states": {"cell_states": True, "bidirectional": True},
    "all of it": FEATURES["everything"] | {"proj": 1, "cell_states": True},
}
ASKED: dict[str, dict[str, Any]] = {
    "auto": {},
    "states": {"backend": "reference", "keep": "states"},
    "gates": {"backend": "reference", "keep": "gates"},
}


def _cases(**size: int) -> list[Any]:
    named = [(cell, *feature) for cell in CELLS for feature in FEATURES.items()]
    named += [("lstm", *feature) for feature in LSTM_FEATURES.items()]
    return [
        pytest.param(Case(**{"cell": cell, **size, **feature}), id=f"{cell}, {name}")
        for cell, name, feature in named
    ]


TINY = _cases(steps=3, batch=2, inputs=2, hidden=2)


def as_function(case: Case, **options: Any) -> tuple[Any, list[Tensor]]:
    """The layer as a function of everything it can be differentiated by, and a point."""
    layer, values = make_layer(case, **options), draw_values(case)
    # finite differences step on the padding too
    sources = replace(values, x=values.x.nan_to_num(1.0)).requiring_grad().sources()
    parameters = {n: p.detach().clone().requires_grad_() for n, p in layer.named_parameters()}

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip([*sources, *parameters], given, strict=True))
        at = replace(values, **{name: named.pop(name) for name in sources})
        return tuple(
            call_layer(lambda *a, **k: functional_call(layer, named, a, k), case, at).values()
        )

    return run, [*sources.values(), *parameters.values()]


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("case", TINY)
def test_gradcheck(case: Case, asked: str) -> None:
    run, at = as_function(case, **ASKED[asked])
    assert gradcheck(run, at, fast_mode=True)


@pytest.mark.parametrize("case", TINY)
def test_gradgradcheck(case: Case) -> None:
    run, at = as_function(replace(case, steps=2))
    assert gradgradcheck(run, at, fast_mode=True)


def _of_the_reference() -> list[Any]:
    """Without what the planner gives to the reference anyway, which keeps states then."""
    return [
        pytest.param(*param.values, asked, id=f"{param.id}-{asked}")
        for param in TINY
        for asked in ("states", "gates")
        if not param.id.endswith("everything")
        and not (asked == "states" and only_by_the_reference(param.values[0]))
    ]


def only_by_the_reference(case: Case) -> bool:
    return case.layer_norm or any(case.zoneout) or case.cell_states


@pytest.mark.parametrize("case", TINY)
def test_what_is_left_out_below_is_planned_above(case: Case) -> None:
    layer = make_layer(case)
    arguments, options = call_arguments(case, draw_values(case))
    plan = layer.explain(*arguments, **options)
    wanted = ("reference", "states") if only_by_the_reference(case) else ("aten", "none")
    assert (plan.backend, plan.keep) == wanted


@pytest.mark.parametrize(("case", "asked"), _of_the_reference())
def test_gradgradcheck_of_the_reference(case: Case, asked: str) -> None:
    run, at = as_function(replace(case, steps=2), **ASKED[asked])
    assert gradgradcheck(run, at, fast_mode=True)


@pytest.mark.parametrize("cell", CELLS)
def test_every_entry_of_the_jacobians(cell: str) -> None:
    """The slow mode; forward mode too."""
    run, at = as_function(Case(cell, 2, 2, 1, 2, resets=True, lengths=True), backend="reference")
    assert gradcheck(run, at, check_forward_ad=True)
    assert gradgradcheck(run, at)


def penalized(results: Named, values: Values, parameters: Iterable[Tensor]) -> list[Tensor]:
    """Gradients of a loss with a gradient penalty, the usual reason to differentiate twice."""
    loss = sum((r * r).sum() for r in results.values())
    sources = list(values.sources().values())
    slopes = torch.autograd.grad(loss, sources, create_graph=True)
    total = loss + sum((s * s).sum() for s in slopes)
    return list(torch.autograd.grad(total, [*sources, *parameters], materialize_grads=True))


@lru_cache(maxsize=4)
def expected(case: Case, dtype: torch.dtype) -> list[Tensor]:
    layer, values = make_layer(case), draw_values(case).to(dtype).requiring_grad()
    parameters = oracle.parameters_of(layer, dtype)
    results = oracle.expect(
        layer,
        parameters,
        *(values.x, values.h0, values.c0),
        lengths=values.lengths,
        after_end=case.after_end,
        resets=values.resets,
        reset_to=case.reset_to,
    ).named()
    if not case.cell_states:
        results.pop("cells", None)
    return penalized(results, values, parameters.values())


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("case", _cases(steps=9, batch=3, inputs=2, hidden=5))
def test_a_gradient_penalty_in_float32(case: Case, asked: str) -> None:
    layer = make_layer(case, torch.float32, **ASKED[asked])
    values = draw_values(case).to(torch.float32).requiring_grad()
    found = penalized(call_layer(layer, case, values), values, layer.parameters())
    wanted = expected(case, torch.float64)
    bound = tolerance(torch.float32, case.steps * case.layers)
    if case.layer_norm:  # ill-conditioned, as support.cases.sensitivity explains
        rounded = expected(case, torch.float32)
        bound = max(bound, 8 * max(map(relative_error, rounded, wanted)))
    names = [*values.sources(), *dict(layer.named_parameters())]
    for name, value, reference in zip(names, found, wanted, strict=True):
        assert_matches(value, reference, bound, name)


@pytest.mark.parametrize("options", [{}, {"lengths": True}, {"resets": True}], ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_a_second_derivative_leaves_the_first_usable(cell: str, options: dict[str, bool]) -> None:
    """create_graph=True and a plain backward pass after it give the same first derivatives."""
    case = Case(cell, **options)
    layer, values = make_layer(case, torch.float32), draw_values(case).to(torch.float32)
    values = values.requiring_grad()
    loss = call_layer(layer, case, values)["output"].square().sum()
    recorded = torch.autograd.grad(loss, list(layer.parameters()), create_graph=True)
    assert all(g.requires_grad for g in recorded)
    loss.backward()
    for (name, p), gradient in zip(layer.named_parameters(), recorded, strict=True):
        assert_matches(p.grad, gradient, tolerance(torch.float32, case.steps), name)


def test_a_second_derivative_is_taken_with_the_masks_that_were_drawn() -> None:
    layer = ecornn.LSTM(4, 3, 2, dropout=0.5)
    x = torch.randn(5, 3, 4, requires_grad=True)

    def penalty() -> list[Tensor]:
        torch.manual_seed(7)
        inputs = [x, *layer.parameters()]
        slopes = torch.autograd.grad(layer(x)[0].sin().sum(), inputs, create_graph=True)
        return list(torch.autograd.grad(sum(s.square().sum() for s in slopes), inputs))

    found = penalty()
    layer.backend = "reference"  # draws the same masks for the same seed
    for a, b in zip(found, penalty(), strict=True):
        assert_matches(a, b, tolerance(torch.float32, 5, order=2))


def test_masks_that_cannot_be_drawn_again_are_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, where cuDNN draws inside its kernel."""
    monkeypatch.setattr("ecornn.nn.stack.onednn_differentiable_again", lambda *_: False)
    layer = ecornn.LSTM(4, 3, 2, dropout=0.5)
    x = torch.randn(5, 3, 4, requires_grad=True)
    with pytest.raises(ecornn.NotDifferentiableTwice, match="backend='reference'"):
        torch.autograd.grad(layer(x)[0].sum(), x, create_graph=True)
