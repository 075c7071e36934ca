"""One step observed: every byte counted once, under the right name, and nothing changed by it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ecornn
from ecornn.bench.models.step import Step, make_step
from ecornn.bench.profiling.alive import Alive, held_by
from ecornn.profiler import MemoryReport, profile
from ecornn.profiler.model import TENSORS, Held, rows_of

MODELS = ("nmt", "speech", "lstm-lm", "gpt2", "transformer", "resnet50")


def ready(name: str) -> Step:
    """Past its first step, so that its optimizer has its state."""
    step = make_step(name, size="tiny", device="cpu")
    step()
    return step


def adds_up(report: MemoryReport) -> None:
    assert report.peak_bytes == report.timeline.total(report.peak_time)
    assert report.peak_bytes == max(map(report.timeline.total, range(len(report.timeline))))
    assert report.peak_bytes == sum(held.bytes for held in report.at_peak)
    assert list(report.rows) == rows_of(report.held, report.peak_time)
    assert {row.kind for row in report.rows} <= set(TENSORS)


def of_kind(report: MemoryReport, kind: str) -> list[Held]:
    return [held for held in report.held if held.kind == kind]


def bytes_of(report: MemoryReport, kind: str) -> int:
    return sum(held.bytes for held in of_kind(report, kind))


@pytest.mark.parametrize("name", MODELS)
def test_the_peak_is_that_of_another_observer(name: str) -> None:
    """And each storage dies when it dies without the profiler, operator by operator."""
    step = ready(name)
    with Alive(held_by(step)) as alone:
        step()
    observed = profile(model=step.model, optimizer=step.optimizer)
    with observed, Alive(held_by(step)) as beside:
        step()
    report = observed.report
    adds_up(report)
    assert beside.bytes_at == alone.bytes_at
    # A step's first operator comes after gradients of the step before are given up.
    assert report.peak_bytes == alone.peak_bytes
    assert not report.error
    assert report.notes == ()
    weights = {p.data_ptr(): p.nbytes for p in [*step.model.parameters(), *step.model.buffers()]}
    assert bytes_of(report, "weights") == sum(weights.values())


@pytest.mark.parametrize("name", ["nmt", "transformer"])
def test_values_and_random_draws_stay_as_they_are(name: str) -> None:
    def trained(observe: bool) -> tuple[list[Tensor], Tensor]:
        step = ready(name)
        torch.manual_seed(3)
        if observe:
            profile(step, step.model, step.optimizer)
        else:
            step()
        return [p.grad for p in step.model.parameters() if p.grad is not None], torch.rand(3)

    (plain, drawn), (observed, drawn_after) = trained(False), trained(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, observed, strict=True))
    assert torch.equal(drawn, drawn_after)


def test_attention_and_recurrent_feature_maps_come_first_and_name_their_lines() -> None:
    step = make_step("nmt", size="tiny", device="cpu", batch=32, length=24)
    step()
    report = profile(step, step.model, step.optimizer)
    assert max(report.by_kind(), key=report.by_kind().__getitem__) == "feature maps"
    kept = [row for row in report.rows if row.kind == "feature maps"]
    paths = ("decoder.attention", "encoder", "decoder.cells")
    assert all(row.module.startswith(paths) for row in kept[:4]), kept[:4]
    assert any(row.module.startswith("decoder.attention") for row in kept[:4])
    lines = {one.line for one in report.at_peak if one.module.startswith("decoder.attention")}
    assert all("ecornn/bench/models/attention_nmt.py:" in line for line in lines if line)
    assert any("mixed_BSH" in _source(line) for line in lines if line)


def _source(line: str) -> str:
    from ecornn.bench.models import attention_nmt

    number = int(line.split(":")[1].split()[0])
    with open(attention_nmt.__file__) as file:  # noqa: PTH123
        return file.read().splitlines()[number - 1]


class Twice(nn.Module):
    """One layer called twice, another inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.inner(x)).exp()).sum()


