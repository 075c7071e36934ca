"""A step of a divided model, rehearsed without numbers, holds what it holds when it runs."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import ecornn
from ecornn.bench.models.step import Step, make_step
from ecornn.bench.training.measure import predicted_peak
from ecornn.bench.training.memory import allocated_peak, held_bytes, peak_bytes
from ecornn.echo import cudnn, fakes
from ecornn.echo.counted_storages import Counted
from ecornn.echo.cudnn import BLOCK, SHORT, Asked, Room, at_length, room_of_cudnn
from ecornn.echo.graph import NotUnderstood
from ecornn.echo.lean import cross_entropy, layers

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def compiled_step(name: str, **options: Any) -> Step:
    step = make_step(name, size="tiny", device="cpu", batch=16)
    step.run = ecornn.compile(step.model, **options)
    for _ in range(2):
        step()
    return step


def beside(step: Step) -> int:
    """What both passes take, as they run."""

    def passes() -> None:
        step.loss().backward()

    step.clear()
    found = allocated_peak(passes)
    step.clear()
    return found


@pytest.mark.parametrize(
    ("name", "memory"),
    [("nmt", "auto"), ("nmt", "min"), ("lstm-lm", "auto"), ("speech", "auto")],
)
def test_every_byte_of_a_divided_model_is_foretold(name: str, memory: str) -> None:
    """What oneDNN takes for itself is not seen: it runs convolutions alone here."""
    with torch.backends.mkldnn.flags(enabled=name == "speech"):
        step = compiled_step(name, memory=memory, codegen="eager")
        explained = step.run.explain()  # type: ignore[attr-defined]
        assert not explained.whole
        assert explained.predicted_peak_bytes(held=1000) - 1000 == beside(step)
        assert explained.predicted_peak_bytes() is None
        assert predicted_peak(step) == pytest.approx(peak_bytes(step), rel=0.01)


class Held:
    """A batch of a class that torch does not know."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Looped(nn.Module):
    """Divided: its part is called several times."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Sigmoid())

    def forward(self, given: Any) -> Tensor:
        x: Tensor = given.x if isinstance(given, Held) else given
        for _ in range(5):
            x = self.part(x)
        return x.sum()


def test_nothing_is_kept_alive_by_a_prediction() -> None:
    for asks in (False, True):
        model, x = Looped(), torch.randn(512, 16)
        run = ecornn.compile(model, codegen="eager")
        run(x).backward()
        explained = run.explain()
        assert not explained.whole
        if asks:
            assert explained.predicted_peak_bytes(0) is not None
        gone = weakref.ref(model.part[0].weight)
        del model, run, x
        gc.collect()
        assert gone() is None
        assert explained.predicted_peak_bytes(0) is None
        assert "gone" in str(explained.not_predicted)


def test_gradients_of_biases_share_memory_as_on_a_cpu() -> None:
    """By torch's description they do, the first time that it is asked: the model as it is written
    was foretold less than any way to run it, and a budget of all that it takes was refused."""

    def is_one_memory() -> bool:
        layer = nn.LSTM(6, 8)
        biases = layer.bias_ih_l0, layer.bias_hh_l0
        first, second = torch.autograd.grad(layer(torch.randn(5, 3, 6))[0].sum(), biases)
        return first.untyped_storage()._cdata == second.untyped_storage()._cdata

    FakeTensorMode.cache_clear()
    with Counted("cpu"):
        found = [is_one_memory() for _ in range(3)]
    assert found == [is_one_memory()] * 3


def test_what_a_result_s_gradient_is_expanded_to_is_counted() -> None:
    """`sum` hands back one number for all: the compiled part takes it in memory of its own."""
    model, x = Looped(), torch.randn(512, 16)
    run = ecornn.compile(model, codegen="eager")
    run(x).backward()

    def passes() -> None:
        run(x).backward()

    model.zero_grad(set_to_none=True)
    found = allocated_peak(passes)
    assert run.explain().predicted_peak_bytes(0) == pytest.approx(found, rel=0.01)


def test_a_batch_of_an_unknown_class_is_not_kept() -> None:
    run, batch = ecornn.compile(Looped(), codegen="eager"), Held(torch.randn(8, 16))
    run(batch).backward()
    explained = run.explain()
    assert explained.predicted_peak_bytes(0) is None
    assert "objects" in str(explained.not_predicted)
    gone = weakref.ref(batch.x)
    del batch
    gc.collect()
    assert gone() is None


def test_a_rehearsal_calls_nobody_s_hooks() -> None:
    model, seen = Looped(), []
    model.part[1].register_full_backward_hook(lambda *_: seen.append(0))
    model.part[1].register_full_backward_pre_hook(lambda *_: seen.append(0))
    run = ecornn.compile(model, codegen="eager")
    run(torch.randn(8, 16)).backward()
    before = len(seen)
    run.explain().predicted_peak_bytes(0)
    assert len(seen) == before


def test_an_explanation_can_be_copied_and_pickled() -> None:
    run = ecornn.compile(Looped(), codegen="eager")
    run(torch.randn(8, 16)).backward()
    explained = run.explain()
    for copied in (copy.deepcopy(explained), pickle.loads(pickle.dumps(explained))):
        assert str(copied) == str(explained)
        assert copied.predicted_peak_bytes(0) is None
        assert "copy" in copied.not_predicted


def test_jagged_tensors_are_compiled() -> None:
    """Their lengths are symbols without a number."""
    parts = [torch.randn(n, 4) for n in (3, 5)]
    given = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    run = torch.compile(lambda x: x.sin() * 2, backend="echo", options={"codegen": "eager"})
    run(given).values().sum().backward()
    expected = torch.cat(parts).cos() * 2
    assert torch.allclose(given.grad.values(), expected)  # type: ignore[union-attr]


def test_a_model_on_meta_is_counted_without_running_it() -> None:
    """Autocast does not know the device: that must not be taken for a model that cannot be run."""
    run = ecornn.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to("meta"), codegen="eager")
    run(torch.zeros(8, 4, device="meta")).sum().backward()
    assert len(run.explain().graphs) == 1, "compiled at the first call"


def test_functions_that_are_replaced_are_rehearsed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss, in place of its scores; a layer that is run again."""
    monkeypatch.setattr(cross_entropy, "FEWEST_BYTES", 0)
    found = {}
    with torch.backends.mkldnn.flags(enabled=False):
        for lean in (False, "layers"):
            monkeypatch.setattr(layers, "FEWEST_BYTES", 0)
            step = compiled_step("nmt", codegen="eager", lean=lean)
            explained = step.run.explain()  # type: ignore[attr-defined]
            found[lean] = explained.predicted_peak_bytes(held=0)
            # kernels of the loss take a few hundred bytes for themselves
            assert -1000 < found[lean] - beside(step) <= 0
    assert found["layers"] < 0.9 * found[False]


