"""The operators themselves: torch.library's own checks, derivatives, vmap rules, what is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.utils import _pytree as pytree

import ecornn
from ecornn.spec import weight_layout
from support import oracle
from support.cases import CELLS, Case, call_layer, draw, draw_values, make_layer, pull_back
from support.tolerances import assert_matches, tolerance

forward = torch.ops.ecornn.recurrence
backward = torch.ops.ecornn.recurrence_backward

#: Names of weights as the operator lists them, and as layers do.
PARTS = {
    "w_ih": "weight_ih",
    "w_hh": "weight_hh",
    "b_ih": "bias_ih",
    "b_hh": "bias_hh",
    "w_hr": "weight_hr",
    "norm_ih": "norm_ih",
    "norm_hh": "norm_hh",
    "norm_c": "norm_c",
    "norm_c_bias": "norm_c_bias",
}
TENSORS = 8
BOUND = tolerance(torch.float64, 16)

#: Zoneout is asked for by a probability here, and drawn as masks by `arguments`.
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "both directions": {"bidirectional": True},
    "lengths": {"lengths": True, "bidirectional": True},
    "frozen": {"lengths": True, "after_end": "frozen", "bidirectional": True},
    "resets": {"resets": True, "bidirectional": True},
    "resets and ends": {"resets": True, "bidirectional": True, "lengths": True},
    "layer norm, no bias": {"layer_norm": True, "bidirectional": True, "bias": False},
    "zoneout": {"zoneout": (0.5, 0.5), "bidirectional": True},
    "everything": {
        "bidirectional": True,
        "lengths": True,
        "after_end": "frozen",
        "resets": True,
        "reset_to": "initial",
        "layer_norm": True,
        "zoneout": (0.5, 0.5),
    },
}
FOR_LSTM: dict[str, dict[str, Any]] = {
    "projection": {"proj": 2, "bidirectional": True},
    "cell states": {"cell_states": True, "bidirectional": True},
    "all of it": FEATURES["everything"] | {"proj": 2, "cell_states": True},
}
#: Of the reference, other features include these.
ONLY_ATEN = ("both directions", "frozen", "resets and ends")
FOR_ATEN = ("plain", "lengths", "resets", "projection", *ONLY_ATEN)


def _calls(*plans: tuple[str, str]) -> list[Any]:
    """(case, backend, keep) for every cell and feature that a backend has."""
    named = [(cell, *feature) for cell in CELLS for feature in FEATURES.items()]
    named += [("lstm", *feature) for feature in FOR_LSTM.items()]
    return [
        pytest.param(
            Case(cell, 3, 2, 2, 3, **feature), backend, keep, id=f"{cell}, {name}: {backend} {keep}"
        )
        for backend, keep in plans
        for cell, name, feature in named
        if (name in FOR_ATEN if backend == "aten" else name not in ONLY_ATEN)
        and (cell != "rnn_relu" or name in ("plain", "everything"))
    ]


STATES, GATES = ("reference", "states"), ("reference", "gates")
TRAINING = _calls(("aten", "none"), STATES, GATES)


def _in_turns(first: int) -> list[Any]:
    """Every feature, backend and kept form, each with one of its cells, which take turns: torch's
    checks of an operator trace it time and again, and look at nothing that the cells differ in."""
    alike: dict[str, list[Any]] = {}
    for param in TRAINING:
        alike.setdefault(param.id.partition(", ")[2], []).append(param)
    return [every[(first + i) % len(every)] for i, every in enumerate(alike.values())]


def arguments(case: Case, backend: str, keep: str) -> list[Any]:
    """The operator's arguments for a case, in float64."""
    layer, values = make_layer(case), draw_values(case)
    layout = weight_layout(
        case.cell, bias=case.bias, projection=case.proj > 0, layer_norm=case.layer_norm
    )
    ends = ["_l0", "_l0_reverse"][: case.directions]
    weights = [getattr(layer, PARTS[p] + end) for end in ends for p in layout.split(",")]
    lengths = None if values.lengths is None else torch.tensor(values.lengths)
    masks: list[Tensor | None] = [None, None]
    for i, state in enumerate((values.h0, values.c0)):
        if case.zoneout[i] > 0 and state is not None:
            shape = (case.directions, case.steps, case.batch, state.shape[-1])
            masks[i] = (draw(*shape, seed=7 + i) > 0).double()
    tensors = [values.x, values.h0, values.c0, [w.detach() for w in weights], values.resets]
    constants = [case.cell, layout, case.reset_to, case.after_end, case.cell_states, backend, keep]
    return [*tensors, lengths, *masks, *constants]


def requiring_grad(args: list[Any]) -> list[Any]:
    def leaf(value: Any) -> Any:
        return pytree.tree_map(lambda t: t.clone().requires_grad_(), value)

    return [*(None if a is None else leaf(a) for a in args[:4]), *args[4:]]


