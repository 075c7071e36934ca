"""Layers of this package around compiled parts keep what the memory that was asked for leaves."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ecornn
from ecornn.backends.reference import Reference
from ecornn.echo.lean import layers
from ecornn.echo.parts import has_free_layers
from ecornn.errors import InvalidInput
from ecornn.ops.keeping import keeping_states_alone, keeps_gates, states_alone
from ecornn.spec import RnnSpec

STEPS, BATCH, HIDDEN = 24, 4, 12
#: Of one LSTM layer.
GATES = STEPS * BATCH * 4 * HIDDEN * 4


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The definition by itself never keeps gates unasked, nor does any layer on the CPU: both as
    the persistent kernels do on a GPU."""

    def keeps(self: Reference, spec: RnnSpec) -> str:
        if not spec.needs_grad:
            return "none"
        unasked = "gates" if spec.roomy else "states"
        return unasked if spec.keep == "auto" else spec.keep

    def is_roomy(x_TBI: Tensor, hidden: int) -> bool:
        return keeps_gates(4 * hidden * x_TBI.shape[0] * x_TBI.shape[1] * x_TBI.element_size())

    monkeypatch.setattr(Reference, "keeps", keeps)
    monkeypatch.setattr("ecornn.nn.base.is_roomy", is_roomy)
    monkeypatch.setattr(layers, "FEWEST_BYTES", 0)
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.backends.mkldnn.flags(enabled=False):  # what oneDNN takes for itself is not seen
        yield
    torch._dynamo.reset()


class Divided(nn.Module):
    """A part that is compiled, layers of ours, and one of torch's."""

    def __init__(self, own: int = 3, **options: Any) -> None:
        super().__init__()
        options = {"backend": "reference", **options}
        # what it keeps is its result: there is nothing to plan
        self.front = nn.Sequential(nn.Linear(8, HIDDEN), nn.Tanh())
        self.own = nn.ModuleList(ecornn.LSTM(HIDDEN, HIDDEN, **options) for _ in range(own))
        self.theirs, self.out = nn.GRU(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for layer in self.own:
            x = layer(x)[0]
        return self.out(self.theirs(x)[0]).square().mean()


def given() -> Tensor:
    torch.manual_seed(2)
    return torch.randn(STEPS, BATCH, 8)


def held(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), given()))


def made(memory: Any, own: int = 3, lean: bool | str = True, **options: Any) -> Any:
    torch.manual_seed(1)
    model = Divided(own, **options)
    return ecornn.compile(model, memory=memory, codegen="eager", lean=lean)


def gradients(run: Any) -> list[Tensor]:
    run.zero_grad()
    run(given()).backward()
    return [weight.grad.clone() for weight in run.parameters()]


def foretold(run: Any) -> int:
    return run.explain().predicted_peak_bytes(held=held(run))


