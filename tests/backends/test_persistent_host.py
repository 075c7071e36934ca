"""Everything around the persistent kernels, on a CPU: the kernels are emulated by their contract.

Each case is held against the definition in float64: outputs, states and every gradient.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ecornn.backends import persistent_calls, persistent_gradients, persistent_plain
from ecornn.backends.persistent_plain import PlainLayer
from ecornn.backends.protocol import BackwardRequest, CallGrads, LayerCall, LayerResult, ResultGrads
from ecornn.backends.registry import by_name
from ecornn.errors import NoBackend
from ecornn.kernels.persistent import gradients, shares
from ecornn.kernels.reference import DirectionWeights
from ecornn.ops.recurrence import recurrence
from support.machine import (
    BATCH,
    REGIMES,
    STEPS,
    Machine,
    make_call,
    routed,
    run_route,
    transpose_all,
)
from support.persistent_calls import widened
from support.tolerances import assert_matches, tolerance

CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def run(name: str, call: LayerCall, grads: ResultGrads) -> tuple[LayerResult, CallGrads]:
    result = by_name(name).forward(call)
    return result, by_name(name).backward(call, result, grads, BackwardRequest())


def assert_like_the_definition(call: LayerCall, *, everything: bool = True) -> LayerResult:
    generator = torch.Generator().manual_seed(8)
    hidden, d = call.h0_DBR.shape[-1], call.directions
    shapes = [(STEPS, BATCH, d * hidden), (d, BATCH, hidden)]
    lstm = call.cell == "lstm"
    grads = ResultGrads(
        torch.randn(shapes[0], generator=generator),
        torch.randn(shapes[1], generator=generator) if everything else None,
        torch.randn(shapes[1], generator=generator) if everything and lstm else None,
        torch.randn(shapes[0], generator=generator) if lstm and call.cell_states else None,
    )
    wide_grads = ResultGrads(*(None if g is None else g.double() for g in grads))
    want, want_grads = run("reference", widened(call), wide_grads)
    found, found_grads = run("persistent", call, grads)
    bound = tolerance(torch.float32, STEPS)
    for a, b in zip(found[:3], want[:3], strict=True):
        assert (a is None) == (b is None)
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            assert_matches(a, b, bound)
    a_grads = [found_grads.input_TBI, found_grads.h0_DBR, found_grads.c0_DBH, *found_grads.weights]
    b_grads = [want_grads.input_TBI, want_grads.h0_DBR, want_grads.c0_DBH, *want_grads.weights]
    for a, b in zip(a_grads, b_grads, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert_matches(a, b, 2 * bound)
    return found


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("keep", ["states", "gates"])
@pytest.mark.parametrize("cell", CELLS)
def test_one_launch_a_pass(
    machine: Machine, cell: str, keep: str, directions: int, regime: str
) -> None:
    machine.run_as(regime)
    keep = "states" if cell.startswith("rnn") else keep
    found = assert_like_the_definition(make_call(cell, 136, directions=directions, keep=keep))
    assert [launcher.launches for launcher in machine.launchers] == [1, 1]
    # one more for all gradients of a small layer of one direction
    assert [launcher.launches for launcher in machine.gradients] == [1] * (directions == 1)
    assert len(found.kept) == (directions if keep == "gates" else 0)


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("cell", CELLS)
def test_gradients_of_a_layer_that_is_not_small(
    machine: Machine, cell: str, directions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "MOST_WORK", {4: 1})
    assert_like_the_definition(make_call(cell, 24, directions=directions))
    assert not machine.gradients


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh"])
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("pieces", [False, True])
def test_gradients_by_transposed_factors(
    cell: str, directions: int, pieces: bool, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three factors of each direction and piece."""
    transpose_all(monkeypatch)
    monkeypatch.setattr(gradients, "MOST_WORK", {4: 0})
    monkeypatch.setattr(persistent_calls, "SMALL_BYTES", 1 if pieces else 1 << 30)
    keep = "states" if cell == "rnn_tanh" or pieces else "gates"
    assert_like_the_definition(make_call(cell, 24, directions=directions, keep=keep))
    launches = machine.transposed.launches
    assert launches % (3 * directions) == 0
    assert (launches > 3 * directions) is (pieces and cell != "rnn_tanh")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize(
    ("cell", "keep"),
    [*((cell, keep) for cell in CELLS for keep in ("none", "gates")), ("lstm", "states")],
)
def test_the_short_way_is_the_general_one(
    machine: Machine,
    cell: str,
    keep: str,
    regime: str,
    bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine.run_as(regime)
    if not bias:  # with and without a product of its own
        monkeypatch.setattr(shares, "MOST_WORK", {4: 1})
    keep = "states" if keep == "gates" and cell.startswith("rnn") else keep
    call = make_call(cell, 136, keep=keep)
    w = call.weights[0] if bias else DirectionWeights(call.weights[0].w_ih, call.weights[0].w_hh)
    call = replace(call, weights=(w,))
    assert PlainLayer.serves(call)
    layer = PlainLayer(call)
    inputs = (call.input_TBI, call.h0_DBR, call.c0_DBH)
    weights = tuple(call.flat_weights())
    assert layer.fits(*inputs, list(weights))
    want = by_name("persistent").forward(call)
    found = layer.forward(*inputs, weights)
    assert [launcher.launches for launcher in machine.shares] == [1] * bias
    # right after a product of ours it may begin early, where blocks wait for no others
    alone = regime == "cluster" and layer._forward.geometry.tile.cluster == 1
    assert sum(one.early for one in machine.launchers) == (bias and alone)
    pairs = list(zip(found, [*want[:4], *(want.kept or [None])], strict=True))
    assert layer.has_backward == (keep != "none")
    if layer.has_backward:
        d_states = torch.randn(2, *call.h0_DBR.shape)
        grads = (torch.randn_like(found.output_TBO), d_states[0], d_states[1])
        grads = grads if call.cell == "lstm" else (*grads[:2], None)
        result = [found.output_TBO, found.cells_TBE, found.kept]
        some = layer.backward(
            grads, (*inputs, weights), result, needs_input=True, needs_states=True
        )
        whole = by_name("persistent").backward(
            call, want, ResultGrads(*grads, None), BackwardRequest()
        )
        pairs += zip([*some[:3], *some.weights], [*whole[:3], *whole.weights], strict=True)
    for a, b in pairs:
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert_matches(a.view(b.shape), b.double(), tolerance(torch.float32, STEPS))


@pytest.mark.parametrize("zero", [False, True], ids=["given", "zeros"])
@pytest.mark.parametrize(
    ("cell", "keep"), [("lstm", "gates"), ("lstm", "states"), ("rnn_tanh", "states")]
)
def test_the_short_way_of_a_layer_that_is_not_small(
    machine: Machine, cell: str, keep: str, zero: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "MOST_WORK", {4: 1})
    call = make_call(cell, 24, keep=keep)
    if zero:
        call = replace(call, h0_DBR=torch.zeros_like(call.h0_DBR))
        for module in (persistent_gradients, persistent_plain):
            monkeypatch.setattr(module, "is_zero_state", lambda state: True)
    layer = PlainLayer(call)
    inputs, weights = (call.input_TBI, call.h0_DBR, call.c0_DBH), tuple(call.flat_weights())
    found = layer.forward(*inputs, weights)
    d_output, d_h_n = torch.randn_like(found.output_TBO), torch.randn_like(call.h0_DBR)
    for needs_input in (True, False):
        some = layer.backward(
            (d_output, d_h_n, None),
            (*inputs, weights),
            [found.output_TBO, found.cells_TBE, found.kept],
            needs_input=needs_input,
            needs_states=True,
        )
        assert not machine.gradients
        whole = by_name("persistent").backward(
            call,
            by_name("persistent").forward(call),
            ResultGrads(d_output, d_h_n, None, None),
            BackwardRequest(needs_input),
        )
        for a, b in zip([*some[:3], *some.weights], [*whole[:3], *whole.weights], strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert_matches(a, b.double(), tolerance(torch.float32, STEPS))


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh"])
def test_derivatives_of_the_short_way(machine: Machine, cell: str, order: int) -> None:
    call = make_call(cell, 24, keep="states" if cell == "rnn_tanh" else "gates")
    route, leaves = routed(call)

    def derivatives(leaves: list[Tensor], results: list[Tensor]) -> list[Tensor]:
        loss = sum(result.sin().sum() for result in results)
        grads = torch.autograd.grad(loss, leaves, create_graph=order == 2)
        if order == 1:
            return list(grads)
        return list(torch.autograd.grad(sum(g.square().sum() for g in grads), leaves))

    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    x, h0, *rest = wide
    c0 = rest.pop(0) if call.c0_DBH is not None else None
    constants = (*route.constants[:-2], "reference", "states")
    want = recurrence(x, h0, c0, rest, None, None, None, None, *constants)
    found = derivatives(leaves, run_route(route, leaves))
    bound = tolerance(torch.float32, STEPS, order=order)
    for a, b in zip(
        found, derivatives(wide, list(want[: 3 if c0 is not None else 2])), strict=True
    ):
        assert_matches(a, b, 2 * bound)


def test_saved_tensors_may_come_back_in_another_form(machine: Machine) -> None:
    call = make_call("lstm", 24, keep="gates")
    route, leaves = routed(call)
    plain = torch.autograd.grad(run_route(route, leaves)[0].sin().sum(), leaves)

    def across(t: Tensor) -> Tensor:
        return t.transpose(0, -1).contiguous().transpose(0, -1)

    with torch.autograd.graph.saved_tensors_hooks(across, lambda t: t):
        results = run_route(route, leaves)
    for a, b in zip(torch.autograd.grad(results[0].sin().sum(), leaves), plain, strict=True):
        assert_matches(a, b.double(), tolerance(torch.float32, STEPS))


@pytest.mark.parametrize(
    "special",
    [
        {"keep": "states", "lengths_B": torch.tensor([3, 4, 5, 6])},
        {"cell_states": True},
        {"after_end": "frozen", "lengths_B": torch.tensor([3, 4, 5, 6])},
        {"resets_TB": torch.zeros(STEPS, BATCH, dtype=torch.bool)},
        {"directions": 2},
        {"hidden": 25},
    ],
    ids=lambda special: next(iter(special)),
)
def test_the_short_way_is_for_plain_calls(machine: Machine, special: dict[str, Any]) -> None:
    assert PlainLayer.serves(make_call("lstm", keep="gates"))
    assert not PlainLayer.serves(make_call("lstm", **{"keep": "gates", **special}))


def test_the_short_way_computes_gates_again_in_one_piece(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert PlainLayer.serves(make_call("lstm", keep="states"))
    assert not PlainLayer.serves(make_call("gru", keep="states"))
    monkeypatch.setattr(persistent_calls, "SMALL_BYTES", 1)
    assert not PlainLayer.serves(make_call("lstm", keep="states"))


def test_the_short_way_needs_memory_as_the_kernels_read_it(machine: Machine) -> None:
    call = make_call("lstm", keep="gates")
    layer, weights = PlainLayer(call), call.flat_weights()
    x, h0, c0 = call.input_TBI, call.h0_DBR, call.c0_DBH
    assert layer.fits(x, h0, c0, weights)
    across = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert not layer.fits(across, h0, c0, weights)
    shifted = torch.empty(h0.numel() + 1)[1:].view_as(h0)
    assert not layer.fits(x, shifted, c0, weights)
    assert not layer.fits(x, h0, c0, [weights[0].T.contiguous().T, *weights[1:]])


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("hidden", [1, 6, 133])
@pytest.mark.parametrize("cell", CELLS)
def test_sizes_that_need_padding(machine: Machine, cell: str, hidden: int, regime: str) -> None:
    machine.run_as(regime if hidden > 8 else "cluster")
    assert_like_the_definition(make_call(cell, hidden, directions=2))


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("keep", ["states", "gates"])
@pytest.mark.parametrize("cell", CELLS)
def test_pieces_of_time(
    machine: Machine, cell: str, keep: str, directions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(persistent_calls, "SMALL_BYTES", 1)
    keep = "states" if cell.startswith("rnn") else keep
    assert_like_the_definition(make_call(cell, directions=directions, keep=keep))
    forward, backward = (launcher.launches for launcher in machine.launchers)
    # an LSTM's kept gates stand where their inputs stood: there is no buffer to cut
    assert forward == (1 if keep == "gates" and cell == "lstm" else 2)
    # kept gates, and a plain RNN that needs none, leave only the gradients' buffer
    assert backward == (4 if keep == "states" and not cell.startswith("rnn") else 1)


@pytest.mark.parametrize("small", [1, 1 << 30], ids=["pieces", "whole"])
@pytest.mark.parametrize("reset_to", ["zero", "initial"])
@pytest.mark.parametrize("after_end", ["zeros", "frozen"])
@pytest.mark.parametrize("cell", CELLS)
def test_ends_and_resets(
    machine: Machine,
    cell: str,
    after_end: str,
    reset_to: str,
    small: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(persistent_calls, "SMALL_BYTES", small)
    generator = torch.Generator().manual_seed(1)
    call = make_call(
        cell,
        directions=2,
        after_end=after_end,
        reset_to=reset_to,
        cell_states=cell == "lstm",
        lengths_B=torch.tensor([11, 0, 7, 1]),
        resets_TB=torch.rand(STEPS, BATCH, generator=generator) < 0.25,
    )
    call.input_TBI[8:, 2] = float("nan")  # beyond the end: must reach nothing
    clean = replace(call, input_TBI=call.input_TBI.nan_to_num())
    assert_like_the_definition(clean)
    grads = ResultGrads(torch.ones(STEPS, BATCH, 48), None, None, None)
    result, found = run("persistent", call, grads)
    assert result.output_TBO.isfinite().all()
    assert all(w.isfinite().all() for w in found.weights)


@pytest.mark.parametrize("cell", CELLS)
def test_sequences_and_directions_that_do_not_fit_at_once(machine: Machine, cell: str) -> None:
    machine.most_batch, machine.most_directions = 3, 1
    assert_like_the_definition(make_call(cell, directions=2))
    # two halves of the batch for each direction, forwards and backwards
    assert sum(launcher.launches for launcher in machine.launchers) == 2 * 2 * 2


def test_weights_that_are_not_contiguous_or_aligned(machine: Machine) -> None:
    call = make_call("lstm")
    turned = tuple(w.map(lambda t: t.T.contiguous().T if t.dim() == 2 else t) for w in call.weights)
    assert_like_the_definition(replace(call, weights=turned, h0_DBR=call.h0_DBR.mT.contiguous().mT))
    shifted = tuple(
        w.map(lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape))
        for w in call.weights
    )
    assert_like_the_definition(replace(call, weights=shifted))


def test_only_the_output_has_a_gradient(machine: Machine) -> None:
    for cell in CELLS:
        assert_like_the_definition(make_call(cell), everything=False)


def test_an_input_that_needs_no_gradient(machine: Machine) -> None:
    call = make_call("gru")
    result = by_name("persistent").forward(call)
    grads = ResultGrads(torch.ones(STEPS, BATCH, 24), None, None, None)
    ask = BackwardRequest(needs_input=False)
    assert by_name("persistent").backward(call, result, grads, ask).input_TBI is None


@pytest.mark.parametrize("cell", CELLS)
def test_no_gradient_shares_memory_with_another(machine: Machine, cell: str) -> None:
    """Whoever scales one in place, as clipping does, must not change another."""
    call = make_call(cell)
    hidden = call.h0_DBR.shape[-1]
    grads = ResultGrads(torch.ones(STEPS, BATCH, hidden), None, None, None)
    found = run("persistent", call, grads)[1]
    every = [found.input_TBI, found.h0_DBR, found.c0_DBH, *found.weights]
    there = [grad for grad in every if grad is not None]
    before = [grad.clone() for grad in there]
    for i, grad in enumerate(there):
        grad.fill_(7.0)
        assert all(torch.equal(a, b) for a, b in list(zip(there, before, strict=True))[i + 1 :])


def test_per_sample_gradients(machine: Machine) -> None:
    call = make_call("lstm")
    result = by_name("persistent").forward(call)
    grads = ResultGrads(torch.ones(STEPS, BATCH, 24), None, None, None)
    whole = by_name("persistent").backward(call, result, grads, BackwardRequest())
    each = by_name("persistent").backward(call, result, grads, BackwardRequest(samples=2))
    for a, b in zip(each.weights, whole.weights, strict=True):
        assert a.shape == (2, *b.shape)
        assert_matches(a.sum(0), b.double(), tolerance(torch.float32, STEPS))


def test_an_empty_batch_launches_nothing(machine: Machine) -> None:
    call = make_call("lstm")
    empty = replace(
        call,
        input_TBI=call.input_TBI[:, :0],
        h0_DBR=call.h0_DBR[:, :0],
        c0_DBH=None if call.c0_DBH is None else call.c0_DBH[:, :0],
    )
    result, found = run("persistent", empty, ResultGrads(torch.ones(STEPS, 0, 24), *[None] * 3))
    assert result.output_TBO.shape == (STEPS, 0, 24)
    assert not any(w.any() for w in found.weights)
    assert machine.launchers == []


def test_what_fits_on_no_device_is_said(machine: Machine) -> None:
    machine.most_batch = 0
    with pytest.raises(NoBackend, match="do not fit"):
        by_name("persistent").forward(make_call("lstm"))


def test_a_step_of_too_many_values_is_said(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = make_call("lstm")
    values = call.input_TBI.shape[1] * call.directions * 4 * call.h0_DBR.shape[-1]
    monkeypatch.setattr(persistent_calls, "MOST_VALUES", values)
    with pytest.raises(NoBackend, match="split the batch"):
        by_name("persistent").forward(call)
    monkeypatch.setattr(persistent_calls, "MOST_VALUES", values + 1)
    by_name("persistent").forward(call)
