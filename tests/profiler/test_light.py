"""A step observed by the allocator's history, emulated on the CPU, beside the same one observed
operator by operator."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ecornn.bench.models.step import Step, make_step
from ecornn.bench.profiling.alive import Alive, held_by
from ecornn.profiler import MemoryReport, assemble, light, profile
from ecornn.profiler.light import LightCollector, operator_of
from ecornn.profiler.model import TENSORS
from support.functions import Doubled
from support.hooks import is_untouched
from support.recorded_steps import DRIVER, UNSPLIT, Emulated, recorded

MODELS = ("nmt", "speech", "gpt2", "resnet50")


@pytest.fixture
def from_history(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LightCollector]]:
    gc.collect()
    with recorded(monkeypatch, keep=True) as made:
        yield made


def ready(name: str) -> Step:
    step = make_step(name, size="tiny", device="cpu")
    step()
    return step


def adds_up(report: MemoryReport) -> None:
    assert report.peak_bytes == report.timeline.total(report.peak_time)
    assert report.peak_bytes == max(map(report.timeline.total, range(len(report.timeline))))
    tensors = sum(row.bytes for row in report.rows if row.kind in TENSORS)
    assert tensors == sum(held.bytes for held in report.at_peak)
    kinds = report.by_kind()
    padding = sum(held.allocated_bytes - held.bytes for held in report.at_peak)
    assert kinds["rounding"] == padding + UNSPLIT
    assert kinds["driver"] == DRIVER
    assert report.notes == ()


@pytest.mark.parametrize("name", MODELS)
def test_it_tells_what_is_told_by_every_operator(name: str, monkeypatch: Any) -> None:
    step = ready(name)
    gc.collect()  # what other tests have left must not go in the midst of it
    with Alive(held_by(step)) as alone:
        step()
    with recorded(monkeypatch):
        light_report = profile(step, step.model, step.optimizer)
        with profile(model=step.model, optimizer=step.optimizer), Alive(held_by(step)) as beside:
            step()
    assert beside.bytes_at == alone.bytes_at, "hooks on nodes change no lifetime"
    monkeypatch.setattr(assemble, "_in_blocks", lambda device: True)
    by_operator = profile(step, step.model, step.optimizer)
    adds_up(light_report)
    others = sum(rounded for kind, rounded in _others(light_report))
    ours, theirs = (_rows(report) for report in (light_report, by_operator))
    assert ours == theirs
    assert light_report.peak_bytes - UNSPLIT - others == by_operator.peak_bytes
    kept, kept_there = (_kept(report) for report in (light_report, by_operator))
    assert kept == kept_there
    assert sum(kept.values()) > 10


def _others(report: MemoryReport) -> list[tuple[str, int]]:
    """Of other tests, which are alive beside it."""
    return [(one.kind, one.allocated_bytes) for one in report.at_peak if one.kind == "other"]


def _rows(report: MemoryReport) -> dict[tuple[str, str], int]:
    rows = [row for row in report.rows if row.kind in TENSORS and row.kind != "other"]
    return {(row.module, row.kind): row.bytes for row in rows}


def _kept(report: MemoryReport) -> Counter[Any]:
    kept = [one for one in report.held if one.kind == "feature maps"]
    return Counter((one.bytes, one.module, one.line) for one in kept)


class Odd(nn.Module):
    """Called twice, in place, without gradients, by a function of its own, in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
        self.again = nn.Sequential(nn.Linear(32, 64), nn.Sigmoid(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        x = (self.inner(self.inner(x)) + 1).mul_(2)
        with torch.no_grad():
            scale = (x * x).mean()
        x = Doubled.apply(x)
        x = checkpoint(self.again, x, use_reentrant=True)
        return (x / scale).sum()


def test_odd_steps(from_history: list[LightCollector]) -> None:
    model, x = Odd(), torch.randn(64, 32)
    optimizers = [
        torch.optim.SGD(model.inner.parameters(), 0.1, momentum=0.9),
        torch.optim.Adam(model.again.parameters()),
    ]

    def step() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(x).backward()
        for optimizer in optimizers:
            optimizer.step()

    step()
    report = profile(step, model, optimizers[:1])  # the other is found when it steps
    assert report.peak_bytes == report.timeline.total(report.peak_time)
    assert report.unit == "allocation"
    kept = {by for held in report.held for by in held.kept_by}
    assert {"inner.1: tanh", "Doubled", "again.1: sigmoid"} <= kept
    state = {held.module for held in report.held if held.kind == "optimizer state"}
    assert state == {"inner.0", "again.0", "again.2"}
    made_again = [
        (phase, module)
        for phase, module in zip(report.timeline.phase, report.timeline.module, strict=True)
        if module.startswith("again")
    ]
    assert ("forward", "again.0") in made_again
    assert ("backward", "again.0") in made_again, "with the gradient of the checkpoint"
    assert {"before", "forward", "backward", "optimizer"} == set(report.timeline.phase)
    assert "TanhBackward0" in report.timeline.operator
    gradients = [held for held in report.held if held.kind == "gradients" and held.born]
    assert len(gradients) == len(list(model.parameters()))
    assert is_untouched(model)


def test_memory_of_others_keeps_nothing_that_lay_there_before(
    from_history: list[LightCollector],
) -> None:
    """As of the generator's state, which a checkpoint keeps: no operator makes it, and it may come
    to lie where a map was that is gone."""
    place = bytearray(512)

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.state = torch.frombuffer(place, dtype=torch.uint8)  # by no operator
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Tanh(), nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            torch.frombuffer(place, dtype=torch.uint8).detach()  # a map that ends at once
            return self.second(Keeps.apply(self.first(x))).sum()

    model, x = Model(), torch.randn(4, requires_grad=True)
    report = profile(lambda: model(x).backward(), model)
    (gone,) = [held for held in report.held if held.born and held.bytes == len(place)]
    assert gone.freed is not None
    assert gone.kept_by == ()
    assert gone.kind == "workspace"
    assert "second: tanh" in {by for held in report.held for by in held.kept_by}


def test_values_stay_as_they_are(from_history: list[LightCollector]) -> None:
    def trained(observe: bool) -> tuple[list[Tensor], Tensor]:
        step = ready("transformer")
        torch.manual_seed(3)
        if observe:
            profile(step, step.model, step.optimizer)
        else:
            step()
        return [p.grad for p in step.model.parameters() if p.grad is not None], torch.rand(3)

    (plain, drawn), (observed, drawn_after) = trained(False), trained(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, observed, strict=True))
    assert torch.equal(drawn, drawn_after)


@pytest.mark.parametrize("how", ["raises", "raises backwards", "no backward pass"])
def test_a_broken_step_is_told_so_far(how: str, from_history: list[LightCollector]) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8)
    losses = []

    def broken(*_: Any) -> None:
        raise KeyError("inside")

    def step() -> None:
        y = model(x).exp()
        losses.extend((y.sum(), y))
        if how == "raises":
            broken()
        losses[0].grad_fn.register_prehook(broken)
        if how == "raises backwards":
            losses[0].backward()

    observed = profile(model=model)
    if how == "no backward pass":
        with observed:
            step()
    else:
        with pytest.raises(KeyError, match="inside"), observed:
            step()
    report = observed.report
    assert (report.error is None) == (how == "no backward pass")
    kept = [held for held in report.held if held.kind == "feature maps"]
    assert ("1", ("1: tanh",)) in [(held.module, held.kept_by) for held in kept]
    assert is_untouched(model)
    (collector,) = from_history
    assert isinstance(collector._recorder, Emulated)
    assert (collector._recorder.recording, collector._recorder.said) == (False, [""])
    said = len(collector._marks.said)
    model(x).sum().backward()
    losses[1].backward(torch.ones_like(losses[1]))  # through nodes that had hooks
    assert len(collector._marks.said) == said, "nobody speaks afterwards"
    assert collector._recorder.said == [""]