def kept_bytes(run: Any) -> int:
    """Of what is really kept for the backward pass, each storage once."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    run(given())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = run(given())
    del loss
    return sum(storages.values())


def told(run: Any) -> str:
    return str(run.explain()).replace("\n", " ")


def test_the_least_memory_keeps_no_gates_and_is_foretold() -> None:
    auto, least = made("auto", lean="layers"), made("min")
    gates = gradients(auto)
    states = gradients(least)
    torch.testing.assert_close(states, gates, rtol=1e-5, atol=1e-6)
    asked = gradients(made("min", keep="states"))
    assert all(torch.equal(a, b) for a, b in zip(states, asked, strict=True))
    assert kept_bytes(auto) - kept_bytes(least) == 3 * GATES
    assert foretold(auto) - foretold(least) == 3 * GATES
    assert told(auto).count("keeps its gates") == 3
    assert told(least).count("keeps its states alone") == 3
    assert "own.0 keeps its states alone: 18.00 KiB of gates less" in told(least)


def test_whoever_asked_for_gates_keeps_them() -> None:
    asked = made("min", keep="gates")
    gradients(asked)
    free = made("min")
    gradients(free)
    assert kept_bytes(asked) - kept_bytes(free) == 3 * GATES
    assert foretold(asked) - foretold(free) == 3 * GATES
    assert "gates" not in told(asked)


def test_with_lean_false_layers_are_left_alone() -> None:
    run = made("min", lean=False)
    gradients(run)
    assert kept_bytes(run) == kept_bytes(made("auto", lean=False))
    assert "own.0 keeps its gates, 18.00 KiB" in told(run)


def test_a_budget_has_gates_made_again_before_torchs_layers_are_run_again() -> None:
    plain = made("1GiB")
    gradients(plain)
    written = foretold(plain)
    assert told(plain).count("keeps its gates") == 3
    assert "1 calls of recurrent layers in a forward pass 0 are run again" in told(plain)

    budget = written - 2 * GATES  # some of torch's layer's memory is there at other times
    run = made(budget)
    found = gradients(run)
    assert foretold(run) <= budget
    assert told(run).count("keeps its states alone") == 3
    assert "the step did not fit" in told(run)
    assert "1 calls of recurrent layers in a forward pass 0 are run again" in told(run)
    torch.testing.assert_close(found, gradients(plain), rtol=1e-5, atol=1e-6)


def test_a_budget_that_cannot_be_met_names_what_states_alone_hold() -> None:
    with pytest.raises(InvalidInput, match="the smallest peak that was found") as refused:
        made(1000)(given())
    smallest = int(refused.value.expected.split()[2].replace(",", ""))
    run = made(smallest)
    gradients(run)
    assert foretold(run) <= smallest
    assert told(run).count("keeps its states alone") == 3
    with pytest.raises(InvalidInput):
        made(smallest - 1)(given())
    with pytest.raises(InvalidInput) as with_gates:
        made(1000, keep="gates")(given())
    assert int(with_gates.value.expected.split()[2].replace(",", "")) > smallest


def test_a_fraction_is_one_of_the_model_as_it_is_written() -> None:
    run = made(1.0)
    gradients(run)
    assert told(run).count("keeps its gates") == 3
    run = made(0.7)
    gradients(run)
    assert told(run).count("keeps its states alone") == 3


def test_no_rehearsal_more_without_layers_that_may_choose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ecornn.echo.rehearse import Rehearsal

    steps = []
    step = Rehearsal.step
    monkeypatch.setattr(
        Rehearsal, "step", lambda *args: steps.append(states_alone()) or step(*args)
    )
    gradients(made(1.0, keep="gates"))
    with pytest.raises(InvalidInput):
        made(1000, keep="gates")(given())
    assert steps
    assert not any(steps)
    with pytest.raises(InvalidInput):
        made(1000)(given())
    assert any(steps)


def test_parts_with_layers_of_ours_are_compiled_as_wholes() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = ecornn.GRU(8, 6, backend="reference"), nn.Linear(6, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.out(self.rnn(x)[0]))

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.theirs = Block(), nn.LSTM(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.theirs(self.block(x))[0].square().mean()

    run = ecornn.compile(Both(), memory="min", codegen="eager")
    gradients(run)
    (graph,) = run.explain().graphs
    assert graph.name == "block"
    assert [(layer.cell, layer.keeps) for layer in graph.recurrent] == [("gru", "states")]
    assert "rnn keeps" not in "".join(run.explain().notes)  # the graph's own plan tells


def test_which_models_have_layers_that_may_choose() -> None:
    assert has_free_layers(Divided(), ())
    assert not has_free_layers(Divided(), ("own",))
    assert not has_free_layers(Divided(keep="states"), ())
    assert not has_free_layers(nn.Sequential(nn.LSTM(2, 2)), ())


def test_what_is_wanted_holds_for_its_thread_and_ends_with_an_error() -> None:
    seen = []
    with keeping_states_alone():
        assert not keeps_gates(1)
        other = Thread(target=lambda: seen.append(states_alone()))
        other.start()
        other.join()
        with keeping_states_alone(False):
            assert keeps_gates(1)
        assert states_alone()
    assert seen == [False]
    with pytest.raises(RuntimeError), keeping_states_alone():
        raise RuntimeError
    assert not states_alone()


@pytest.mark.parametrize("around", [False, True])
def test_what_a_checkpoint_runs_again_keeps_what_it_kept(around: bool) -> None:
    """Its own run comes in the backward pass, when nobody tells the layer anything, and takes what
    is kept by the order in which it is; one around the whole model calls that again."""

    class Checkpointed(Divided):
        def __init__(self) -> None:
            super().__init__()
            # as wide as a step's gates: one would be taken for the other
            self.wide, self.narrow = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

        def layered(self, layer: nn.Module, x: Tensor) -> Tensor:
            return self.narrow(torch.tanh(self.wide(layer(x)[0].sigmoid().exp())))

        def forward(self, x: Tensor) -> Tensor:
            x = self.front(x)
            for layer in self.own:
                if around:
                    x = self.layered(layer, x)
                else:
                    x = checkpoint(self.layered, layer, x, use_reentrant=False)
            return self.out(self.theirs(x)[0]).square().mean()

    model = Checkpointed()
    run = ecornn.compile(model, memory="min", codegen="eager")
    for _ in range(2):
        loss = checkpoint(run, given(), use_reentrant=False) if around else run(given())
        found = torch.autograd.grad(loss, list(model.parameters()))
    expected = torch.autograd.grad(model(given()), list(model.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