def backward_arguments(args: list[Any], needs_input: bool = True) -> list[Any]:
    """The backward operator's arguments after a forward run, with a gradient of every result."""
    output, h_n, c_n, cells, kept = forward(*args)
    given = [output, h_n, c_n if c_n.numel() else None, cells if args[12] else None]
    grads = [None if r is None else draw(*r.shape, seed=20 + i) for i, r in enumerate(given)]
    return [*grads, output, cells, kept, needs_input, 1, *args]


@pytest.mark.parametrize(("case", "backend", "keep"), _in_turns(0))
def test_opcheck_of_the_forward_operator(case: Case, backend: str, keep: str) -> None:
    args = requiring_grad(arguments(case, backend, keep))
    torch.library.opcheck(forward.default, args)


@pytest.mark.parametrize(
    ("case", "backend", "keep"), _calls(("aten", "none"), ("reference", "none"))[::3]
)
def test_opcheck_without_gradients(case: Case, backend: str, keep: str) -> None:
    torch.library.opcheck(forward.default, arguments(case, backend, keep))


@pytest.mark.parametrize(("case", "backend", "keep"), _in_turns(1))
def test_opcheck_of_the_backward_operator(case: Case, backend: str, keep: str) -> None:
    torch.library.opcheck(backward.default, backward_arguments(arguments(case, backend, keep)))


def masks_as_states(args: list[Any]) -> tuple[Tensor | None, Tensor | None]:
    return args[6], args[7]


@pytest.mark.parametrize(("case", "backend", "keep"), TRAINING)
def test_results_and_gradients_with_given_masks(case: Case, backend: str, keep: str) -> None:
    """Both directions with masks of their own, which a layer draws and does not show."""
    args = requiring_grad(arguments(case, backend, keep))
    output, h_n, c_n, cells, _ = forward(*args)
    results = {"output": output, "h_n": h_n}
    results |= {"c_n": c_n} if case.lstm else {}
    results |= {"cells": cells} if case.cell_states else {}

    layer, values = make_layer(case), draw_values(case).requiring_grad()
    parameters = oracle.parameters_of(layer)
    wanted = oracle.expect(
        layer,
        parameters,
        *(values.x, values.h0, values.c0),
        lengths=values.lengths,
        after_end=case.after_end,
        resets=values.resets,
        reset_to=case.reset_to,
        zoneout=masks_as_states(args),
    ).named()
    wanted = {name: wanted[name] for name in results}
    ends = ["_l0", "_l0_reverse"][: case.directions]
    names = [PARTS[p] + end for end in ends for p in args[9].split(",")]
    sources = dict(zip(values.sources(), (a for a in args[:3] if a is not None), strict=True))
    found = pull_back(results, sources | dict(zip(names, args[3], strict=True)))
    expected = pull_back(wanted, values.sources() | parameters)
    for name, value in results.items():
        assert_matches(value, wanted[name], BOUND, name)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert_matches(value, expected[name], BOUND, f"gradient of {name}")


@pytest.mark.parametrize(("case", "backend", "keep"), TRAINING[::3])
def test_gradcheck_and_gradgradcheck(case: Case, backend: str, keep: str) -> None:
    args = requiring_grad(arguments(case, backend, keep))
    args[0] = args[0].detach().nan_to_num(1.0).requires_grad_()
    states = [a for a in args[:3] if a is not None]

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        rest = iter(given)
        ahead = [None if a is None else next(rest) for a in args[:3]]
        output, h_n, c_n, cells, _ = forward(*ahead, list(rest), *args[4:])
        return (output, h_n, *([c_n] if case.lstm else []), *([cells] if case.cell_states else []))

    assert gradcheck(run, [*states, *args[3]], fast_mode=True)
    assert gradgradcheck(run, [*states, *args[3]], fast_mode=True)


def _by_loop(op: Callable[..., Any], args: list[Any], dims: list[Any], size: int) -> Any:
    def take(value: Any, dim: Any, s: int) -> Any:
        if isinstance(value, list):
            return [take(v, d, s) for v, d in zip(value, dim, strict=True)]
        return value if dim is None else value.select(dim, s)

    each = [op(*(take(a, d, s) for a, d in zip(args, dims, strict=True))) for s in range(size)]
    return pytree.tree_map(lambda *column: torch.stack(column), *each)