class Layered(nn.Module):
    """Its first layer, which is run again last, holds most."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Linear(8, 48), nn.Tanh())
        self.layers = nn.ModuleList(nn.GRU(size, 16) for size in (48, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for layer in self.layers:
            x = layer(x)[0]
        return x.square().mean()


@pytest.mark.parametrize("asked_within", [False, True])
def test_what_layers_that_are_run_again_have_cast_is_forgotten(
    asked_within: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the next one, as in a backward pass, which runs outside of autocast; also where somebody
    asks inside of it."""
    monkeypatch.setattr(layers, "FEWEST_BYTES", 0)
    cast = torch.autocast("cpu", torch.bfloat16)
    model, x = Layered(), torch.randn(2, 40, 8)
    run = ecornn.compile(model, codegen="eager", lean="layers")

    def passes() -> None:
        with cast:
            loss = run(x)
        loss.backward()

    with torch.backends.mkldnn.flags(enabled=False):
        found = []
        for _ in range(3):  # at times torch's profiler sees nothing at all
            model.zero_grad()
            found.append(allocated_peak(passes))
        model.zero_grad()
        with cast if asked_within else nullcontext():
            depth = torch.autocast_increment_nesting()
            foretold = run.explain().predicted_peak_bytes(0)
            assert torch.autocast_decrement_nesting() == depth - 1 == asked_within
            assert torch.is_autocast_enabled("cpu") == asked_within
        assert foretold == max(found[1:])