def observed(model: nn.Module, step: Callable[[], Any], optimizer: Any = None) -> MemoryReport:
    report = profile(step, model, optimizer)
    adds_up(report)
    assert MemoryReport.from_json(report.to_json()) == report
    return report


def test_a_module_called_twice_inside_another() -> None:
    model, x = Twice(), torch.randn(4, 8)
    report = observed(model, lambda: model(x).backward())
    kept = of_kind(report, "feature maps")
    assert [(one.module, one.operator, one.bytes) for one in kept] == [
        ("inner.1", "aten.tanh", 128),
        ("inner.1", "aten.tanh", 128),
        ("", "aten.exp", 128),
    ]
    assert kept[0].kept_by == ("inner.1: aten.tanh", "inner.0: aten.addmm")
    assert kept[2].kept_by == ("aten.exp", "head: aten.addmm")
    assert "test_collect.py" in kept[0].line
    assert kept[0].line.endswith("in forward")
    # Given up in the order of the backward pass, before the step ends.
    ends = [one.freed for one in kept]
    assert all(end is not None for end in ends)
    assert ends == sorted(ends, reverse=True)  # type: ignore[type-var]
    assert [one.bytes for one in of_kind(report, "inputs")] == [128]
    gradients = of_kind(report, "gradients")
    assert sorted(one.why for one in gradients)[0] == "the gradient of head.bias"
    assert all(one.freed is None for one in gradients)


def test_phases_and_optimizer_state_on_the_first_step() -> None:
    model, x = Twice(), torch.randn(4, 8)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    report = observed(model, step)  # the optimizer is found when it steps
    phases = list(dict.fromkeys(report.timeline.phase))
    assert phases == ["before", "forward", "backward", "optimizer"]
    weights = sum(p.nbytes for p in model.parameters())
    counters = 4 * len(list(model.parameters()))
    assert bytes_of(report, "optimizer state") == 2 * weights + counters
    assert bytes_of(report, "gradients") == weights
    assert all(one.freed is not None for one in of_kind(report, "gradients"))
    again = observed(model, step, optimizer)
    assert {one.born for one in of_kind(again, "optimizer state")} == {0}


def test_several_optimizers_and_a_parameter_outside_of_the_model() -> None:
    model, extra = Twice(), nn.Parameter(torch.ones(3))
    optimizers = [
        torch.optim.SGD(model.inner.parameters(), 0.1, momentum=0.9),
        torch.optim.Adagrad([*model.head.parameters(), extra], 0.1),
    ]

    def step() -> None:
        (model(torch.randn(4, 8)) + extra.sum()).backward()
        for optimizer in optimizers:
            optimizer.step()

    report = observed(model, step, optimizers)
    states = {one.why for one in of_kind(report, "optimizer state")}
    assert {"momentum_buffer of inner.0.weight", "sum of head.bias"} <= states
    assert "sum of a parameter outside of the model" in states
    assert any(one.why == "a parameter outside of the model" for one in report.held)


def test_gradients_are_accumulated_in_place() -> None:
    model = Twice()

    def step() -> None:
        for _ in range(3):
            model(torch.randn(4, 8)).backward()

    report = observed(model, step)
    assert bytes_of(report, "gradients") == sum(p.nbytes for p in model.parameters())
    assert len(of_kind(report, "inputs")) == 3  # drawn in the step, handed to the model


def test_tied_weights_count_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    report = observed(model, lambda: model(torch.randn(2, 8)).sum().backward())
    assert [(one.module, one.bytes) for one in of_kind(report, "weights")] == [("0", 256)]
    assert bytes_of(report, "gradients") == 256


