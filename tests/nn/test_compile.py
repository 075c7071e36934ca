"""torch.compile and torch.export see one graph that computes what the layer computes."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import ecornn
from support.cases import CELLS, Case, call_arguments, draw, draw_values, make_layer
from support.tolerances import assert_matches, tolerance

#: What a compiled model is asked for.
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bidirectional, two layers": {"bidirectional": True, "layers": 2},
    "lengths": {"lengths": True},
    "lengths, frozen, both ways": {"lengths": True, "after_end": "frozen", "bidirectional": True},
    "resets": {"resets": True},
    "resets, lengths, norm": {
        "resets": True,
        "reset_to": "initial",
        "lengths": True,
        "layer_norm": True,
        "layers": 2,
    },
    "zoneout": {"zoneout": (0.25, 0.5)},
    "batch first, no state": {"form": "batch_first", "initial": False, "resets": True},
    "unbatched": {"form": "unbatched", "batch": 1},
}
CASES = [Case(cell, **feature) for cell in CELLS for feature in FEATURES.values()]
CASES += [Case("lstm", proj=2), Case("lstm", cell_states=True, bidirectional=True)]


class Model(nn.Module):
    """Linear → recurrent layer → Linear."""

    def __init__(self, case: Case, **options: Any) -> None:
        super().__init__()
        self.before = nn.Linear(6, case.inputs)
        self.layer = make_layer(case, torch.float32, **options)
        self.after = nn.Linear(case.directions * (case.proj or case.hidden), 2)

    def forward(self, x: Tensor, hx: Any = None, **options: Any) -> Any:
        output, *rest = self.layer(self.before(x), hx, **options)
        return self.after(output), *rest


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    allowed = torch._dynamo.config.allow_rnn
    yield
    assert torch._dynamo.config.allow_rnn == allowed
    torch._dynamo.reset()


def arguments_of(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The case's call, with an input of the model's own size and no NaN in its padding."""
    arguments, options = call_arguments(case, draw_values(case).to(torch.float32))
    x = draw(*arguments[0].shape[:-1], 6, seed=5).float()
    return (x, *arguments[1:]), options


def leaves(value: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if leaf is not None]


def results_and_gradients(model: nn.Module, arguments: Any, options: Any) -> list[Tensor]:
    x, *rest = arguments
    x = x.detach().requires_grad_()
    results = leaves(model(x, *rest, **options))
    d_results = [draw(*r.shape, seed=i).to(r.dtype) for i, r in enumerate(results)]
    sources = [x, *model.parameters()]
    return results + list(torch.autograd.grad(results, sources, d_results))


def assert_equal_to_eager(compiled: nn.Module, model: nn.Module, case: Case) -> None:
    arguments, options = arguments_of(case)
    found = results_and_gradients(compiled, arguments, options)
    wanted = results_and_gradients(model, arguments, options)
    for i, (value, reference) in enumerate(zip(found, wanted, strict=True)):
        assert_matches(value, reference, tolerance(torch.float32, case.steps), f"value {i}")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_graph_with_equal_results_and_gradients(case: Case) -> None:
    model, counter = Model(case), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    assert_equal_to_eager(compiled, model, case)
    assert counter.frame_count == 1


def _recurrences(graph: torch.fx.GraphModule) -> int:
    return sum("recurrence" in str(node.target) for node in graph.graph.nodes)


@pytest.mark.parametrize("cell", CELLS)
def test_the_graph_has_one_operator_a_layer(cell: str) -> None:
    case = Case(cell, layers=3, bidirectional=True, resets=True)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(Model(case), backend=counter, fullgraph=True)
    arguments, options = arguments_of(case)
    compiled(*arguments, **options)
    assert [_recurrences(graph) for graph in counter.graphs] == [3]


@pytest.mark.parametrize(
    ("backend", "keep"), [("aten", "auto"), ("reference", "states"), ("reference", "gates")]
)
def test_backends_and_keeps(backend: str, keep: str) -> None:
    case = Case("lstm", bidirectional=True, layers=2)
    model = Model(case, backend=backend, keep=keep)
    assert_equal_to_eager(torch.compile(model, backend="aot_eager", fullgraph=True), model, case)


@pytest.mark.parametrize("cell", CELLS)
def test_a_compiled_packed_sequence_gives_eager_results(cell: str) -> None:
    """Not promised as one graph: torch's packing is not traced as one."""
    case = Case(cell, form="packed", bidirectional=True)
    layer = make_layer(case, torch.float32)
    arguments, _ = call_arguments(case, draw_values(case).to(torch.float32))
    found = leaves(torch.compile(layer, backend="aot_eager")(*arguments))
    for value, reference in zip(found, leaves(layer(*arguments)), strict=True):
        assert_matches(
            value, reference, tolerance(value.dtype, 5) if value.is_floating_point() else 0
        )


@pytest.mark.parametrize(
    ("cell", "feature"),
    [("lstm", "plain"), ("lstm", "resets"), ("gru", "lengths"), ("rnn_tanh", "plain")],
)
def test_changing_shapes(cell: str, feature: str) -> None:
    """One graph for the first size, one more when the steps change, one more for the batch."""
    sizes = [(5, 3), (7, 3), (9, 3), (9, 4), (6, 2), (63, 5)]
    model, counter = Model(Case(cell, **FEATURES[feature])), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    counts = []
    for steps, batch in sizes:
        case = Case(cell, steps=steps, batch=batch, **FEATURES[feature])
        assert_equal_to_eager(compiled, model, case)
        counts.append(counter.frame_count)
    assert counts == [1, 2, 2, 3, 3, 3]


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("cell", CELLS)
def test_shapes_that_are_dynamic_from_the_start_need_one_graph(cell: str, layers: int) -> None:
    """The dropout between layers is a symbol then, too."""
    form = {"lengths": True, "layers": layers}
    model, counter = Model(Case(cell, **form)), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    # a first batch of H, or of as many as there are layers, would tie the two: Dynamo gives equal
    # sizes one symbol
    for steps, batch in [(5, 4), (7, 2), (63, 3)]:
        assert_equal_to_eager(compiled, model, Case(cell, steps=steps, batch=batch, **form))
    assert counter.frame_count == 1


