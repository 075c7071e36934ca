"""What recurrent layers of this package keep is chosen with the rest of a graph's plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import ecornn
from ecornn.echo import backend as echo_backend
from ecornn.echo import pipeline, ranking
from ecornn.echo.keep_modes import RecurrentCall, recurrent_calls, with_modes
from ecornn.echo.report import GraphReport
from ecornn.errors import InvalidInput

LAYERS = {"lstm": ecornn.LSTM, "gru": ecornn.GRU, "rnn_tanh": ecornn.RNN}
#: Results a unit and step keeps as gates.
STORED = {"lstm": 4, "gru": 4, "rnn_tanh": 1}
STEPS, BATCH, WIDTH, HIDDEN = 20, 3, 6, 10


class Model(nn.Module):
    """`work`: so many products beside, which hold next to nothing."""

    def __init__(self, cell: str = "lstm", work: int = 0, **options: Any) -> None:
        super().__init__()
        options.setdefault("backend", "reference")
        self.rnn = LAYERS[cell](WIDTH, HIDDEN, **options)
        self.out = nn.Linear(HIDDEN * (2 if options.get("bidirectional") else 1), WIDTH)
        self.work = work

    def forward(self, x: Tensor) -> Tensor:
        output = self.out(torch.tanh(self.rnn(x)[0]))
        with torch.no_grad():
            beside = x.new_ones(32, 32)
            for _ in range(self.work):
                beside = beside @ beside / 32
        return output + beside[0, 0]


def given(dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(STEPS, BATCH, WIDTH, dtype=dtype)


def compiled(model: nn.Module, memory: Any = "auto", **options: Any) -> tuple[Any, list[Tensor]]:
    """The compiled model after a step, and the gradients of that."""
    torch._dynamo.reset()
    model.zero_grad()
    run = ecornn.compile(model, memory=memory, **{"codegen": "eager", **options})
    run(given()).square().sum().backward()
    return run, [p.grad.clone() for p in model.parameters() if p.grad is not None]


def graph_of(run: Any) -> GraphReport:
    (graph,) = run.explain().graphs
    return graph


def kept(run: Any) -> list[str]:
    return [layer.keeps for layer in graph_of(run).recurrent]


def gates_bytes(cell: str, layers: int = 1, directions: int = 1) -> int:
    return layers * directions * STEPS * BATCH * STORED[cell] * HIDDEN * 4


def made(cell: str = "lstm", **options: Any) -> Model:
    torch.manual_seed(0)
    return Model(cell, **options)


def joint_of(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> fx.GraphModule:
    """As AOTAutograd traces it."""
    seen = []

    def noted(joint: fx.GraphModule, *args: Any) -> Any:
        seen.append(joint)
        return pipeline.decide(joint, *args)

    monkeypatch.setattr(echo_backend, "decide", noted)
    compiled(model)
    return seen[0]


# --- a model that is compiled as a whole -------------------------------------------------------


def test_layers_of_ours_do_not_divide_a_model() -> None:
    run, _ = compiled(made())
    assert "the whole model is compiled" in str(run.explain())


@pytest.mark.parametrize("form", [{}, {"bidirectional": True}, {"num_layers": 2}])
@pytest.mark.parametrize("cell", LAYERS)
@pytest.mark.parametrize("mode", ["states", "gates"])
def test_gradients_are_those_of_the_mode_to_the_last_bit(
    cell: str, form: dict[str, Any], mode: str
) -> None:
    layers, directions = form.get("num_layers", 1), 1 + form.get("bidirectional", False)
    memory = "min" if mode == "states" else "1GiB"
    run, found = compiled(made(cell, **form), memory)
    assert kept(run) == [mode] * layers
    _, expected = compiled(made(cell, keep=mode, **form), memory)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    told = graph_of(run).recurrent
    assert sum(layer.gates_bytes for layer in told) == gates_bytes(cell, layers, directions)
    assert {(layer.module, layer.cell, layer.free) for layer in told} == {("rnn", cell, True)}


@pytest.mark.parametrize("cell", LAYERS)
def test_what_is_kept_falls_by_the_gates(cell: str) -> None:
    gates, _ = compiled(made(cell, num_layers=2), "1GiB")
    states, _ = compiled(made(cell, num_layers=2), "min")
    chosen = [graph_of(run).chosen for run in (gates, states)]
    assert chosen[0] is not None
    assert chosen[1] is not None
    fallen = chosen[0].kept_bytes - chosen[1].kept_bytes
    small = STEPS * BATCH * HIDDEN * 4  # what the plan frees of the rest: tanh's result at most
    assert gates_bytes(cell, 2) <= fallen <= gates_bytes(cell, 2) + 2 * small
    asked, _ = compiled(made(cell, num_layers=2, keep="states"), "min")
    assert graph_of(states).predicted_peak_bytes == graph_of(asked).predicted_peak_bytes


def test_a_mode_that_was_asked_for_stays() -> None:
    for mode in ("states", "gates"):
        for memory in ("auto", "min", "1GiB"):
            run, _ = compiled(made(keep=mode), memory)
            (layer,) = graph_of(run).recurrent
            assert (layer.keeps, layer.free) == (mode, False)
            assert "asked for" in layer.told()


def test_of_two_layers_the_one_that_is_free_changes() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.free = ecornn.GRU(WIDTH, HIDDEN, backend="reference")
            self.asked = ecornn.GRU(HIDDEN, HIDDEN, backend="reference", keep="gates")

        def forward(self, x: Tensor) -> Tensor:
            return self.asked(self.free(x)[0])[0]

    run, _ = compiled(Two(), "min")
    found = {layer.module: layer.keeps for layer in graph_of(run).recurrent}
    assert found == {"free": "states", "asked": "gates"}


@pytest.mark.parametrize("alike", [ranking.ALIKE, 10.0])
def test_auto_holds_no_more_than_torch_does(alike: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much two peaks may differ to count as alike."""
    monkeypatch.setattr(ranking, "ALIKE", alike)
    run, _ = compiled(made())
    assert kept(run) == ["states"]
    asked, _ = compiled(made(keep="states"))
    assert graph_of(run).predicted_peak_bytes == graph_of(asked).predicted_peak_bytes