def test_sparse_gradients() -> None:
    model = nn.Embedding(1000, 4, sparse=True)
    indices = torch.tensor([1, 2, 2])
    report = observed(model, lambda: model(indices).sum().backward())
    # Three indices of 8 bytes and three rows of 16; nothing of the size of the table.
    assert bytes_of(report, "gradients") == 3 * 8 + 3 * 16
    assert bytes_of(report, "weights") == 16_000


def test_views_in_place_operators_no_grad_and_nothing_at_all() -> None:
    model = nn.Linear(8, 8)

    def step() -> None:
        y = model(torch.randn(4, 8)).relu_()
        with torch.no_grad():
            shown = y * 2  # kept by nobody
            shown.add_(1)
        parts = [y[:2], y[2:], y.t(), torch.empty(0, 5), torch.zeros(3, 0).sum(1)]
        (parts[0] * parts[1]).sum().backward()

    report = observed(model, step)
    kept = of_kind(report, "feature maps")
    assert [(one.operator, one.bytes) for one in kept] == [("aten.addmm", 128)]
    assert kept[0].kept_by == ("aten.relu_", "aten.mul")
    shown = [one for one in report.held if one.operator == "aten.mul" and one.bytes == 128]
    assert [one.kind for one in shown if report.timeline.phase[one.born] == "forward"] == [
        "workspace"
    ]


def test_a_storage_that_is_resized_is_counted_at_its_size() -> None:
    model = nn.Linear(1, 1)

    def step() -> None:
        out = torch.empty(0)
        torch.add(torch.ones(10), 1, out=out)
        out.resize_(100)

    report = observed(model, step)
    sizes = [one.bytes for one in report.held if one.operator in ("aten.add", "aten.resize_")]
    assert sizes == [40, 400]
    # Both are there while the contents are copied.
    assert report.peak_bytes == 40 + 400 + sum(p.nbytes for p in model.parameters())


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.square = x * x
        return ctx.square * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * ctx.square * gradient


class Cubed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Cube.apply(self.linear(x))
        return y


def test_functions_of_the_program() -> None:
    model = nn.Sequential(Cubed())
    report = observed(model, lambda: model(torch.randn(4, 8)).sum().backward())
    kept = of_kind(report, "feature maps")
    assert [(one.module, one.operator, one.kept_by) for one in kept] == [
        ("0.linear", "aten.addmm", ("0: Cube",)),
        ("0", "aten.mul", ("0: Cube",)),
    ]