def test_weights_are_read_at_every_call() -> None:
    case = Case("gru")
    model = Model(case)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_equal_to_eager(compiled, model, case)
    before = compiled(*arguments_of(case)[0])[0]
    with torch.no_grad():
        model.layer.weight_hh_l0.mul_(2)
    assert_equal_to_eager(compiled, model, case)
    assert not torch.equal(compiled(*arguments_of(case)[0])[0], before)


def test_without_gradients() -> None:
    case, counter = Case("lstm", lengths=True), CompileCounterWithBackend("aot_eager")
    model = Model(case)
    arguments, options = arguments_of(case)
    with torch.no_grad():
        found = torch.compile(model, backend=counter, fullgraph=True)(*arguments, **options)
        wanted = model(*arguments, **options)
    for value, reference in zip(leaves(found), leaves(wanted), strict=True):
        assert_matches(value, reference, tolerance(torch.float32, case.steps))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "noise",
    [
        {"zoneout": 0.5},
        {"recurrent_dropout": 0.5},
        {"input_dropout": 0.5, "output_dropout": 0.5},
        {"dropout": 0.5, "variational": True, "num_layers": 2},
    ],
    ids=str,
)
def test_noise_is_drawn_from_torchs_generator(noise: dict[str, Any]) -> None:
    layer = ecornn.LSTM(4, 3, **noise)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(9, 3, 4)

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return compiled(x)[0]

    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))


def test_torchs_own_layers_are_compiled_as_torch_decides() -> None:
    """Making one of ours has not switched `allow_rnn` on for theirs."""
    make_layer(Case("lstm"))
    theirs, x = nn.LSTM(4, 3), torch.randn(5, 3, 4)
    assert not torch._dynamo.config.allow_rnn
    with pytest.raises(torch._dynamo.exc.Unsupported, match="LSTM"):
        torch.compile(theirs, backend="eager", fullgraph=True)(x)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True):
        found = torch.compile(theirs, backend="eager", fullgraph=True)(x)
    assert torch.equal(found[0], theirs(x)[0])


def test_a_model_with_layers_of_both_kinds() -> None:
    ours, theirs = make_layer(Case("lstm"), torch.float32), nn.LSTM(3, 3)

    def model(x: Tensor) -> Tensor:
        return theirs(ours(x)[0])[0]

    counter, x = CompileCounterWithBackend("aot_eager"), torch.randn(5, 3, 4)
    assert_matches(torch.compile(model, backend=counter)(x), model(x), tolerance(torch.float32, 5))
    assert sum(_recurrences(graph) for graph in counter.graphs) == 1


NO_COMPILER = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="inductor generates C++ for the CPU, and this machine has no C++ compiler",
)


@NO_COMPILER
def test_inductor() -> None:
    case = Case("lstm", bidirectional=True, layers=2, lengths=True, resets=True)
    model = Model(case)
    assert_equal_to_eager(torch.compile(model, backend="inductor", fullgraph=True), model, case)


def round_trip(exported: torch.export.ExportedProgram) -> nn.Module:
    buffer = io.BytesIO()
    torch.export.save(exported, buffer)
    buffer.seek(0)
    return torch.export.load(buffer).module()


def assert_same(found: Any, wanted: Any, case: Case) -> None:
    for value, reference in zip(leaves(found), leaves(wanted), strict=True):
        assert_matches(value, reference, tolerance(torch.float32, case.steps))


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize("case", [c for c in CASES if c.lstm or not c.lengths][::2], ids=str)
def test_export_makes_the_round_trip(case: Case, strict: bool) -> None:
    model = Model(case)
    arguments, options = arguments_of(case)
    exported = torch.export.export(model, arguments, options, strict=strict)
    assert _recurrences(exported) == case.layers
    assert_same(round_trip(exported)(*arguments, **options), model(*arguments, **options), case)


class Explicit(nn.Module):
    """With arguments by name: torch.export gives those of `**options` no dynamic sizes."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, lengths: Tensor, resets: Tensor) -> Any:
        return self.model(x, lengths=lengths, resets=resets)


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize("cell", CELLS)
def test_export_with_dynamic_steps_and_batch(cell: str, strict: bool) -> None:
    feature = {"initial": False, "lengths": True, "resets": True}
    model = Explicit(Model(Case(cell, layers=2, bidirectional=True, **feature)))

    def tensors(case: Case) -> tuple[Tensor, ...]:
        (x, _), options = arguments_of(case)
        return x, options["lengths"], options["resets"]

    steps, batch = torch.export.Dim("steps"), torch.export.Dim("batch")
    both = {0: steps, 1: batch}
    exported = torch.export.export(
        model,
        tensors(Case(cell, **feature)),
        dynamic_shapes={"x": both, "lengths": {0: batch}, "resets": both},
        strict=strict,
    )
    loaded = round_trip(exported)
    for size in [(5, 3), (9, 2), (63, 4)]:
        case = Case(cell, *size, **feature)
        assert_same(loaded(*tensors(case)), model(*tensors(case)), case)
