"""torch.func: vmap, per-sample gradients, ensembles, Jacobians, forward mode.

Expectations come from loops over samples, and from the oracle differentiated by autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import (
    functional_call,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)

import ecornn
from support import oracle
from support.cases import CELLS, Case, Values, draw, draw_values, make_layer
from support.tolerances import assert_matches, tolerance

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bidirectional, two layers": {"bidirectional": True, "layers": 2},
    "lengths": {"lengths": True, "bidirectional": True},
    "frozen": {"lengths": True, "after_end": "frozen", "bidirectional": True},
    "resets": {"resets": True, "bidirectional": True},
    "resets to initial": {"resets": True, "reset_to": "initial", "lengths": True},
    "layer norm": {"layer_norm": True},
    "zoneout": {"zoneout": (0.25, 0.5), "layers": 2},
}
CASES = [Case(c, steps=4, inputs=2, **f) for c in CELLS for f in FEATURES.values()]
CASES += [
    Case("lstm", proj=2, steps=4),
    Case("lstm", cell_states=True, layers=2, bidirectional=True, steps=4),
]
#: Few numbers, for derivatives that are one number for each two of them.
TINY = [replace(case, steps=3, batch=2, hidden=2, proj=min(case.proj, 1)) for case in CASES]
OPTIONS = [{}, {"backend": "reference", "keep": "gates"}]
BOUND = tolerance(torch.float64, 16)

Function = Callable[..., Tensor]


def total_of(case: Case, results: Any) -> Tensor:
    """One number that depends on every result of a layer, each in its own way."""
    output, state, *cells = results
    parts = [output, *(state if case.lstm else [state]), *cells]
    # not drawn: vmap refuses random numbers
    waves = [
        torch.arange(p.numel()).add(i).cos().double().view(p.shape) for i, p in enumerate(parts)
    ]
    return sum((part * wave).sum() for part, wave in zip(parts, waves, strict=True))


def call_of(case: Case, layer: Any, parameters: Any, x: Tensor, *rest: Any) -> Any:
    """One call of a time-first layer; `rest` is h0, c0, lengths and resets, each where it is."""
    given = list(rest)
    states = [given.pop(0) for _ in range(2 if case.lstm else 1)]
    options: dict[str, Any] = {"return_cell_states": True} if case.cell_states else {}
    if case.lengths:
        options |= {"lengths": given.pop(0), "after_end": case.after_end}
    if case.resets:
        options |= {"resets": given.pop(0), "reset_to": case.reset_to}
    hx = tuple(states) if case.lstm else states[0]
    return functional_call(layer, parameters, (x, hx), options)


def tensors_of(case: Case, values: Values) -> list[Tensor]:
    """x, h0, c0, lengths and resets, those there are."""
    lengths = None if values.lengths is None else torch.tensor(values.lengths)
    every = (values.x, values.h0, values.c0, lengths, values.resets)
    return [value for value in every if value is not None]


def assert_all_match(found: Any, wanted: Any) -> None:
    left, right = (torch.utils._pytree.tree_leaves(v) for v in (found, wanted))
    assert len(left) == len(right)
    for i, (value, reference) in enumerate(zip(left, right, strict=True)):
        assert_matches(value, reference, BOUND, f"value {i}")


def samples_of(case: Case, count: int = 3) -> list[list[Tensor]]:
    """`count` different calls of a case."""
    drawn, found = draw_values(case), []
    for s in range(count):
        x = draw(*drawn.x.shape, seed=100 + s)
        lengths, resets = drawn.lengths, drawn.resets
        if lengths is not None:
            lengths = [(n + s) % (case.steps + 1) for n in lengths]
            for b, end in enumerate(lengths):
                x[end:, b] = torch.nan
        if resets is not None:
            resets = resets.roll(s, 0)
        found.append(tensors_of(case, replace(drawn, x=x, lengths=lengths, resets=resets)))
    return found


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_vmap_is_a_loop(case: Case, options: dict[str, Any]) -> None:
    layer = make_layer(case, **options)
    parameters = dict(layer.named_parameters())
    samples = samples_of(case)
    stacked = [torch.stack(column) for column in zip(*samples, strict=True)]
    found = vmap(lambda *t: call_of(case, layer, parameters, *t))(*stacked)
    each = [call_of(case, layer, parameters, *sample) for sample in samples]
    leaves = [torch.utils._pytree.tree_leaves(one) for one in each]
    assert_all_match(found, [torch.stack(column) for column in zip(*leaves, strict=True)])


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_per_sample_gradients_are_a_loop(case: Case, options: dict[str, Any], count: int) -> None:
    layer = make_layer(case, **options)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    samples = samples_of(case, count)
    states = 2 if case.lstm else 1

    def loss(parameters: Any, *tensors: Tensor) -> Tensor:
        return total_of(case, call_of(case, layer, parameters, *tensors))

    each = grad(loss, argnums=tuple(range(2 + states)))
    stacked = [torch.stack(column) for column in zip(*samples, strict=True)]
    found = vmap(each, in_dims=(None, *(0 for _ in stacked)))(parameters, *stacked)

    for s, sample in enumerate(samples):
        leaves = {name: p.clone().requires_grad_() for name, p in parameters.items()}
        ahead = [t.clone().requires_grad_() for t in sample[: 1 + states]]
        value = loss(leaves, *ahead, *sample[1 + states :])
        wanted = torch.autograd.grad(value, [*leaves.values(), *ahead], materialize_grads=True)
        one = [g[s] for g in torch.utils._pytree.tree_leaves(found)]
        assert_all_match(one, list(wanted))


@pytest.mark.parametrize("cell", CELLS)
def test_per_sample_gradients_of_unbatched_sequences(cell: str) -> None:
    """The usual recipe: a batch of sequences, mapped over, each with its length and resets."""
    case = Case(cell, layers=2, bidirectional=True)
    layer, values = make_layer(case), draw_values(replace(case, lengths=True, resets=True))
    x, lengths = values.x, torch.tensor(values.lengths)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(parameters: Any, x: Tensor, length: Tensor, resets: Tensor) -> Tensor:
        options = {"lengths": length, "resets": resets}
        return functional_call(layer, parameters, (x,), options)[0].square().sum()

    found = vmap(grad(loss), (None, 1, 0, 1))(parameters, x, lengths, values.resets)
    for b in range(case.batch):
        layer.zero_grad()
        loss(dict(layer.named_parameters()), x[:, b], lengths[b], values.resets[:, b]).backward()
        for name, p in layer.named_parameters():
            assert_matches(found[name][b], p.grad, BOUND, name)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_ensemble_is_a_loop(case: Case) -> None:
    layers = [make_layer(case) for _ in range(3)]
    for seed, layer in enumerate(layers):
        for p in layer.parameters():
            p.data += draw(*p.shape, seed=seed, scale=0.1)
    parameters, _ = stack_module_state(layers)
    tensors = tensors_of(case, draw_values(case))

    def loss(parameters: Any) -> Tensor:
        return total_of(case, call_of(case, layers[0], parameters, *tensors))

    found = vmap(grad(loss))(parameters)
    values = vmap(loss)(parameters)
    for s, layer in enumerate(layers):
        value = loss(dict(layer.named_parameters()))
        assert_matches(values[s], value, BOUND)
        value.backward()
        for name, p in layer.named_parameters():
            assert_matches(found[name][s], p.grad, BOUND, name)


@pytest.mark.parametrize("in_dims", [(1, None), (None, 2), (3, 0)], ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_vmap_over_any_dimension_of_some_arguments(cell: str, in_dims: tuple[Any, Any]) -> None:
    case = Case(cell, layers=2, bidirectional=True)
    layer, x = make_layer(case), draw(3, case.steps, case.batch, case.inputs, seed=1)
    h = draw(3, 4, case.batch, case.hidden, seed=2)

    def run(x: Tensor, h: Tensor) -> Any:
        output, state = layer(x, (h, h * h) if case.lstm else h)
        return output, state[0] if case.lstm else state

    x_dim, h_dim = in_dims
    found = vmap(run, in_dims)(
        x[0] if x_dim is None else x.movedim(0, x_dim),
        h[0] if h_dim is None else h.movedim(0, h_dim),
    )
    pairs = [(x[0 if x_dim is None else s], h[0 if h_dim is None else s]) for s in range(3)]
    outputs, states = zip(*(run(*pair) for pair in pairs), strict=True)
    assert_all_match(found, (torch.stack(outputs), torch.stack(states)))


@pytest.mark.parametrize("cell", CELLS)
def test_vmap_within_vmap(cell: str) -> None:
    layer, x = make_layer(Case(cell)), draw(2, 3, 5, 3, 4, seed=1)
    lengths = torch.arange(18).view(2, 3, 3) % 6

    def run(x: Tensor, lengths: Tensor) -> Tensor:
        return layer(x, lengths=lengths, after_end="frozen")[0]

    found = vmap(vmap(run))(x, lengths)
    loop = [torch.stack([run(x[i, j], lengths[i, j]) for j in range(3)]) for i in range(2)]
    assert_all_match(found, torch.stack(loop))


def total_and_oracles(case: Case, **options: Any) -> tuple[Function, Function, tuple[Tensor, ...]]:
    """A number as a function of x and states, by a layer and by the oracle; and where to ask."""
    layer, values = make_layer(case, **options), draw_values(case)
    tensors = tensors_of(case, values)
    ahead = 3 if case.lstm else 2
    parameters, fixed = dict(layer.named_parameters()), oracle.parameters_of(layer)

    def ours(*at: Tensor) -> Tensor:
        return total_of(case, call_of(case, layer, parameters, *at, *tensors[ahead:]))

    def theirs(x: Tensor, h0: Tensor, c0: Tensor | None = None) -> Tensor:
        how = {"after_end": case.after_end, "reset_to": case.reset_to, "resets": values.resets}
        found = oracle.expect(layer, fixed, x, h0, c0, lengths=values.lengths, **how).named()
        results = list(found.values())[: len(found) if case.cell_states or not case.lstm else 3]
        states = results[1:3] if case.lstm else results[1]
        return total_of(case, (results[0], states, *results[3:]))

    return ours, theirs, tuple(tensors[:ahead])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("case", TINY, ids=str)
def test_first_derivatives(case: Case, options: dict[str, Any]) -> None:
    """Reverse and forward mode, both by torch.func and by dual numbers."""
    ours, theirs, at = total_and_oracles(case, **options)
    argnums = tuple(range(len(at)))
    wanted = torch.autograd.functional.jacobian(theirs, at)
    for transform in (grad, jacrev, jacfwd):
        assert_all_match(transform(ours, argnums=argnums)(*at), wanted)
    _, pull = vjp(ours, *at)
    assert_all_match(pull(torch.tensor(2.0).double()), [2 * w for w in wanted])

    tangents = tuple(draw(*t.shape, seed=70 + i) for i, t in enumerate(at))
    directional = sum((w * t).sum() for w, t in zip(wanted, tangents, strict=True))
    assert_all_match(jvp(ours, at, tangents), (theirs(*at), directional))
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(p, t) for p, t in zip(at, tangents, strict=True)]
        primal, tangent = forward_ad.unpack_dual(ours(*duals))
    assert_all_match((primal, tangent), (theirs(*at), directional))


@pytest.mark.parametrize("case", TINY, ids=str)
def test_second_derivatives(case: Case) -> None:
    """Of x: forward over reverse, reverse over reverse, and reverse over forward."""
    ours, theirs, (x, *states) = total_and_oracles(case)
    wanted = torch.autograd.functional.hessian(lambda x: theirs(x, *states), x)
    assert wanted.any() or case.cell == "rnn_relu"  # of which all second derivatives are zero
    for outer, inner in ((jacfwd, jacrev), (jacrev, jacrev), (jacrev, jacfwd)):
        assert_all_match(outer(inner(ours))(x, *states), wanted)
    assert_all_match(hessian(ours)(x, *states), wanted)
    assert_all_match(torch.autograd.functional.hessian(lambda x: ours(x, *states), x), wanted)


@pytest.mark.parametrize("cell", CELLS)
def test_jacobians_by_the_parameters(cell: str) -> None:
    case = Case(cell, 3, 2, 2, 2, lengths=True, resets=True)
    layer, values = make_layer(case), draw_values(case)
    tensors = tensors_of(case, values)

    def run(parameters: Any) -> Tensor:
        return call_of(case, layer, parameters, *tensors)[0]

    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    forward, reverse = jacfwd(run)(parameters), jacrev(run)(parameters)
    exact = oracle.parameters_of(layer)
    how = {"resets": values.resets, "lengths": values.lengths}
    output = oracle.expect(layer, exact, values.x, values.h0, values.c0, **how).output
    for row in range(output.numel()):
        d_output = torch.zeros(output.numel()).double()
        d_output[row] = 1
        wanted = torch.autograd.grad(
            output, list(exact.values()), d_output.view_as(output), retain_graph=True
        )
        for name, gradient in zip(exact, wanted, strict=True):
            assert_matches(forward[name].flatten(0, 2)[row], gradient, BOUND, name)
            assert_matches(reverse[name].flatten(0, 2)[row], gradient, BOUND, name)


@pytest.mark.parametrize("randomness", ["different", "same"])
@pytest.mark.parametrize("cell", CELLS)
def test_noise_within_vmap(cell: str, randomness: str) -> None:
    layer = make_layer(Case(cell, zoneout=(0.5, 0.5)), input_dropout=0.5).train()
    x = draw(5, 3, 4, seed=1).expand(4, -1, -1, -1)
    found = vmap(lambda x: layer(x)[0], randomness=randomness)(x)
    equal = [torch.equal(found[0], found[s]) for s in range(1, 4)]
    assert equal == [randomness == "same"] * 3
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(lambda x: layer(x)[0])(x)


@pytest.mark.parametrize("transform", [vmap, grad, jacfwd], ids=lambda t: t.__name__)
def test_the_plan_says_what_the_transform_asks(transform: Any) -> None:
    layer, plans = make_layer(Case("lstm")), []

    def ask(x: Tensor) -> Tensor:
        plans.append(layer.explain(x))
        return layer(x)[0].sum()

    transform(ask)(draw(5, 3, 4, seed=1) if transform is not vmap else draw(2, 5, 3, 4, seed=1))
    assert isinstance(plans[0], ecornn.ExecutionPlan)
    assert plans[0].backend == "reference"
    assert "aten" in {rejection.backend for rejection in plans[0].rejections}
