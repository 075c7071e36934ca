"""Recurrent layers of torch.nn on kernels of this package. There are none for a CPU: torch's own
stand for them here, on which layers of ours run there, and code generation is left as it is."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ecornn
from ecornn.bench.models.step import make_step
from ecornn.bench.training.memory import allocated_peak
from ecornn.echo import own_kernels, regions
from ecornn.echo.lean import layers, worth
from ecornn.echo.plan import budget
from ecornn.errors import InvalidInput
from ecornn.nn import base

pytestmark = pytest.mark.usefixtures("fresh_compiler")

WIDTH, HIDDEN, STEPS, BATCH = 6, 8, 5, 3


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def any_of_torch(model: nn.Module) -> bool:
        return any(map(own_kernels.can_become_ours, model.modules()))

    monkeypatch.setattr(own_kernels, "KERNELS", "aten")
    monkeypatch.setattr(regions, "has_layers_of_torch", any_of_torch)
    monkeypatch.setattr(regions, "choose_codegen", lambda *_: ("inductor", "as on a GPU"))
    monkeypatch.setattr(regions, "start_compilers", lambda *_: None)


class Two(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.LSTM(WIDTH, HIDDEN, **options)
        self.second = nn.GRU(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)[0]))[0].square().mean()


def given() -> Tensor:
    return torch.randn(STEPS, BATCH, WIDTH, generator=torch.Generator().manual_seed(1))


def step(run: Callable[..., Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = run(x)
    loss.backward()
    return [loss.detach(), *(w.grad.clone() for w in model.parameters() if w.grad is not None)]


def kinds(model: nn.Module) -> list[type]:
    return [type(part) for part in model.children()]


def test_layers_of_torch_run_on_own_kernels_in_one_graph(on_a_gpu: None) -> None:
    model, x = Two(), given()
    expected = step(model, model, x)
    weights = list(model.parameters())
    run = ecornn.compile(model)
    for _ in range(2):
        torch.testing.assert_close(step(run, model, x), expected)
    assert kinds(model) == [ecornn.LSTM, ecornn.GRU]
    assert all(a is b for a, b in zip(model.parameters(), weights, strict=True))
    found = run.explain()
    assert len(found.graphs) == 1
    assert "torch.nn that run on kernels of ecornn: first, second" in str(found)


def test_a_model_may_be_a_layer_itself(on_a_gpu: None) -> None:
    model, x = nn.LSTM(WIDTH, HIDDEN, 2, batch_first=True, bidirectional=True), given()
    expected = model(x)
    run = ecornn.compile(model)
    torch.testing.assert_close(run(x), expected)
    assert type(model) is ecornn.LSTM
    assert "run on kernels of ecornn: (the model)" in str(run.explain())


def test_the_first_call_is_made_with_them_already(on_a_gpu: None) -> None:
    """A checkpoint in the model runs them again after the call."""

    class Checkpointed(Two):
        def forward(self, x: Tensor) -> Tensor:
            hidden = checkpoint(self.first, x, use_reentrant=False)[0]
            return self.second(torch.tanh(hidden))[0].square().mean()

    model, x = Checkpointed(), given()
    expected = step(model, model, x)
    run = ecornn.compile(model)
    for _ in range(2):
        torch.testing.assert_close(step(run, model, x), expected)
    assert kinds(model) == [ecornn.LSTM, ecornn.GRU]


def test_they_stay_torch_s_where_that_is_asked_for(on_a_gpu: None) -> None:
    model, x = Two(), given()
    run = ecornn.compile(model, recurrent="torch")
    step(run, model, x)
    assert kinds(model) == [nn.LSTM, nn.GRU]
    assert "kernels of ecornn" not in str(run.explain())
    with pytest.raises(InvalidInput, match="recurrent: got 'cudnn'"):
        ecornn.compile(model, recurrent="cudnn")


def test_they_stay_torch_s_where_torch_s_are_to_be_run_again(on_a_gpu: None) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.LSTM(64, 256)), torch.randn(64, 64, 64)
    expected = model(x)[0]
    run = ecornn.compile(model, lean="layers")
    torch.testing.assert_close(run(x)[0], expected)
    assert kinds(model) == [nn.LSTM]
    assert "of 1 calls of recurrent layers in a forward pass 1 are run again" in str(run.explain())


@pytest.mark.parametrize("options", [{}, {"codegen": "eager"}])
def test_they_stay_torch_s_without_a_gpu(options: Any) -> None:
    model, x = Two(), given()
    expected = step(model, model, x)
    run = ecornn.compile(model, **options)
    for found, wanted in zip(step(run, model, x), expected, strict=True):
        assert torch.equal(found, wanted)
    assert kinds(model) == [nn.LSTM, nn.GRU]


@pytest.fixture
def no_gru(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(layer: nn.Module, *_: Any) -> str | None:
        return "it has no kernel for it" if isinstance(layer, nn.GRU) else None

    monkeypatch.setattr(own_kernels, "refusal", refusal)


def test_what_our_kernels_refuse_stays_torch_s_and_is_told(on_a_gpu: None, no_gru: None) -> None:
    model, x = Two(), given()
    expected = step(model, model, x)
    run = ecornn.compile(model)
    torch.testing.assert_close(step(run, model, x), expected)
    assert kinds(model) == [ecornn.LSTM, nn.GRU]
    told = str(run.explain())
    assert "run on kernels of ecornn: first" in told
    assert "second is left to torch: it has no kernel for it" in told


def test_with_a_budget_none_becomes_ours_unless_all_do(on_a_gpu: None, no_gru: None) -> None:
    """Those that stay torch's divide the model."""
    model, x = Two(), given()
    run = ecornn.compile(model, memory="1GiB")
    step(run, model, x)
    assert kinds(model) == [nn.LSTM, nn.GRU]
    assert "are left to torch: with a budget of a divided model" in str(run.explain())