def test_what_a_hook_of_the_program_takes_is_told_under_its_node(
    from_history: list[LightCollector],
) -> None:
    """And what it makes of a gradient is what the node is given."""
    model, x = nn.Tanh(), torch.zeros(4, 8, requires_grad=True)
    made: list[Tensor] = []

    def hook(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        made.append(torch.ones(1000))
        return (gradients[0] * 3,)

    def step() -> None:
        y = model(x).exp()
        y.grad_fn.register_prehook(hook)
        y.sum().backward()

    report = profile(step, model)
    (held,) = (one for one in report.held if one.bytes == 4000)
    assert (held.operator, report.timeline.phase[held.born]) == ("ExpBackward0", "backward")
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((4, 8), 3.0))


def test_gradients_are_looked_at_once_after_the_outermost_pass(
    from_history: list[LightCollector], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, gradients = [], light.Roles.gradients

    def look(roles: light.Roles) -> None:
        looks.append(1)
        gradients(roles)

    monkeypatch.setattr(light.Roles, "gradients", look)
    model, x = nn.Sequential(*[nn.Linear(8, 8) for _ in range(5)]), torch.randn(4, 8)

    def step() -> None:
        y = x.requires_grad_()
        for layer in model:
            y = checkpoint(layer, y, use_reentrant=True)
        y.sum().backward()

    report = profile(step, model)
    assert len(looks) == 1, "not after the pass inside each checkpoint"
    told = [one.module for one in report.held if one.kind == "gradients" and one.module]
    assert sorted(told) == sorted(2 * [str(place) for place in range(5)])


def test_threads_of_other_devices_fall_silent_too(
    from_history: list[LightCollector], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, however often it is closed."""
    hushed = []
    monkeypatch.setattr(light.history, "hush", lambda _, device: hushed.append(device))
    model, other = nn.Linear(4, 4), torch.device("cuda", 1)
    with profile(model=model):
        (collector,) = from_history
        collector.sightings.elsewhere |= {other, torch.device("meta")}
        model(torch.randn(2, 4)).sum().backward()
    collector.close()
    assert hushed == [other]


def test_generators_run_in_the_module_that_made_them(from_history: list[LightCollector]) -> None:
    class Pieces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Iterator[Tensor]:
            for _ in range(3):
                x = self.layer(x).tanh()
                yield x

    model = nn.ModuleDict({"pieces": Pieces()})
    x = torch.randn(4, 16)

    def step() -> Iterator[None]:
        for piece in model["pieces"](x):
            piece.sum().backward(retain_graph=True)
            yield

    report = profile(step, model)
    kept = [(held.module, held.operator) for held in report.held if held.kind == "feature maps"]
    assert kept == [("pieces", "test_light.forward")] * 3


def test_it_is_taken_where_there_is_a_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """And where there is none, the report says why."""
    from ecornn.profiler import session

    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    monkeypatch.setattr(session, "device_of", lambda _: torch.device("cuda"))
    monkeypatch.setattr(light.history, "missing", lambda: None)
    monkeypatch.setattr(session, "Recorder", lambda _: Emulated())
    collector = profile(model=model)._make_collector()
    collector.close()
    assert isinstance(collector, LightCollector)
    monkeypatch.setattr(light.history, "missing", lambda: "it is being read by somebody else")
    monkeypatch.setattr(session.Collector, "made_for", lambda *_: _on_cpu(model))
    with profile(model=model) as observed:
        model(x).sum().backward()
    (note,) = observed.report.notes
    assert note.endswith("it is being read by somebody else")
    with profile(model=model, operators=True) as observed:
        model(x).sum().backward()
    assert observed.report.notes == ()


def _on_cpu(model: nn.Module) -> Any:
    from ecornn.profiler.collect import Collector

    return Collector(model, (), torch.device("cpu"))


def test_operators_by_their_nodes() -> None:
    names = ("AddmmBackward0", "NativeLayerNormBackward0", "ReluBackward0", "Expand1Backward3")
    assert [operator_of(name) for name in names] == [
        "addmm",
        "native_layer_norm",
        "relu",
        "expand1",
    ]