def test_auto_keeps_gates_where_the_peak_is_elsewhere() -> None:
    class Wide(nn.Module):
        """Its peak comes when the layer's backward pass is over: the input is made of far more."""

        def __init__(self) -> None:
            super().__init__()
            self.wide, self.rnn = nn.Linear(64 * WIDTH, WIDTH), made().rnn

        def forward(self, x: Tensor) -> Tensor:
            seen = torch.cat([x.sin() * k for k in range(1, 65)], -1)
            return self.rnn(self.wide(seen).tanh())[0].square().sum()

    run = ecornn.compile(Wide(), codegen="eager")
    run(given().requires_grad_()).backward()
    (layer,) = graph_of(run).recurrent
    assert layer.keeps == "gates"
    assert "the peak is elsewhere" in str(run.explain()).replace("\n", " ")
    chosen = graph_of(run).chosen
    assert chosen is not None
    assert chosen.seconds_added < 0


def test_auto_keeps_no_gates_that_a_layer_would_not_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ecornn.ops.keeping.FEW_BYTES", gates_bytes("lstm") - 1)
    run, _ = compiled(made())
    assert kept(run) == ["states"]
    assert "are not kept unasked" in str(run.explain()).replace("\n", " ")
    run, _ = compiled(made(), "1GiB")  # there is room enough
    assert kept(run) == ["gates"]


def test_a_budget_is_met_by_as_few_layers_as_are_enough() -> None:
    free, _ = compiled(made(num_layers=4), "1GiB")
    assert kept(free) == ["gates"] * 4
    peak = graph_of(free).predicted_peak_bytes
    assert peak is not None
    one = gates_bytes("lstm")
    for fewer in range(1, 5):
        budget = peak - fewer * one + one // 2
        run, _ = compiled(made(num_layers=4), budget)
        assert sorted(kept(run)) == ["gates"] * (4 - fewer) + ["states"] * fewer
        assert graph_of(run).predicted_peak_bytes <= budget


def test_a_budget_that_cannot_be_met_names_what_can() -> None:
    with pytest.raises(InvalidInput, match="at least") as refused:
        compiled(made(num_layers=2), 1000)
    smallest = int(str(refused.value).split("at least ")[1].split(" bytes")[0].replace(",", ""))
    least, _ = compiled(made(num_layers=2), "min")
    assert smallest == graph_of(least).predicted_peak_bytes
    run, _ = compiled(made(num_layers=2), smallest)
    assert kept(run) == ["states"] * 2
    with pytest.raises(InvalidInput):
        compiled(made(num_layers=2), smallest - 1)