def test_why_a_run_without_numbers_failed_is_told(
    on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> str | None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(own_kernels, "refusal", broken)
    model, x = Two(), given()
    run = ecornn.compile(model)
    step(run, model, x)
    assert kinds(model) == [nn.LSTM, nn.GRU]
    told = " ".join(str(run.explain()).split())
    assert "with ours in their place, failed: no such thing" in told


def test_none_becomes_ours_where_all_are_refused(
    on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_kernels, "KERNELS", "persistent")
    model, x = Two(), given()
    run = ecornn.compile(model)
    step(run, model, x)
    assert kinds(model) == [nn.LSTM, nn.GRU]
    assert "first is left to torch: " in str(run.explain())


class Decoder(nn.Module):
    """A part of it is called often, and compiled by itself."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.LSTM(WIDTH, HIDDEN, **options)
        self.step = nn.Sequential(nn.Linear(HIDDEN, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        state = self.encoder(x)[0][-1]
        for _ in range(6):
            state = torch.tanh(self.step(state))
        return state.sum()


@pytest.fixture
def small_results_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "FEWEST_BYTES", 0)


@pytest.mark.parametrize(("share", "again"), [(1.0, True), (0.0, False)])
def test_around_a_loop_they_are_run_again_where_that_is_nearly_free(
    on_a_gpu: None,
    small_results_count: None,
    monkeypatch: pytest.MonkeyPatch,
    share: float,
    again: bool,
) -> None:
    monkeypatch.setattr(worth, "NEARLY_FREE", share)
    # which runs by the operator, as our kernels do
    monkeypatch.setattr(own_kernels, "KERNELS", "reference")
    monkeypatch.setitem(base.DEFAULTS, "backend", "reference")
    model, x = Decoder(), given()
    expected = step(model, model, x)
    run = ecornn.compile(model)
    calls: list[int] = []
    forward = ecornn.LSTM.forward
    with monkeypatch.context() as patched:
        patched.setattr(ecornn.LSTM, "forward", lambda *a, **k: calls.append(0) or forward(*a, **k))
        torch.testing.assert_close(step(run, model, x), expected)
        calls.clear()
        torch.testing.assert_close(step(run, model, x), expected)
    assert len(calls) == 1 + again
    told = str(run.explain())
    assert "step, 6 times" in told
    assert ("encoder is run again in the backward pass" in told) == again
    assert type(model.encoder) is ecornn.LSTM
    assert "forward" not in model.encoder.__dict__


@pytest.mark.parametrize(
    ("kernels", "memory", "share"), [("reference", "auto", 1.0), ("aten", "min", 0.0)]
)
def test_every_byte_of_a_step_that_runs_them_again_is_foretold(
    on_a_gpu: None,
    small_results_count: None,
    monkeypatch: pytest.MonkeyPatch,
    kernels: str,
    memory: str,
    share: float,
) -> None:
    monkeypatch.setattr(worth, "NEARLY_FREE", share)
    # the decoder keeps all, so that the peak is there: what the reference takes is not known
    monkeypatch.setattr(budget, "NEARLY_FREE", 0.0)
    monkeypatch.setattr(budget, "WELL_SPENT", 0.0)
    monkeypatch.setattr(own_kernels, "KERNELS", kernels)
    monkeypatch.setitem(base.DEFAULTS, "backend", {"aten": "auto"}.get(kernels, kernels))
    with torch.backends.mkldnn.flags(enabled=False):  # what oneDNN takes for itself is not seen
        translator = make_step("nmt", size="tiny", device="cpu", batch=16)
        translator.run = run = ecornn.compile(translator.model, memory=memory)
        for _ in range(2):
            translator()
        translator.clear()
        taken = allocated_peak(lambda: translator.loss().backward())
        assert run.explain().predicted_peak_bytes(held=0) == taken
    assert str(run.explain()).count("is run again in the backward pass") == 2


def test_around_a_loop_all_are_run_again_for_the_least_memory(on_a_gpu: None) -> None:
    model, x = Decoder(), given()
    expected = step(model, model, x)
    run = ecornn.compile(model, memory="min")
    for _ in range(2):
        torch.testing.assert_close(step(run, model, x), expected)
    assert "encoder is run again in the backward pass" in str(run.explain())
    loss = run(x)
    with torch.no_grad():
        model.encoder.weight_hh_l0.mul_(2)
    with pytest.raises(InvalidInput, match="changed in place since it ran"):
        loss.backward()


def test_what_was_made_in_inference_mode_is_not_run_again(on_a_gpu: None) -> None:
    """Nobody would see that it was changed; torch refuses to keep it for a gradient."""
    model = Decoder()
    run = ecornn.compile(model, memory="min")
    step(run, model, given())
    with torch.inference_mode():
        x = given()
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        run(x)


def test_what_draws_is_not_run_again(on_a_gpu: None) -> None:
    model, x = Decoder(num_layers=2, dropout=0.5), given()
    run = ecornn.compile(model, memory="min")
    step(run, model, x)
    assert type(model.encoder) is ecornn.LSTM
    assert "is run again" not in str(run.explain())
    model.eval()
    expected = step(model, model, x)
    torch.testing.assert_close(step(run, model, x), expected)


@pytest.mark.parametrize("memory", ["1GiB", 1.0])
def test_with_a_budget_of_a_divided_model_they_stay_torch_s(on_a_gpu: None, memory: Any) -> None:
    """They are run again there, as few as are enough."""
    model, x = Decoder(), given()
    run = ecornn.compile(model, memory=memory)
    step(run, model, x)
    assert type(model.encoder) is nn.LSTM


def test_a_layer_that_is_called_often_stays_torch_s(on_a_gpu: None) -> None:
    """Ours, it would be the one part of the model that is compiled."""

    class Documents(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sentence, self.document = nn.LSTM(WIDTH, HIDDEN), nn.GRU(HIDDEN, HIDDEN)
            self.output = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            sentences = torch.stack([self.sentence(x * k)[0][-1] for k in range(5)])
            return self.output(self.document(sentences)[0]).square().mean()

    model, x = Documents(), given()
    expected = step(model, model, x)
    run = ecornn.compile(model)
    for _ in range(2):
        torch.testing.assert_close(step(run, model, x), expected)
    assert kinds(model)[:2] == [nn.LSTM, ecornn.GRU]
    told = str(run.explain())
    assert "each compiled once: output, 1 times" in told
    assert "sentence is left to torch: it is called 5 times in one forward pass" in told


def test_copies_and_pickles_keep_the_choice(on_a_gpu: None) -> None:
    model, x = Two(), given()
    for again in (copy.deepcopy, lambda run: pickle.loads(pickle.dumps(run))):
        copied = again(ecornn.compile(model, recurrent="torch"))
        copied(x)
        assert kinds(copied._orig_mod) == [nn.LSTM, nn.GRU]


def test_subclasses_with_a_forward_pass_of_their_own_are_left_alone(on_a_gpu: None) -> None:
    class Own(nn.LSTM):
        def forward(self, *args: Any) -> Any:
            output, state = super().forward(*args)
            return 2 * output, state

    model, x = Two(), given()
    model.first = Own(WIDTH, HIDDEN)
    expected = step(model, model, x)
    run = ecornn.compile(model)
    torch.testing.assert_close(step(run, model, x), expected)
    assert kinds(model) == [Own, ecornn.GRU]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("made_within", [False, True], ids=["input from outside", "from within"])
def test_a_first_call_without_gradients_is_counted_without_numbers(
    on_a_gpu: None, mode: Callable[[], Any], made_within: bool
) -> None:
    """As trainers make one to see whether validation works."""
    model, x = Two(), given()
    expected = step(model, model, x)
    run = ecornn.compile(model)
    with mode():
        torch.testing.assert_close(run(given() if made_within else x), expected[0])
    assert "the first call ran without Echo" not in str(run.explain())
    torch.testing.assert_close(step(run, model, x), expected)
    assert kinds(model) == [ecornn.LSTM, ecornn.GRU]


def test_one_of_several_threads_counts_and_the_others_wait(
    on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def noted(*args: Any) -> Any:
        runs.append(args)
        return count(*args)

    count, runs, found = regions.counted_without_numbers, [], []
    monkeypatch.setattr(regions, "counted_without_numbers", noted)
    model, x = Two(), given()
    expected = model(x).detach()
    run, together = ecornn.compile(model), threading.Barrier(4)

    def first_call() -> None:
        together.wait()
        found.append(run(x).detach())

    threads = [threading.Thread(target=first_call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close(found, [expected] * 4)
    assert len(runs) == 1
    assert "run on kernels of ecornn: first, second" in str(run.explain())