def _mapped(
    args: list[Any], size: int, which: Callable[[int], bool]
) -> tuple[list[Any], list[Any]]:
    """Arguments with one more dimension where `which` says so, and where it is."""

    def spread(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return torch.stack([value.roll(s, -1) for s in range(size)])
        return torch.stack([value * (1 - s / 8) for s in range(size)])

    given, dims = list(args), [None] * len(args)
    for i, value in enumerate(args):
        if not which(i):
            dims[i] = [None] * len(value) if isinstance(value, list) else None
        elif isinstance(value, list):
            given[i], dims[i] = [spread(v) for v in value], [0] * len(value)
        elif isinstance(value, Tensor):
            given[i], dims[i] = spread(value), 0
    return given, dims


#: Positions that are mapped: all tensors, all but the weights, the input alone.
MAPPED = {
    "everything": lambda i: i < TENSORS,
    "all but weights": lambda i: i < TENSORS and i != 3,
    "input": lambda i: i == 0,
}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("which", MAPPED)
@pytest.mark.parametrize(("case", "backend", "keep"), TRAINING[::3])
def test_vmap_of_both_operators_is_a_loop(
    case: Case, backend: str, keep: str, which: str, size: int
) -> None:
    args = arguments(case, backend, keep)
    args[0] = args[0].nan_to_num(1.0)
    given, dims = _mapped(args, size, MAPPED[which])
    found = torch.vmap(forward, tuple(dims))(*given)
    wanted = _by_loop(forward, given, dims, size)
    for value, reference in zip(*map(pytree.tree_leaves, (found, wanted)), strict=True):
        assert_matches(value, reference, BOUND)

    grads = backward_arguments(args)
    constants = {7, 8}  # needs_input and samples
    given, dims = _mapped(
        grads, size, lambda i: i not in constants and (i < 7 or MAPPED[which](i - 9))
    )
    # what was kept belongs to the mapped call
    for at, value, dim in zip((4, 5, 6), (found[0], found[3], found[4]), (0, 0, 0), strict=True):
        given[at] = value
        dims[at] = [dim] * len(value) if isinstance(value, list) else dim
    found = torch.vmap(backward, tuple(dims))(*given)
    wanted = _by_loop(backward, given, dims, size)
    for i, (value, reference) in enumerate(zip(found, wanted, strict=True)):
        assert_matches(value, reference, BOUND, f"gradient {i}")


@pytest.mark.parametrize(("case", "backend", "keep"), TRAINING[::4])
def test_an_input_gradient_nobody_needs_is_empty(case: Case, backend: str, keep: str) -> None:
    args = arguments(case, backend, keep)
    without, everything = (backward(*backward_arguments(args, needs)) for needs in (False, True))
    assert without[0].numel() == 0
    assert everything[0].shape == args[0].shape
    for value, reference in zip(without[1:], everything[1:], strict=True):
        assert_matches(value, reference, BOUND)


def kept_elements(layer: Any, case: Case) -> int:
    """How many numbers autograd keeps that were not there before the call."""
    values = draw_values(case).requiring_grad()
    given = [*values.sources().values(), values.resets, *layer.parameters()]
    known = {t.untyped_storage().data_ptr() for t in given if t is not None}
    found: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in known and t.is_floating_point():
            found[t.untyped_storage().data_ptr()] = t.numel()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        results = call_layer(layer, case, values)
    assert results["output"].requires_grad
    return sum(found.values())


#: Numbers a unit keeps beside its state: LSTM i, f, g, o; GRU r, z, n and what r multiplies.
GATES_KEPT = {"lstm": 4, "gru": 4, "rnn_tanh": 1, "rnn_relu": 1}
ROWS = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("feature", [{}, {"resets": True}, {"layer_norm": True}], ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_what_is_kept_for_the_backward_pass(
    cell: str, feature: dict[str, bool], directions: int
) -> None:
    case = Case(cell, 50, 3, 4, 5, bidirectional=directions == 2, **feature)
    unit_steps = 50 * 3 * 5 * directions
    states = (2 if cell == "lstm" else 1) * unit_steps  # the output, and the LSTM's cells
    gates = GATES_KEPT[cell] * unit_steps
    norms = ROWS[cell] * unit_steps if case.layer_norm else 0  # products before their norm
    options = {"backend": "reference"}
    assert kept_elements(make_layer(case, keep="states", **options), case) == states
    assert kept_elements(make_layer(case, keep="auto", **options), case) == states
    assert kept_elements(make_layer(case, keep="gates", **options), case) == states + gates + norms


def test_nothing_is_kept_without_gradients() -> None:
    case = Case("lstm", 50, 3, 4, 5)
    for keep in ("states", "gates"):
        layer = make_layer(case, keep=keep)
        with torch.no_grad():
            assert layer.explain(draw_values(case).x).keep == "none"
            assert call_layer(layer, case, draw_values(case))["output"].grad_fn is None


@pytest.mark.parametrize("lengths", [[-1, 1], [1, 4]])
@pytest.mark.parametrize("backend", ["aten", "reference"])
def test_the_operator_checks_lengths(backend: str, lengths: list[int]) -> None:
    args = arguments(replace(Case("gru", 3, 2, 2, 3), lengths=True), backend, "none")
    args[5] = torch.tensor(lengths)
    with pytest.raises(ecornn.InvalidInput, match="lengths"):
        forward(*args)


@pytest.mark.parametrize("directions", [1, 2])
def test_results_are_no_views(directions: int) -> None:
    """A view among several results could not be changed in place."""
    layer = ecornn.LSTM(4, 3, bidirectional=directions == 2, backend="reference")
    output, (h_n, c_n) = layer(torch.randn(5, 2, 4))
    for result in (output, h_n, c_n):
        assert not result._is_view()
        result.mul_(2)