def test_layers_that_take_another_way_beside_hooks_take_their_own() -> None:
    """Such as a teacher in evaluation mode: each of its layers is one operator."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    teacher = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    model = nn.ModuleDict({"teacher": teacher, "student": nn.Linear(32, 32)})
    x = torch.randn(4, 6, 32)
    told: list[Tensor] = []

    def step() -> None:
        with torch.no_grad():
            told.append(teacher(x))
        F.mse_loss(model["student"](x), told[-1]).backward()
        model.zero_grad()

    step()
    with Alive([*model.parameters(), x]) as alone:
        step()
    report = observed(model, step)
    assert torch.equal(told[0], told[-1])
    assert report.timeline.operator.count("aten._transformer_encoder_layer_fwd") == 2
    assert report.peak_bytes == alone.peak_bytes
    modules = {one.operator: one.module for one in report.held}
    assert modules["aten._transformer_encoder_layer_fwd"] == "teacher"
    assert modules["aten.addmm"] == "student"


def test_functional_transforms_and_layers_of_this_package() -> None:
    layer, x = ecornn.LSTM(4, 8), torch.randn(5, 2, 4)

    def step() -> None:
        layer(x)[0].sum().backward()

    kept = of_kind(observed(layer, step), "feature maps")
    assert {one.line.split(" in ")[1] for one in kept} == {"step"}

    model = nn.Linear(4, 1)
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(given: dict[str, Tensor], one: Tensor) -> Tensor:
        return torch.func.functional_call(model, given, (one,)).sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))
    report = observed(model, lambda: each(weights, torch.randn(6, 4)))
    assert bytes_of(report, "weights") == 20


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant: bool) -> None:
    model, x = Twice(), torch.randn(4, 8, requires_grad=True)

    def step() -> None:
        y: Any = checkpoint(model.inner, x, use_reentrant=reentrant)
        model.head(y).sum().backward()

    report = observed(model, step)
    made = [one for one in report.held if one.operator == "aten.tanh"]
    phases = [report.timeline.phase[one.born] for one in made]
    assert phases == ["forward", "backward"]
    assert all(one.module == "inner.1" and "test_collect.py" in one.line for one in made)
    # The first is what the head keeps; the second is kept by nobody outside of the checkpoint.
    assert made[0].kept_by == ("head: aten.addmm",)
    if reentrant:
        assert made[1].kept_by == ("inner.1: aten.tanh",)
    else:
        assert any("hooks" in note for note in report.notes)


@pytest.mark.skipif(
    all(shutil.which(name) is None for name in ("c++", "g++", "clang++")),
    reason="inductor generates C++ for the CPU, and this machine has no C++ compiler",
)
def test_generated_code_shows_what_it_hands_to_operators_and_keeps() -> None:
    model, x = Twice(), torch.randn(4, 8)
    with torch._inductor.config.patch(compile_threads=1):
        compiled = torch.compile(model)
        compiled(x).exp().backward()
    model.zero_grad()
    report = observed(model, lambda: compiled(x).exp().backward())
    kept = [one for one in of_kind(report, "feature maps") if "compiled code" in one.kept_by]
    assert [one.bytes for one in kept] == [128, 128, 128]
    # inductor's own graph has lines; modules are known by weights and lines
    assert {(one.module, one.operator) for one in kept} >= {("inner.0", "aten.addmm")}
    assert all("test_collect.py" in one.line for one in kept)
    assert all(one.born > 0 and one.freed is not None for one in kept)
    # What was there before is told apart from what the code made.
    assert [(one.bytes, one.born) for one in of_kind(report, "inputs")] == [(128, 0)]
    assert bytes_of(report, "gradients") == sum(p.nbytes for p in model.parameters())


class Pieces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        for _ in range(2):
            x = self.linear(x).exp()
            yield x


def test_a_module_and_a_step_that_are_generators() -> None:
    model = nn.ModuleDict({"pieces": Pieces()})

    def step() -> Iterator[None]:
        for piece in model["pieces"](torch.randn(4, 8)):
            yield
            last = piece.tanh()
        last.sum().backward()

    report = observed(model, step)  # type: ignore[arg-type]
    made = {one.operator: one.module for one in of_kind(report, "feature maps")}
    assert made == {"aten.exp": "pieces", "aten.tanh": ""}
    assert "backward" in report.timeline.phase


def test_fake_tensors_tell_what_real_ones_do() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    bystander = torch.eye(5).to_sparse()  # alive meanwhile, and no fake
    step = ready("gpt2")
    real = profile(step, step.model, step.optimizer)
    with FakeTensorMode():
        step = ready("gpt2")
        fake = profile(step, step.model, step.optimizer)
    assert bystander.is_sparse
    assert fake.peak_bytes == real.peak_bytes
    assert fake.by_kind() == real.by_kind()
    assert fake.notes == real.notes == ()


def test_plain_memory_as_torch_s_allocator_counts_it() -> None:
    """Of layers without scratch inside their operators."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), torch.randn(8, 64)

    def step() -> None:
        F.mse_loss(model(x), x).backward()

    step()
    model.zero_grad()
    with torch.autograd.profiler.profile(profile_memory=True, use_kineto=True) as counted:
        step()
    changes = [e.nbytes() for e in counted.kineto_results.events() if e.name() == "[memory]"]
    highest = max(sum(changes[: i + 1]) for i in range(len(changes)))
    model.zero_grad()
    report = observed(model, step)
    assert report.peak_bytes - report.timeline.total(0) == highest
