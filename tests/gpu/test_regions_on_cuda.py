"""A decoder that is called once a word, compiled by inductor: its weights' gradients over several
steps, also when its kernels are launched directly, from a graph and on another stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ecornn
from ecornn.echo.weight_sums import CALLS_AT_ONCE, WeightSums

WORDS = 2 * CALLS_AT_ONCE + 3
WIDTH, ROWS = 256, 16


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.score = nn.Linear(WIDTH, 1, bias=False)
        self.mix = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor], keys: Tensor) -> tuple[Tensor, ...]:
        h, c = self.cell(x, state)
        weights = self.score(torch.tanh(self.norm(keys + h[:, None]))).squeeze(-1).softmax(-1)
        context = torch.bmm(weights[:, None], keys)[:, 0]
        return torch.tanh(self.mix(torch.cat([h, context], -1))), h, c


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = Step()

    def forward(self, words: Tensor, keys: Tensor) -> Tensor:
        x = h = c = torch.zeros_like(words[0])
        total = words.new_zeros(())
        for word in words:
            x, h, c = self.step(x + word, (h, c), keys)
            total = total + x.square().mean()
        return total


@pytest.fixture(autouse=True)
def _ieee() -> Iterator[None]:
    torch._dynamo.reset()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def made() -> tuple[Decoder, Tensor, Tensor]:
    torch.manual_seed(3)
    with torch.device("cuda"):
        model = Decoder()
        return model, torch.randn(WORDS, ROWS, WIDTH), torch.randn(ROWS, 20, WIDTH)


def expected(model: Decoder, words: Tensor, keys: Tensor) -> list[Tensor]:
    exact = Decoder().cuda().double()
    exact.load_state_dict(model.state_dict())
    keys = keys.double().requires_grad_()
    exact(words.double(), keys).backward()
    assert keys.grad is not None
    return [keys.grad, *(weight.grad for weight in exact.parameters() if weight.grad is not None)]


def gradients(model: nn.Module, run: nn.Module, words: Tensor, keys: Tensor) -> list[Tensor]:
    keys = keys.clone().requires_grad_()
    run(words, keys).backward()
    assert keys.grad is not None
    return [keys.grad, *(weight.grad for weight in model.parameters() if weight.grad is not None)]


def assert_near(found: list[Tensor], exact: list[Tensor]) -> None:
    assert len(found) == len(exact)
    for one, other in zip(found, exact, strict=True):
        assert float((one - other).norm()) <= 1e-5 * float(other.norm())


def test_steps_are_eager_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough of them that sums are made, and kernels launched directly."""
    begun: list[Any] = []
    begin = WeightSums._begun
    monkeypatch.setattr(WeightSums, "_begun", lambda s, *t: (begun.append(t), begin(s, *t))[1])
    model, words, keys = made()
    run = ecornn.compile(model)
    exact = expected(model, words, keys)
    for i in range(5):
        model.zero_grad(set_to_none=True)
        assert_near(gradients(model, run, words, keys), exact)
        assert bool(begun) is (i > 0), "from the second step on"
    told = str(run.explain())
    assert "weights are added up over its calls" in told
    assert "by one product" in told
    # the gradients of several steps, added
    assert_near(gradients(model, run, words, keys)[1:], [2 * g for g in exact[1:]])


def test_other_words_and_fewer_of_them() -> None:
    model, words, keys = made()
    run = ecornn.compile(model)
    for count in (WORDS, WORDS, CALLS_AT_ONCE, 1, WORDS):
        model.zero_grad(set_to_none=True)
        some = torch.randn_like(words[:count])
        assert_near(gradients(model, run, some, keys), expected(model, some, keys))


def test_a_step_from_a_graph_and_on_another_stream() -> None:
    model, words, keys = made()
    run = ecornn.compile(model)
    for _ in range(3):
        gradients(model, run, words, keys)
        run(words, keys).backward()  # as it is captured: keys without a gradient
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model.zero_grad(set_to_none=True)
        assert_near(gradients(model, run, words, keys), expected(model, words, keys))
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(words, keys).backward()
    words.copy_(torch.randn_like(words))
    graph.replay()
    found = [weight.grad for weight in model.parameters() if weight.grad is not None]
    assert_near(found, expected(model, words, keys)[1:])


def test_a_profiler_sees_the_kernels_by_name() -> None:
    model, words, keys = made()
    run = ecornn.compile(model)
    for _ in range(4):
        gradients(model, run, words, keys)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiled:
        gradients(model, run, words, keys)
        torch.cuda.synchronize()
    names = [event.key for event in profiled.key_averages() if event.self_cpu_time_total > 0]
    assert any(name.startswith("triton_") for name in names)
