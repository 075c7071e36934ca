"""A decoder's step is compiled once and reused for all steps and lengths."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

import ecornn
from ecornn.echo.lean import cross_entropy
from support.translator import Translator, loss_and_gradients, sentences

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def kept_bytes(run: Any, *inputs: Tensor) -> int:
    """Of all that autograd keeps for the backward pass, weights and inputs aside."""
    seen: dict[int, int] = {}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(*inputs)
    own = {t.untyped_storage().data_ptr() for t in (*run.parameters(), *inputs)}
    return sum(size for pointer, size in seen.items() if pointer not in own)


@pytest.mark.parametrize("memory", ["auto", "min"])
def test_a_step_is_found_compiled_once_and_right(memory: str) -> None:
    model = Translator(dropout=0.3).double()
    twin = copy.deepcopy(model)
    compiled = ecornn.compile(model, memory=memory)
    for source, target in ((7, 6), (5, 9), (12, 4), (9, 20)):
        inputs = sentences(3, source, target)
        for found, expected in zip(
            loss_and_gradients(compiled, *inputs), loss_and_gradients(twin, *inputs), strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    told = compiled.explain()
    assert "step, 6 times" in str(told)
    # one graph for the first lengths, one for all others
    assert len(told.graphs) <= 2
    assert {graph.name for graph in told.graphs} == {"step"}
    assert "forward" not in model.step.__dict__


def test_gradients_are_those_of_the_same_parts_to_the_last_bit() -> None:
    """Where autograd sums the gradients of several readers, the order depends on what is one node
    to it: compared with the same part compiled by torch alone."""
    model = Translator(dropout=0.3)
    twin = copy.deepcopy(model)
    inputs = sentences(3, 7, 6)
    compiled = ecornn.compile(model, memory="min")
    found = loss_and_gradients(compiled, *inputs)
    (graph,) = compiled.explain().graphs
    assert graph.chosen is not None
    assert graph.chosen.kept_bytes < graph.keep_all.kept_bytes
    twin.step.forward = torch.compile(twin.step.forward, backend="aot_eager")  # type: ignore[method-assign]
    for one, other in zip(found, loss_and_gradients(twin, *inputs), strict=True):
        assert torch.equal(one, other)


def test_what_is_kept_falls_as_predicted() -> None:
    steps, inputs = 12, sentences(4, 30, 12)
    measured, predicted = {}, {}
    for memory in ("1GiB", "min"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        compiled = ecornn.compile(Translator(hidden=16), memory=memory)
        loss_and_gradients(compiled, *inputs)
        measured[memory] = kept_bytes(compiled, *inputs)
        (graph,) = compiled.explain().graphs
        assert graph.calls == steps
        predicted[memory] = graph.chosen.kept_bytes
    fall = measured["1GiB"] - measured["min"]
    # inputs of a step that are read again, and so kept, count as the caller's: the keys, and the
    # words unless what they are joined to is kept
    joined = any(value.kept and "cat" in value.operator for value in graph.values)
    keys, words = 4 * 30 * 16 * 4, 0 if joined else 4 * 12 * 16 * 4
    assert fall == steps * (predicted["1GiB"] - predicted["min"]) - keys - words
    assert measured["min"] < measured["1GiB"] / 3


def test_regions_can_be_named_and_forbidden() -> None:
    inputs = sentences(2, 4, 3)  # three calls: too few to be found
    model = Translator()
    expected = loss_and_gradients(model, *inputs)
    by_name = ecornn.compile(copy.deepcopy(model), regions=["step"])
    part = copy.deepcopy(model)
    by_module = ecornn.compile(part, regions=[part.step])
    found = ecornn.compile(copy.deepcopy(model))
    for compiled, names in ((by_name, {"step"}), (by_module, {"step"}), (found, {"Translator"})):
        for one, other in zip(loss_and_gradients(compiled, *inputs), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
        assert {graph.name for graph in compiled.explain().graphs} == names
    assert "named by the caller" in str(by_name.explain())
    whole = ecornn.compile(Stops(), regions=())
    whole(torch.randn(3, 4)).sum().backward()
    assert "as asked for" in str(whole.explain())


class Stops(nn.Module):
    """Its course depends on its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(20):
            x = self.step(x) + 0.2
            if x.sum().item() > 1e9:
                break
        return x


def test_a_model_whose_course_depends_on_its_numbers_is_counted_while_it_runs() -> None:
    model = Stops()
    compiled = ecornn.compile(model)
    x = torch.randn(3, 4)
    expected = model(x)
    assert torch.equal(compiled(x), expected)  # counts
    torch.testing.assert_close(compiled(x), expected)
    told = str(compiled.explain())
    assert "step, 20 times" in told
    assert "the first call ran without Echo" in told


