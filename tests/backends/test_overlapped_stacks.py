"""Stacks whose layers run two at once, on a CPU by the contract of the persistent kernels: the
second stream runs as late as it may, so that what is read too early or given back is seen."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ecornn
from ecornn.backends import overlap, pair_choice, persistent_calls, persistent_pair
from ecornn.backends.overlap import Decision
from ecornn.errors import InvalidInput
from ecornn.kernels.persistent import gradients, shares
from ecornn.kernels.persistent.arguments import ForwardArguments
from ecornn.kernels.persistent.choose import Request
from ecornn.nn import base, overlapped, plain, stack
from ecornn.nn.stack import explained
from ecornn.ops import pair
from support.emulated import EmulatedLauncher
from support.machine import REGIMES, Machine
from support.tolerances import assert_matches, tolerance

STEPS, BATCH, INPUT, HIDDEN = 11, 3, 5, 64
CELLS = ("LSTM", "GRU", "RNN")


@pytest.fixture
def taken(on_gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for each pair that ran; time is cut in four forwards and three backwards."""
    monkeypatch.setattr(
        pair_choice,
        "decide",
        lambda timings, steps, **more: Decision((4, 3)[: len(timings)], 1.0, 2.0),
    )
    runs: list[int] = []
    run = pair.PlainPair.forward
    monkeypatch.setattr(pair.PlainPair, "forward", lambda self, *a: runs.append(0) or run(self, *a))
    return runs


def made(cell: str, layers: int = 2, hidden: int = HIDDEN, **options: Any) -> Any:
    torch.manual_seed(1)
    return getattr(ecornn, cell)(INPUT, hidden, layers, **options)


def units(regime: str) -> int:
    """For which there is a kernel: of fewer, scaled ones do not exchange through L2."""
    return 136 if regime == "L2, scaled" else HIDDEN


def of_torch(layer: Any) -> Any:
    """The same in float64 by torch."""
    kind = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}[type(layer).__name__]
    options = {"batch_first": layer.batch_first, "bias": layer.bias}
    if kind is nn.RNN:
        options["nonlinearity"] = layer.nonlinearity
    found = kind(layer.input_size, layer.hidden_size, layer.num_layers, **options).double()
    found.load_state_dict(layer.state_dict())
    return found


def results(layer: Any, *tensors: Tensor) -> list[Tensor]:
    """Output, h_n and c_n of an input and states, where there are any."""
    x, *states = tensors
    output, left = layer(x, (tuple(states) if len(states) == 2 else states[0]) if states else None)
    return [output, *(left if isinstance(left, tuple) else (left,))]


