"""Output, final state, cell states and every gradient against loops that know nothing of us."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ecornn.backends import aten_rows
from ecornn.kernels.reference import problem
from support import oracle
from support.cases import (
    CELLS,
    Case,
    call_arguments,
    call_layer,
    draw_values,
    expected,
    make_layer,
    pull_back,
    sensitivity,
)
from support.tolerances import assert_matches, tolerance

EVERYTHING = {
    "layers": 2,
    "bidirectional": True,
    "layer_norm": True,
    "zoneout": (0.25, 0.125),
    "lengths": True,
    "resets": True,
}

#: What is asked beyond one layer in one direction.
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias, no state": {"bias": False, "initial": False},
    "bidirectional": {"bidirectional": True},
    "two layers": {"layers": 2},
    "batch first": {"form": "batch_first", "lengths": True, "resets": True},
    "packed": {"form": "packed", "bidirectional": True},
    "lengths": {"lengths": True, "bidirectional": True},
    "lengths, frozen": {"lengths": True, "after_end": "frozen", "bidirectional": True},
    "resets to zero": {"resets": True, "bidirectional": True},
    "resets to initial": {"resets": True, "reset_to": "initial", "bidirectional": True},
    "layer norm": {"layer_norm": True},
    "zoneout": {"zoneout": (0.25, 0.125), "bidirectional": True},
    "everything to zero": EVERYTHING,
    "everything frozen": EVERYTHING | {"after_end": "frozen", "reset_to": "initial"},
}
LSTM_FEATURES: dict[str, dict[str, Any]] = {
    "projection": {"proj": 2, "hidden": 5},
    "cell states": {"cell_states": True, "bidirectional": True, "layers": 2},
    "cell states, frozen": {
        "cell_states": True,
        "bidirectional": True,
        "lengths": True,
        "after_end": "frozen",
    },
    "everything and projection": EVERYTHING
    | {"proj": 3, "hidden": 7, "cell_states": True, "after_end": "frozen", "reset_to": "initial"},
    "all states, packed": EVERYTHING
    | {"form": "packed", "lengths": False, "resets": False, "cell_states": True},
}
#: Steps, batch and hidden size. The oracle's loops over 63 steps take most of the time here, so one
#: size has them. Of one sequence and one unit each gradient is a single number, which after fewer
#: than 21 steps is the small difference of large ones in a few cases.
SIZES = [(1, 1, 7), (1, 3, 1), (21, 1, 1), (63, 3, 7)]
#: For H=500, and for half precision.
WIDE = ("plain", "bidirectional", "packed", "lengths", "initial", "norm", "zoneout", "projection")
HALF = ("plain", "two layers", "packed", "frozen", "to zero", "layer norm", "zoneout", "states")
#: With ends or resets, and by torch's kernels.
CUT = (
    "-batch first",
    "-packed",
    "-lengths",
    "-lengths, frozen",
    "-resets to initial",
    "-resets to zero",
)
ASKED = {
    "auto": {},
    "states": {"backend": "reference", "keep": "states"},
    "gates": {"backend": "reference", "keep": "gates"},
}


def _cases(steps: int, batch: int, hidden: int) -> list[Any]:
    named = [(cell, name, asked) for cell in CELLS for name, asked in FEATURES.items()]
    named += [("lstm", name, asked) for name, asked in LSTM_FEATURES.items()]
    size = {"steps": steps, "batch": batch, "hidden": hidden}
    return [
        pytest.param(
            Case(**{"cell": cell, **size, **asked}), id=f"{cell}-T{steps}-H{hidden}-{name}"
        )
        for cell, name, asked in named
    ]


def check(case: Case, dtype: torch.dtype = torch.float64, **options: Any) -> None:
    """The layer's results and gradients are the oracle's, and exist where they exist."""
    layer = make_layer(case, dtype, **options)
    values = draw_values(case).to(dtype).requiring_grad()
    results = call_layer(layer, case, values)
    sources = values.sources() if case.initial else {"x": values.x}
    gradients = pull_back(results, sources | dict(layer.named_parameters()))

    expected_results, expected_gradients = expected(case)
    assert results.keys() == expected_results.keys()
    assert gradients.keys() == expected_gradients.keys()
    bound = tolerance(dtype, case.steps * case.layers) * sensitivity(case)
    for name, value in results.items():
        assert value.dtype == dtype
        assert_matches(value, expected_results[name], bound, name)
    for name, value in gradients.items():
        assert_matches(value, expected_gradients[name], bound, f"gradient of {name}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("case", [case for size in SIZES for case in _cases(*size)])
def test_results_and_gradients(case: Case, asked: str, dtype: torch.dtype) -> None:
    check(case, dtype, **ASKED[asked])


@pytest.mark.parametrize("asked", ["auto", "gates"])
@pytest.mark.parametrize("case", [c for c in _cases(3, 3, 500) if c.id.endswith(WIDE)])
def test_results_and_gradients_of_wide_layers(case: Case, asked: str) -> None:
    check(case, torch.float32, **ASKED[asked])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("asked", ["auto", "states"])
@pytest.mark.parametrize("case", [c for c in _cases(9, 3, 7) if c.id.endswith(HALF)])
def test_results_and_gradients_in_half_precision(
    case: Case, asked: str, dtype: torch.dtype
) -> None:
    check(case, dtype, **ASKED[asked])


@pytest.mark.parametrize("asked", ["states", "gates"])
@pytest.mark.parametrize("case", _cases(9, 3, 7))
def test_results_and_gradients_across_chunks_of_time(
    case: Case, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference works on as many steps at a time as fit its buffer; here on two."""
    rows = {"lstm": 4, "gru": 3}.get(case.cell, 1) * case.hidden
    monkeypatch.setattr(problem, "CHUNK_ELEMENTS", 2 * case.batch * rows)
    check(case, **ASKED[asked])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("case", [c for c in _cases(63, 3, 7) if c.id.endswith(CUT)])