def test_a_rehearsal_draws_nothing_and_leaves_gradients() -> None:
    step = compiled_step("nmt", codegen="eager")
    before = torch.get_rng_state(), [w.grad.clone() for w in step.model.parameters()]
    assert step.run.explain().predicted_peak_bytes(0) is not None  # type: ignore[attr-defined]
    assert torch.equal(torch.get_rng_state(), before[0])
    after = [weight.grad for weight in step.model.parameters()]
    assert all(map(torch.equal, after, before[1]))


def test_inductor_s_code_is_rehearsed() -> None:
    pytest.importorskip("torch._inductor")
    with torch.backends.mkldnn.flags(enabled=False):
        step = compiled_step("nmt", codegen="inductor")
        held = held_bytes(step)
        explained = step.run.explain()  # type: ignore[attr-defined]
        assert explained.predicted_peak_bytes(held) == pytest.approx(held + beside(step), rel=0.05)
    kept = {value.operator for value in explained.graphs[-1].values if value.kept}
    assert any("inductor_seeds" in operator for operator in kept), "all seeds at once"
    assert not any("lookup_seed" in operator for operator in kept), "a kernel for each"


class Moody(nn.Module):
    """Its course depends on its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4 if x.sum() > 0 else 5):
            x = self.part(x)
        return x


def test_what_cannot_be_rehearsed_has_a_reason() -> None:
    compiled = ecornn.compile(Moody(), regions=["part"])
    explained = compiled.explain()
    assert explained.predicted_peak_bytes(0) is None
    assert explained.not_predicted == "not called yet"
    compiled(torch.ones(2, 4)).sum().backward()
    explained = compiled.explain()
    assert explained.predicted_peak_bytes(0) is None
    assert "aten._local_scalar_dense" in str(explained.not_predicted)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(5):
            x = self.part(x)
        return x


def test_a_part_that_was_compiled_for_something_else_is_told() -> None:
    compiled = ecornn.compile(Mixed())
    compiled(torch.ones(2, 4, requires_grad=True)).sum().backward()
    explained = compiled.explain()
    assert explained.predicted_peak_bytes(0) is not None
    (backend,) = compiled._regions._backends.values()
    backend.recorded.clear()
    assert explained.predicted_peak_bytes(0) is None
    assert "was not compiled for what it is called with" in str(explained.not_predicted)


def layer_call(*, gates: int = 4, flat: bool = True, asked: bool = False) -> tuple[Any, ...]:
    """The arguments of cuDNN's operator for an LSTM, or a GRU (three gates), on fake
    tensors: 8 steps, 16 samples, 32 units."""
    rows, hidden = gates * 32, 32
    shapes = [(rows, hidden), (rows, hidden), (rows,), (rows,)]
    sizes = [rows * hidden, rows * hidden, rows, rows]
    given = torch.empty(8, 16, hidden)
    parts = torch.empty(sum(sizes)).split(sizes)
    weights = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    if not flat:
        weights = [weight.clone() for weight in weights]
    weights = [weight.detach().requires_grad_(asked) for weight in weights]
    state = torch.empty(1, 16, hidden)
    mode, cells = (2, state.clone()) if gates == 4 else (3, None)
    options = (mode, hidden, 0, 1, False, 0.0, True, False, [], None)
    return given, weights, 4, None, state, cells, *options


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("gates", [4, 3])
def test_cudnn_s_reserve_and_workspaces_are_counted(
    gates: int, flat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch's own autograd, which keeps the weights' copy where they do not lie together."""
    monkeypatch.setattr(fakes, "room_of_cudnn", lambda *_: Room(10_240, 512_000, 1_024_000))
    mode = Counted("cpu")
    with mode:
        call = layer_call(gates=gates, flat=flat, asked=True)
        weights = sum(weight.nbytes for weight in call[1])
        before = mode.ledger.now
        output, hy, cy, *_ = torch.ops.aten._cudnn_rnn(*call)
        made = output.nbytes + hy.nbytes + cy.nbytes
        assert mode.ledger.now - before == made + 10_240 + (0 if flat else weights)
        assert mode.ledger.most == mode.ledger.now + 512_000
        arriving = torch.empty_like(output)
        before = mode.ledger.now
        output.backward(arriving)
        assert mode.ledger.most == before + made + weights + 1_024_000
        assert [w.grad.shape for w in call[1]] == [w.shape for w in call[1]]