def drawn(layer: Any, *, states: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    count = (2 if isinstance(layer, nn.LSTM) else 1) if states else 0
    shape = (BATCH, STEPS, INPUT) if layer.batch_first else (STEPS, BATCH, INPUT)
    shapes = [shape] + [(layer.num_layers, BATCH, layer.hidden_size)] * count
    return [torch.randn(s, generator=generator) for s in shapes]


def leaves(tensors: list[Tensor], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [t.detach().to(dtype).requires_grad_() for t in tensors]


def weighted(values: list[Tensor]) -> Tensor:
    """A loss to which every value of every result counts."""
    return sum(
        (v * torch.linspace(0.5, 1.5, v.numel()).view(v.shape).to(v)).sin().sum() for v in values
    )  # type: ignore[return-value]


def assert_like_torch(layer: Any, *, used: slice = slice(None), states: bool = True) -> None:
    theirs, given = of_torch(layer), drawn(layer, states=states)
    ours_in, theirs_in = leaves(given), leaves(given, torch.float64)
    found, wanted = results(layer, *ours_in)[used], results(theirs, *theirs_in)[used]
    for a, b in zip(found, wanted, strict=True):
        assert_matches(a, b, tolerance(torch.float32, STEPS))
    found_grads = torch.autograd.grad(weighted(found), [*ours_in, *layer.parameters()])
    wanted_grads = torch.autograd.grad(weighted(wanted), [*theirs_in, *theirs.parameters()])
    for a, b in zip(found_grads, wanted_grads, strict=True):
        assert_matches(a, b, 2 * tolerance(torch.float32, STEPS, order=1))


@pytest.mark.parametrize("small", [True, False], ids=["small", "large"])
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("cell", CELLS)
def test_outputs_and_gradients_are_torch_s(
    cell: str,
    regime: str,
    small: bool,
    taken: list[int],
    on_gpu: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_gpu.run_as(regime)
    if not small:
        monkeypatch.setattr(gradients, "MOST_WORK", {4: 1})
        monkeypatch.setattr(shares, "MOST_WORK", {4: 1})
    assert_like_torch(made(cell, hidden=units(regime)))
    assert len(taken) == 1
    assert [launcher.launches for launcher in on_gpu.launchers] == [8, 6]
    assert bool(on_gpu.gradients) == bool(on_gpu.shares) == small


@pytest.mark.parametrize("options", [{"bias": False}, {"batch_first": True}], ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_without_biases_and_with_the_batch_first(
    cell: str, options: dict[str, Any], taken: list[int]
) -> None:
    assert_like_torch(made(cell, **options))
    assert taken


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("cell", CELLS)
def test_shares_of_the_gates_in_turns(
    cell: str,
    regime: str,
    taken: list[int],
    on_gpu: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where they are large; those of an LSTM that keeps its gates are there in any case."""
    on_gpu.run_as(regime)
    monkeypatch.setattr(persistent_calls, "SMALL_BYTES", 1)
    layer = made(cell, hidden=units(regime))
    assert_like_torch(layer)
    tensors = drawn(layer)
    with torch.no_grad():
        wanted = results(of_torch(layer), *(t.double() for t in tensors))
        for a, b in zip(results(layer, *tensors), wanted, strict=True):
            assert_matches(a, b, tolerance(torch.float32, STEPS))
    runs = [route.parts[0].layer.passes[0] for route in overlapped._FOUND.values()]
    assert [run.in_turns for run in runs] == [cell != "LSTM", True]
    assert {run.buffer_rows for run in runs if run.in_turns} == {2 * 3 * BATCH}


def test_a_relu_network(taken: list[int]) -> None:
    assert_like_torch(made("RNN", nonlinearity="relu"))
    assert taken


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("cell", CELLS)
def test_dropout_between_layers_goes_a_short_way_too(
    cell: str, training: bool, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, with the masks that the long way draws; where none is drawn, two of them
    at once."""
    layer = made(cell, 3, dropout=0.4).train(training)
    tensors = drawn(layer)

    def run() -> list[Tensor]:
        given = [t.detach().clone().requires_grad_() for t in tensors]
        torch.manual_seed(3)
        found = results(layer, *given)
        return [*found, *torch.autograd.grad(weighted(found), [*given, *layer.parameters()])]

    short = [run(), run()]  # found, and known
    (route,) = plain._ROUTES.values()
    assert isinstance(route, overlapped.StackRoute)
    assert len(route.parts) == (3 if training else 2)
    assert bool(taken) != training
    with monkeypatch.context() as patch:
        patch.setattr(plain, "_is_stacked", lambda *_: False)
        patch.setattr(stack, "short_way", lambda *_: None)
        long = run()
    for a, b, c in zip(*short, long, strict=True):
        assert torch.equal(a, b)
        assert_matches(a, c.double(), 2 * tolerance(torch.float32, STEPS, order=1))
    assert torch.equal(results(layer, *tensors)[0], short[0][0]) != training  # of another seed


@pytest.mark.parametrize("cell", CELLS)
def test_layers_apart_go_a_short_way_too(
    cell: str, on_gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap, "WORTH", 0.0)
    layer = made(cell, 3)
    assert_like_torch(layer)
    (route,) = plain._ROUTES.values()
    assert isinstance(route, overlapped.StackRoute)
    assert len(route.parts) == 3
    monkeypatch.setattr(plain, "run_stack", None)  # the way is known by now
    assert_like_torch(layer)


@pytest.mark.parametrize("layers", [3, 4, 5])
def test_layers_are_taken_two_by_two(layers: int, taken: list[int]) -> None:
    assert_like_torch(made("LSTM", layers))
    assert len(taken) == layers // 2


def test_what_is_asked_for_ends_that_are_not_there(
    taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "plan_from", plain.plan_from)
    layer, x = made("LSTM", 3), drawn(made("LSTM"))[0]
    found = layer(x, after_end="frozen")[0]
    assert len(taken) == 1
    assert torch.equal(found, layer(x)[0])


@pytest.mark.parametrize("used", [slice(0, 1), slice(1, 2), slice(2, 3)], ids=["y", "h", "c"])
def test_a_loss_of_one_result_alone(used: slice, taken: list[int]) -> None:
    assert_like_torch(made("LSTM"), used=used)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("used", [1, 2])
def test_a_loss_of_one_layer_s_last_state(layer: int, used: int, taken: list[int]) -> None:
    ours = made("LSTM")
    theirs, given = of_torch(ours), drawn(ours)
    sides = []
    for one, dtype in ((ours, torch.float32), (theirs, torch.float64)):
        inputs = leaves(given, dtype)
        loss = weighted([results(one, *inputs)[used][layer]])
        wanted = [*inputs, *one.parameters()]
        grads = torch.autograd.grad(loss, wanted, allow_unused=True)
        sides.append(
            [torch.zeros_like(t) if g is None else g for g, t in zip(grads, wanted, strict=True)]
        )
    for a, b in zip(*sides, strict=True):
        assert_matches(a, b, 2 * tolerance(torch.float32, STEPS, order=1))


@pytest.mark.parametrize("cell", CELLS)
def test_initial_states_of_zeros_and_no_gradient(cell: str, taken: list[int]) -> None:
    layer = made(cell)
    assert_like_torch(layer, states=False)
    x = drawn(layer)[0]
    with torch.no_grad():
        for a, b in zip(results(layer, x), results(of_torch(layer), x.double()), strict=True):
            assert_matches(a, b, tolerance(torch.float32, STEPS))
    assert len(taken) == 2
    assert len(plain._ROUTES) == 2, "with and without gradients"


@pytest.mark.parametrize("frozen", ["input", "_l0", "_l1", "weight_hh_l0"])
def test_what_is_frozen_gets_no_gradient(frozen: str, taken: list[int]) -> None:
    layer = made("GRU")
    theirs, given = of_torch(layer), drawn(layer)
    sides = []
    for one, dtype in ((layer, torch.float32), (theirs, torch.float64)):
        inputs = leaves(given, dtype)
        inputs[0].requires_grad_(frozen != "input")
        for name, p in one.named_parameters():
            p.requires_grad_(frozen == "input" or frozen not in name)
        weighted(results(one, *inputs)).backward()
        sides.append([t.grad for t in (*inputs, *one.parameters())])
    for a, b in zip(*sides, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert_matches(a, b, 2 * tolerance(torch.float32, STEPS, order=1))
    assert taken


@pytest.mark.parametrize("cell", CELLS)
def test_second_derivatives(cell: str, taken: list[int]) -> None:
    """Of an input that was made from a weight, which must not count twice."""
    layer = made(cell)
    theirs, given = of_torch(layer), drawn(layer)
    sides = []
    for one, dtype in ((layer, torch.float32), (theirs, torch.float64)):
        inputs, w = leaves(given, dtype), one.weight_ih_l0
        x = inputs[0] * w.mean(0)
        y = weighted(results(one, x, *inputs[1:]))
        wanted = [*inputs, *one.parameters()]
        first = torch.autograd.grad(y, wanted, create_graph=True)
        sides.append(torch.autograd.grad(weighted(list(first)), wanted))
    for a, b in zip(*sides, strict=True):
        assert_matches(a, b, 2 * tolerance(torch.float32, STEPS, order=2))
    assert taken


def test_two_backward_passes_give_the_same_bits(taken: list[int]) -> None:
    layer = made("LSTM")
    inputs = leaves(drawn(layer))
    found = results(layer, *inputs)
    before, wanted = [y.clone() for y in found], [*inputs, *layer.parameters()]
    loss = weighted(found)
    first = torch.autograd.grad(loss, wanted, retain_graph=True)
    kept = [g.clone() for g in first]
    for g in first:
        g.fill_(7.0)  # as whoever clips gradients in place does
    second = torch.autograd.grad(loss, wanted)
    assert all(torch.equal(a, b) for a, b in zip(kept, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(found, before, strict=True))


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("how", ["autocast", "hooks"])
def test_a_backward_pass_that_goes_layer_by_layer(how: str, cell: str, taken: list[int]) -> None:
    layer = made(cell)
    inputs, wanted = leaves(drawn(layer)), list(layer.parameters())
    want = torch.autograd.grad(weighted(results(layer, *inputs)), [*inputs, *wanted])
    pack, unpack = (lambda t: torch.stack([t, t], -1)), (lambda t: t[..., 0])
    if how == "hooks":
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = weighted(results(layer, *inputs))
        found = torch.autograd.grad(loss, [*inputs, *wanted])
    else:
        loss = weighted(results(layer, *inputs))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = torch.autograd.grad(loss, [*inputs, *wanted])
    for a, b in zip(found, want, strict=True):
        assert_matches(a, b.double(), 2 * tolerance(torch.float32, STEPS, order=1))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_of_a_size_that_is_new(use_reentrant: bool, taken: list[int]) -> None:
    layer, x = made("LSTM"), drawn(made("LSTM"))[0].requires_grad_()
    found = checkpoint(layer, x, use_reentrant=use_reentrant)[0]
    grads = torch.autograd.grad(found.sin().sum(), x) if not use_reentrant else None
    if use_reentrant:
        found.sin().sum().backward()
        grads = (x.grad,)  # type: ignore[assignment]
    wide = x.detach().double().requires_grad_()
    want = torch.autograd.grad(of_torch(layer)(wide)[0].sin().sum(), wide)
    assert grads is not None
    assert_matches(grads[0], want[0], 2 * tolerance(torch.float32, STEPS, order=1))
    assert len(taken) == 2


@pytest.mark.parametrize("name", ["weight_ih_l1", "weight_hh_l1", "bias_hh_l1"])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("wrong", ["rows", "across", "kind", "device"])
def test_weights_that_do_not_belong_are_refused(
    name: str, wrong: str, known: bool, taken: list[int]
) -> None:
    layer, x = made("LSTM"), drawn(made("LSTM"))[0]
    if known:
        copy.deepcopy(layer)(x)
    weight = getattr(layer, name).data
    changed = {
        "rows": weight[:-8].clone(),
        "across": weight.view(*reversed(weight.shape[1:]), 2, -1),
        "kind": weight.to(torch.int32),
        "device": weight.to("meta"),
    }[wrong]
    setattr(layer, name, nn.Parameter(changed, requires_grad=wrong != "kind"))
    short = name.replace("weight", "w").replace("bias", "b").removesuffix("_l1")
    with pytest.raises(InvalidInput, match=f"^{short}: got"):
        layer(x)


def test_an_error_in_between_leaves_nothing_running(
    taken: list[int], on_gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = made("LSTM"), drawn(made("LSTM"))[0]
    forks: list[Any] = []
    late = persistent_pair.Fork
    monkeypatch.setattr(persistent_pair, "Fork", lambda d: forks.append(late(d)) or forks[-1])
    layer(x)
    assert not forks[0].stream
    launched = EmulatedLauncher.__call__

    def third_fails(self: Any, *given: Any, stream: Any = None, **more: Any) -> None:
        if stream is None and isinstance(given[0], ForwardArguments) and given[0].first_step >= 6:
            raise RuntimeError("no launch")
        launched(self, *given, stream=stream, **more)

    monkeypatch.setattr(EmulatedLauncher, "__call__", third_fails)
    with pytest.raises(RuntimeError, match="no launch"):
        layer(x)
    assert not forks[1].stream, "what was given to the second stream is waited for"


def test_dropout_between_layers_keeps_them_apart(taken: list[int]) -> None:
    layer, x = made("LSTM", dropout=0.5), drawn(made("LSTM"))[0]
    layer(x)
    assert not taken
    layer.eval()
    layer(x)
    assert len(taken) == 1


def test_a_capture_takes_what_was_loaded_before(
    on_gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = pair_choice.PairAsk("lstm", "tf32", HIDDEN, 2, 256, 0, True, True)
    loaded: list[Request] = []
    monkeypatch.setattr(pair_choice, "is_loaded", lambda request, device: request in loaded)
    found = pair_choice.choose(ask)
    assert "a CUDA graph is being captured" in str(found)
    loaded += [replace(request, share=2) for request in ask.requests()]
    found = pair_choice.choose(ask)
    assert isinstance(found, Decision)
    assert found.pays


def test_a_kernel_that_cannot_be_made_leaves_layers_apart(
    on_gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def geometry(ask: Request, device: int) -> Any:
        if ask.share == 2:
            raise OSError("the disk is full")
        return on_gpu.geometry(ask, device)

    monkeypatch.setattr(pair_choice, "geometry", geometry)
    ask = pair_choice.PairAsk("lstm", "tf32", HIDDEN, 2, 256, 0, True, False)
    assert "the disk is full" in str(pair_choice.choose(ask))


def test_a_stack_explains_itself(on_gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def notes(layer: Any, **changes: Any) -> str:
        stack = layer._read(torch.randn(256, 2, INPUT), None, None, "zeros", None, "zero", False)
        plan = plain.plan_from("lstm", INPUT, HIDDEN, *[False] * 20)
        notes = explained(stack.stack._replace(**changes), plan).notes
        return "\n".join(notes)

    text = notes(made("LSTM"))
    assert "two layers run at once, in 2 pieces of time forwards" in text
    assert "each by forward lstm" in text
    assert "dropout" in notes(made("LSTM"), dropout=0.1)
    assert "both directions" in notes(made("LSTM", bidirectional=True))
    monkeypatch.setattr(overlapped, "_FOUND", {})
    monkeypatch.setattr(overlap, "WORTH", 0.1)
    assert "would not save enough" in notes(made("LSTM"))
    on_gpu.most_batch = 1
    monkeypatch.setattr(overlapped, "_FOUND", {})
    assert "do not fit" in notes(made("LSTM"))