def test_results_and_gradients_in_many_stretches(
    case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's kernels run a batch of mixed lengths in stretches of time where that pays, which at
    these sizes it never does; here it always does."""
    choose, counts = aten_rows.stretches, []

    def as_if_calls_were_free(lengths: Tensor, costs: Any) -> Any:
        found = choose(lengths, aten_rows.Costs(call=0.0, step=0.0, row=1.0))
        counts.append(len(found))
        return found

    monkeypatch.setattr(aten_rows, "stretches", as_if_calls_were_free)
    check(case, dtype, backend="aten")
    assert max(counts) > 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("backend", ["aten", "reference"])
@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh"])
def test_inputs_that_nobody_normalized(cell: str, backend: str, dtype: torch.dtype) -> None:
    """Gates may be driven to any size: the states at the ends are still those of the ends."""
    case = Case(cell, bidirectional=True, lengths=True, resets=True)
    drawn, layer = draw_values(case), make_layer(case, dtype, backend=backend)
    drawn = replace(drawn, x=drawn.x * 2**20)
    results = call_layer(layer, case, drawn.to(dtype))
    how = {"lengths": drawn.lengths, "resets": drawn.resets}
    parameters = oracle.parameters_of(layer, torch.float64)
    wanted = oracle.expect(layer, parameters, drawn.x, drawn.h0, drawn.c0, **how).named()
    for name, value in results.items():
        assert_matches(value, wanted[name], tolerance(dtype, case.steps), name)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("case", _cases(9, 3, 7))
def test_results_without_gradients(case: Case, backend: str) -> None:
    """Nothing is kept then, which is another path through the backends."""
    with torch.no_grad():
        results = call_layer(make_layer(case, backend=backend), case, draw_values(case))
    expected_results, _ = expected(case)
    assert results.keys() == expected_results.keys()
    for name, value in results.items():
        bound = tolerance(torch.float64, case.steps * case.layers) * sensitivity(case)
        assert_matches(value, expected_results[name], bound, name)


@pytest.mark.parametrize("form", ["batched", "batch_first", "unbatched"])
@pytest.mark.parametrize("cell", CELLS)
def test_every_form_of_a_call_with_lengths_and_resets(cell: str, form: str) -> None:
    batch = 1 if form == "unbatched" else 3
    for after_end, reset_to in (("zeros", "initial"), ("frozen", "zero")):
        check(
            Case(
                cell,
                batch=batch,
                form=form,
                layers=2,
                bidirectional=True,
                lengths=True,
                after_end=after_end,
                resets=True,
                reset_to=reset_to,
                cell_states=cell == "lstm",
            )
        )


@pytest.mark.parametrize("case", _cases(9, 3, 3))
def test_the_plan_is_the_one_asked_for(case: Case) -> None:
    """Or else the comparisons above might all have run one backend."""
    arguments, options = call_arguments(case, draw_values(case))
    by_torch = not (case.layer_norm or any(case.zoneout) or case.cell_states)
    plan = make_layer(case).explain(*arguments, **options)
    assert plan.backend == ("aten" if by_torch else "reference")
    for keep in ("states", "gates"):
        plan = make_layer(case, backend="reference", keep=keep).explain(*arguments, **options)
        assert (plan.backend, plan.keep) == ("reference", keep)


@pytest.mark.parametrize("backend", ["aten", "reference"])
@pytest.mark.parametrize("cell", CELLS)
def test_all_lengths_zero(cell: str, backend: str) -> None:
    """Nothing runs: the final states are the initial ones, and so are the frozen outputs."""
    case = Case(cell, lengths=True, bidirectional=True, after_end="frozen")
    values = replace(draw_values(case), lengths=[0] * case.batch)
    values = replace(values, x=torch.full_like(values.x, torch.nan)).requiring_grad()
    layer = make_layer(case, backend=backend)
    results = call_layer(layer, case, values)
    assert torch.equal(results["h_n"], values.h0)
    assert torch.equal(results["output"], torch.cat(tuple(values.h0), -1).expand(5, -1, -1))
    gradients = pull_back(results, {"x": values.x, **dict(layer.named_parameters())})
    assert all(not gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("reset_to", ["zero", "initial"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("cell", CELLS)
def test_a_broken_state_does_not_cross_a_reset(cell: str, backend: str, reset_to: str) -> None:
    """What a reset ends may be NaN or infinite; beyond it all is as if it had never been."""
    case = Case(cell, bidirectional=True, layers=2, resets=True, reset_to=reset_to)
    values, layer = draw_values(case), make_layer(case, backend=backend)
    resets = torch.zeros_like(values.resets)
    resets[2] = resets[4] = True
    whole = replace(values, resets=resets)
    broken = replace(whole, x=whole.x.clone())
    broken.x[2], broken.x[3] = torch.nan, torch.inf
    broken = broken.requiring_grad()
    output, expected_output = (call_layer(layer, case, v)["output"] for v in (broken, whole))
    kept = [0, 1, 4]
    assert torch.equal(output[kept], expected_output[kept])
    (gradient,) = torch.autograd.grad(output[kept].sum(), broken.x)
    assert gradient[kept].isfinite().all()


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("name", ["output", "h_n", "c_n", "cells"])
def test_gradients_of_one_result_alone(name: str, asked: str) -> None:
    """No result's gradient is missing when the others have none."""
    case = Case("lstm", 5, 3, layers=2, bidirectional=True, lengths=True, resets=True)
    case = replace(case, cell_states=name == "cells" or asked != "auto")
    layer, values = make_layer(case, **ASKED[asked]), draw_values(case).requiring_grad()
    found = pull_back({name: call_layer(layer, case, values)[name]}, values.sources())
    parameters, exact = oracle.parameters_of(layer), draw_values(case).requiring_grad()
    how = {"lengths": exact.lengths, "resets": exact.resets}
    results = oracle.expect(layer, parameters, exact.x, exact.h0, exact.c0, **how).named()
    wanted = pull_back({name: results[name]}, exact.sources())
    for source, value in found.items():
        assert_matches(value, wanted[source], tolerance(torch.float64, 5), source)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("feature", ["plain", "lengths", "resets to zero", "layer norm"])
@pytest.mark.parametrize("cell", CELLS)
def test_an_empty_batch_gives_empty_results(cell: str, feature: str, backend: str) -> None:
    """As torch.nn does: the last batch of a filtered data set may have nothing left."""
    case = Case(cell, 5, 0, 4, 3, **FEATURES[feature])
    layer, values = make_layer(case, backend=backend), draw_values(case).requiring_grad()
    results = call_layer(layer, case, values)
    assert results["output"].shape == (5, 0, 3 * case.directions)
    assert results["h_n"].shape == (case.directions, 0, 3)
    gradients = pull_back(results, values.sources() | dict(layer.named_parameters()))
    assert not any(gradient.any() for gradient in gradients.values())


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, str]:
    """Any combination of features at any small size, and what is asked of the planner."""
    cell = draw(st.sampled_from(CELLS))
    flag, lstm = st.booleans(), cell == "lstm"
    form = draw(st.sampled_from(["batched", "batch_first", "unbatched", "packed"]))
    hidden = draw(st.integers(1, 6))
    share = st.sampled_from([0.0, 0.5, 0.125])
    case = Case(
        cell,
        steps=draw(st.integers(1, 9)),
        batch=1 if form == "unbatched" else draw(st.integers(1, 4)),
        inputs=draw(st.integers(1, 5)),
        hidden=hidden,
        layers=draw(st.integers(1, 3)),
        bidirectional=draw(flag),
        bias=draw(flag),
        proj=draw(st.integers(0, hidden - 1)) if lstm else 0,
        form=form,
        layer_norm=draw(flag),
        zoneout=(draw(share), draw(share)),
        initial=draw(flag),
        lengths=draw(flag),
        after_end=draw(st.sampled_from(["zeros", "frozen"])) if form != "packed" else "zeros",
        resets=draw(flag) and form != "packed",
        reset_to=draw(st.sampled_from(["zero", "initial"])),
        cell_states=lstm and draw(flag),
    )
    return case, draw(st.sampled_from(list(ASKED)))


@settings(max_examples=250, deadline=None, derandomize=True)
@given(cases())
def test_any_combination(drawn: tuple[Case, str]) -> None:
    case, asked = drawn
    check(case, **ASKED[asked])