class PretendedCudnn:
    """Takes what cuDNN's operators take in three calls, and refuses what they refuse."""

    def __init__(self) -> None:
        self.asked_for = 0

    def take(self, *shape: int) -> Tensor:
        made = torch.zeros(shape)
        self.asked_for += made.nbytes
        return made

    def _cudnn_rnn_flatten_weight(self, weights: list[Tensor], *_: Any) -> Tensor:
        return self.take(sum(weight.numel() for weight in weights))

    def _cudnn_rnn(self, given: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        hx, cx, batch_first = *rest[3:5], rest[9]
        steps, batch = (given.shape[1 if batch_first else 0], given.shape[0 if batch_first else 1])
        self.take(steps, 1000)  # a workspace
        output = self.take(*given.shape[:2], hx.shape[0] * hx.shape[2])
        cells = self.take(0) if cx is None else self.take(*cx.shape)
        return output, self.take(*hx.shape), cells, self.take(steps, batch, 300), rest[2]

    def _cudnn_rnn_backward(self, given: Tensor, *rest: Any) -> tuple[Any, ...]:
        buffer, hx, cx, wanted = *rest[2:5], rest[20]
        assert cx is not None or not wanted[2], "illegally required grad of cx for non-LSTM RNN"
        of_states = self.take(*hx.shape), None if cx is None else self.take(*cx.shape)
        for _ in range(2):
            self.take(given.shape[0] * given.shape[1], 500)  # workspaces
        return self.take(*given.shape), *of_states, [self.take(*buffer.shape)]


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("gates", [4, 3])
def test_what_cudnn_takes_is_told_from_what_it_makes(
    gates: int, batch_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretended = PretendedCudnn()
    monkeypatch.setattr(cudnn, "aten", pretended)
    monkeypatch.setattr(cudnn, "asked_for", lambda _: pretended.asked_for)
    weights = ((gates * 32, 32), (gates * 32, 32), (gates * 32,), (gates * 32,)) * 2
    states = (2, 16, 32)
    options = (2 if gates == 4 else 3, 32, 0, 1, batch_first, 0.0, True, True)
    cells = states if gates == 4 else None
    asked = Asked(16, 32, weights, 4, states, cells, options, torch.float32, torch.device("cpu"))
    room = cudnn.measured(asked, 6)
    assert room == Room(6 * 16 * 300 * 4, 6 * 1000 * 4, 6 * 16 * 500 * 4)


def test_what_cudnn_takes_at_a_length_follows_from_two(monkeypatch: pytest.MonkeyPatch) -> None:
    short = Room(1_000 * BLOCK, 50 * BLOCK, 0)
    longer = Room((1_000 + 4 * 300) * BLOCK, (50 + 4 * 10) * BLOCK, 400)
    whole = Room(longer.reserve, longer.forward, BLOCK)
    assert at_length(short, longer, SHORT[1]) == whole
    far = Room((1_000 + 48 * 300) * BLOCK, (50 + 48 * 10) * BLOCK, 10 * BLOCK)
    assert at_length(short, longer, 50) == far
    monkeypatch.setattr(cudnn, "_KNOWN", {})
    with Counted("cpu"):
        call = layer_call()
        if not torch.cuda.is_available():
            with pytest.raises(NotUnderstood, match="none is here"):
                room_of_cudnn(*call)
        drawing = (*call[:11], 0.5, *call[12:])
        with pytest.raises(NotUnderstood, match="dropout"):
            room_of_cudnn(*drawing)
        packed = (*call[:14], [4, 4, 2], None)
        with pytest.raises(NotUnderstood, match="packed"):
            room_of_cudnn(*packed)