def test_hooks_and_errors_leave_nothing_behind() -> None:
    model = Translator()
    seen: list[str] = []
    model.step.register_forward_hook(lambda *_: seen.append("step"))
    compiled = ecornn.compile(model)
    compiled(*sentences(2, 5, 7))
    assert len(seen) % 7 == 0
    with pytest.raises(IndexError):
        compiled(torch.full((2, 5), 99), torch.full((2, 7), 3))
    assert "forward" not in model.step.__dict__
    assert len(model.step._forward_pre_hooks) == 0


def test_a_part_that_is_exchanged_is_compiled_anew() -> None:
    model, x = Stops(), torch.randn(3, 4)
    compiled = ecornn.compile(model, regions=["step"])
    for _ in range(2):
        torch.testing.assert_close(compiled(x), model(x))
        model.step = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
    torch.testing.assert_close(compiled(x), model(x))


def test_single_layers_stay_in_the_graph_of_the_whole() -> None:
    class Reusing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.act = nn.Linear(4, 4), nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(6):
                x = self.act(self.linear(x))
            return x

    compiled = ecornn.compile(Reusing())
    compiled(torch.randn(2, 4)).sum().backward()
    (graph,) = compiled.explain().graphs
    assert (graph.name, graph.calls) == ("Reusing", 1)


def test_a_part_within_a_part_belongs_to_the_outer_one() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(4):  # the weights of all layers are the same
                x = self.layer(x)
            return x

    model, x = Outer().double(), torch.randn(2, 3, 8, dtype=torch.float64)
    compiled = ecornn.compile(model, memory="min")
    found = gradients_of(compiled, x)
    torch.testing.assert_close(found, gradients_of(model, x), rtol=1e-9, atol=1e-11)
    assert {(graph.name, graph.calls) for graph in compiled.explain().graphs} == {("layer", 4)}


def gradients_of(run: Any, x: Tensor) -> list[Tensor]:
    run.zero_grad()
    run(x).square().sum().backward()
    return [p.grad.clone() for p in run.parameters()]


def test_layers_of_ours_in_a_step() -> None:
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out = ecornn.GRUCell(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            return torch.tanh(self.out(self.cell(x, h)))

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.step = ecornn.LSTM(4, 4), Step()

        def forward(self, x_TBI: Tensor) -> Tensor:
            output, (h, _) = self.encoder(x_TBI)
            h = h[0]
            for x in output:
                h = self.step(x, h)
            return h

    model, x = Loop().double(), torch.randn(6, 3, 4, dtype=torch.float64)
    compiled = ecornn.compile(model)
    found = gradients_of(compiled, x)
    torch.testing.assert_close(found, gradients_of(model, x), rtol=1e-9, atol=1e-11)
    assert {graph.name for graph in compiled.explain().graphs} == {"step"}
    assert "without Echo" not in str(compiled.explain())


class Listener(nn.Module):
    """A layer that torch's compiler does not take, called in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.layers = nn.ModuleList(nn.GRU(4, 4) for _ in range(2))
        self.out = nn.Linear(4, 40)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.front(x)
        for layer in self.layers:
            x = layer(x)[0]
        return torch.nn.functional.cross_entropy(self.out(x).flatten(0, 1), target)


def test_a_model_with_layers_that_torch_does_not_trace_is_divided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cross_entropy, "FEWEST_BYTES", 0)
    torch.manual_seed(0)
    model, given = Listener(), (torch.randn(5, 3, 4), torch.randint(40, (15,)))
    expected = torch.autograd.grad(model(*given), list(model.parameters()))
    compiled = ecornn.compile(model)
    found = torch.autograd.grad(compiled(*given), list(model.parameters()))
    assert all(map(torch.equal, found, expected))
    told = compiled.explain()
    assert [graph.name for graph in told.graphs] == ["front"]
    assert "does not take recurrent layers" in str(told)
    assert "cross_entropy keeps only its scores" in str(told)
    assert told.predicted_peak_bytes(held=0) is not None, told.not_predicted
    torch._dynamo.reset()
    whole = ecornn.compile(model, regions=())
    whole(*given)
    assert "the whole model is compiled: as asked for" in str(whole.explain())


class Warns(nn.Module):
    """As cuDNN's layers do when they are given tensors without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(4, 4)
        self.twice = nn.Sequential(self.step, nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, FakeTensor):
            warnings.warn("Accessing the data pointer of FakeTensor is deprecated", stacklevel=1)
        for _ in range(6):
            x = self.twice(x)
        return x


def test_a_run_without_numbers_warns_of_nothing_that_nobody_does() -> None:
    run = ecornn.compile(Warns(), codegen="eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Accessing the data pointer")
        run(torch.randn(3, 4)).sum().backward()
    assert "without Echo" not in str(run.explain())
    assert "6 times" in str(run.explain())