def test_a_fraction_is_one_of_what_is_held_with_gates() -> None:
    whole, _ = compiled(made(num_layers=2), 1.0)
    assert kept(whole) == ["gates"] * 2
    run, _ = compiled(made(num_layers=2), 0.7)
    assert "states" in kept(run)
    assert graph_of(run).limit_bytes < graph_of(whole).limit_bytes


def test_gates_that_are_kept_unasked_are_counted_as_those_asked_for() -> None:
    asked, _ = compiled(made(keep="gates"), "1GiB")
    free, _ = compiled(made(), "1GiB")
    assert graph_of(free).predicted_peak_bytes == graph_of(asked).predicted_peak_bytes


def test_generated_code_has_the_same_gradients() -> None:
    for memory, mode in (("1GiB", "gates"), ("min", "states")):
        model = made(num_layers=2, bidirectional=True)
        run, found = compiled(model, memory, codegen="inductor")
        assert kept(run) == [mode] * 2
        model.zero_grad()
        model(given()).square().sum().backward()
        expected = [p.grad for p in model.parameters()]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_sizes_that_are_symbols() -> None:
    run, _ = compiled(made(), "min", dynamic=True)
    assert kept(run) == ["states"]
    x = torch.randn(STEPS + 3, BATCH + 1, WIDTH)
    found = torch.autograd.grad(run(x).square().sum(), list(run.parameters()))
    expected = torch.autograd.grad(run._orig_mod(x).square().sum(), list(run.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    run, _ = compiled(made(), "1GiB", dynamic=True)
    assert kept(run) == ["gates"]
    found = torch.autograd.grad(run(x).square().sum(), list(run.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("memory", ["1GiB", "min"])
def test_draws_lengths_and_norms_are_those_of_the_mode(memory: str) -> None:
    class Noisy(nn.Module):
        def __init__(self, **options: Any) -> None:
            super().__init__()
            form = {"num_layers": 2, "dropout": 0.3, "zoneout": 0.2, "layer_norm": True}
            self.rnn = ecornn.LSTM(WIDTH, HIDDEN, **form, **options)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return self.rnn(x, lengths=lengths)[0].square().sum()

    def gradients(**options: Any) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        run = ecornn.compile(Noisy(**options), memory=memory, codegen="eager")
        lengths = torch.tensor([STEPS, 3, 11])
        run(given(), lengths)  # lengths are compared with the input's: it runs without Echo
        torch.manual_seed(5)
        run(given(), lengths).backward()
        assert kept(run) == [mode] * 2
        return [weight.grad for weight in run.parameters()]

    mode = "states" if memory == "min" else "gates"
    assert all(map(torch.equal, gradients(), gradients(keep=mode)))


@pytest.mark.parametrize("memory", ["auto", "min"])
def test_a_model_that_packs_its_sequences(memory: str) -> None:
    """torch 2.11 cannot trace that, but for one of its functions says so as of an error."""

    class Packing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = made(num_layers=2).rnn, nn.Linear(HIDDEN, 2)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
            padded, _ = pad_packed_sequence(self.rnn(packed)[0])
            return self.out(padded).square().sum()

    torch._dynamo.reset()
    model, lengths = Packing(), torch.tensor([3, STEPS, 11])
    run, weights = ecornn.compile(model, memory=memory, codegen="eager"), list(model.parameters())
    for _ in range(2):
        found = torch.autograd.grad(run(given(), lengths), weights)
    expected = torch.autograd.grad(model(given(), lengths), weights)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_part_that_is_called_often_is_planned_for_all_its_calls() -> None:
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = ecornn.GRU(WIDTH, HIDDEN, backend="reference")
            self.out = nn.Linear(HIDDEN, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.out(self.rnn(x)[0]))

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = Step()

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(6):
                x = self.step(x)
            return x

    torch.manual_seed(0)
    model = Loop()
    gates, expected = compiled(model, "1GiB")
    states, found = compiled(model, "min")
    assert (kept(gates), kept(states)) == (["gates"], ["states"])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    fallen = graph_of(gates).chosen.peak_bytes - graph_of(states).chosen.peak_bytes
    assert fallen >= 6 * gates_bytes("gru")
    beside = [run.explain().predicted_peak_bytes(0) for run in (gates, states)]
    assert beside[0] - beside[1] >= 6 * gates_bytes("gru")


def test_a_graph_without_our_layers_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        counts.append(1)
        return plans_for(*args, **kwargs)

    plans_for = pipeline.plans_for
    monkeypatch.setattr(pipeline, "plans_for", counted)
    plain = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH))
    for memory in ("auto", "min", "1GiB"):
        run, _ = compiled(plain, memory)
        assert graph_of(run).recurrent == []
    assert len(counts) == 3
    compiled(made(), "min")
    assert len(counts) == 4
    compiled(made(), "auto")  # with few gates as well
    assert len(counts) == 6
    compiled(made(keep="states"), "auto")  # nothing to choose
    assert len(counts) == 7


def test_torchs_kernels_decide_themselves() -> None:
    """On the CPU a layer that may runs on them, and its operator keeps nothing."""
    run, _ = compiled(made(backend="auto"), "min")
    assert graph_of(run).recurrent == []


def test_explain_tells_every_layer() -> None:
    run, _ = compiled(made(num_layers=2), "min")
    told = str(run.explain())
    assert told.count("rnn, lstm, keeps its states alone") == 2
    assert "as little memory as can be was asked for" in told.replace("\n", " ")
    assert '"recurrent"' in run.explain().to_json()
    assert "keeps its states alone" in run.explain().to_html()


# --- the rewritten graph -----------------------------------------------------------------------


def test_a_rewritten_graph_is_the_one_that_is_traced_for_the_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = joint_of(made(bidirectional=True), monkeypatch)
    calls = recurrent_calls(free)
    assert [(call.asked, call.free) for call in calls] == [("auto", True)]
    for mode in ("states", "gates"):
        asked = joint_of(made(bidirectional=True, keep=mode), monkeypatch)
        gates = {calls[0].name} if mode == "gates" else set()
        found = with_modes(free, calls, gates)
        assert _forms(found, "recurrence") == _forms(asked, "recurrence")
        assert _forms(found, "recurrence_backward") == _forms(asked, "recurrence_backward")
        for name in calls[0].backward:
            node = next(node for node in found.graph.nodes if node.name == name)
            values = [one.meta["val"] for one in node.args[6]]
            noted = node.meta["eager_input_vals"][0][6]
            assert [v.shape for v in values] == [v.shape for v in noted]
            assert len(values) == (2 if mode == "gates" else 0)
    # the graph that was traced is as it was
    assert [call.asked for call in recurrent_calls(free)] == ["auto"]


def _forms(module: fx.GraphModule, name: str) -> list[Any]:
    """Of each call of an operator: its constants, and the shapes of what it reads and makes."""

    def shape(value: Any) -> Any:
        return tuple(value.shape) if isinstance(value, Tensor) else value

    found = []
    for node in module.graph.nodes:
        if str(node.target) == f"ecornn.{name}.default":
            args = fx.node.map_arg(node.args, lambda one: one.meta["val"])
            found.append(torch.utils._pytree.tree_map(shape, [args, node.meta["val"]]))
    return found


def test_calls_whose_backward_pass_is_not_in_the_graph_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joint = joint_of(made(), monkeypatch)
    for node in joint.graph.nodes:
        if str(node.target) == "ecornn.recurrence_backward.default":
            # one that reads another result than its own layer's
            node.args = (*node.args[:4], node.args[9], *node.args[5:])
    assert recurrent_calls(joint) == []


def test_a_call_that_is_not_free_is_never_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    joint = joint_of(made(keep="gates"), monkeypatch)
    (call,) = recurrent_calls(joint)
    assert _forms(with_modes(joint, [call], set()), "recurrence") == _forms(joint, "recurrence")
    assert _forms(with_modes(joint, [replace(call, asked="auto")], set()), "recurrence") != _forms(
        joint, "recurrence"
    )


def test_a_name_that_is_none_of_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    joint = joint_of(made(), monkeypatch)
    nobody = RecurrentCall("nobody", (), "lstm", "auto", 1, True, 1.0)
    with pytest.raises(KeyError, match="nobody"):
        with_modes(joint, [nobody], set())
