"""Models with recurrent layers of torch.nn, compiled: the layers run on kernels of this package."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ecornn
from ecornn.bench.calls import capture
from ecornn.echo import gpu_room, scarce

WIDTH, STEPS, BATCH, CLASSES = 256, 64, 24, 12
#: So many that their scores are four chunks of the operator that makes some rows of them at once,
#: and 2.4 times what it takes; of three chunks they would not be twice as much.
MANY = 110_001
#: So many that running a layer again is nearly free beside them.
LOOP = 200


class Tagger(nn.Module):
    """Compiled as a whole."""

    def __init__(self, classes: int = CLASSES, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, WIDTH)
        self.lower = nn.LSTM(WIDTH, WIDTH, 2, bidirectional=True, dropout=dropout)
        self.upper = nn.GRU(2 * WIDTH, WIDTH)
        self.output = nn.Linear(WIDTH, classes)

    def forward(self, words_TB: Tensor, tags_TB: Tensor) -> Tensor:
        hidden = self.upper(torch.relu(self.lower(self.embedding(words_TB))[0]))[0]
        return F.cross_entropy(self.output(hidden).flatten(0, 1), tags_TB.flatten())


@pytest.fixture(autouse=True)
def _ieee() -> Iterator[None]:
    torch._dynamo.reset()
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


def made(classes: int = CLASSES, dropout: float = 0.0) -> tuple[Tagger, Tensor, Tensor]:
    torch.manual_seed(5)
    with torch.device("cuda"):
        words, tags = (torch.randint(n, (STEPS, BATCH)) for n in (100, classes))
        return Tagger(classes, dropout), words, tags


def step(run: nn.Module, model: nn.Module, *given: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = run(*given)
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in model.parameters())]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("memory", "classes"),
    [("auto", CLASSES), ("min", CLASSES), (0.8, CLASSES), ("auto", MANY), ("min", MANY)],
)
def test_gradients_are_those_of_float64(memory: str | float, classes: int) -> None:
    model, words, tags = made(classes)
    exact = copy.deepcopy(model).double()
    expected = step(exact, exact, words, tags)
    run = ecornn.compile(model, memory=memory)
    for _ in range(2):
        found = step(run, model, words, tags)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.double() - theirs).norm() <= 1e-4 * theirs.norm()
    told = str(run.explain())
    assert "run on kernels of ecornn: lower, upper" in told
    assert "the whole model is compiled" in told
    assert ("are one operator" in told) == (classes != CLASSES)


def test_the_newer_settings_of_tf32_are_read_as_the_older_ones() -> None:
    """Once they are used, some of torch's older questions raise."""
    model, words, tags = made()
    matmul, rnn = torch.backends.cuda.matmul, torch.backends.cudnn.rnn
    before = matmul.fp32_precision, rnn.fp32_precision
    try:
        matmul.fp32_precision = rnn.fp32_precision = "tf32"
        expected = step(model, model, words, tags)
        run = ecornn.compile(model)
        found = step(run, model, words, tags)
    finally:
        matmul.fp32_precision, rnn.fp32_precision = before
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine - theirs).norm() <= 1e-2 * theirs.norm()
    told = str(run.explain())
    assert "run on kernels of ecornn: lower, upper" in told
    assert "the whole model is compiled" in told


@pytest.mark.parametrize("classes", [CLASSES, MANY])
def test_the_peak_of_such_a_model_is_foretold(classes: int) -> None:
    model, words, tags = made(classes)
    run = ecornn.compile(model)
    for _ in range(2):
        step(run, model, words, tags)
    model.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    run(words, tags).backward()
    torch.cuda.synchronize()
    predicted = run.explain().predicted_peak_bytes(held)
    assert predicted == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.05)


def test_a_stack_with_dropout_is_counted_without_numbers_and_trained() -> None:
    model, words, tags = made(dropout=0.3)
    run = ecornn.compile(model)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    losses = []
    for _ in range(20):
        losses.append(float(step(run, model, words, tags)[0]))
        optimizer.step()
    told = str(run.explain())
    assert losses[-1] < losses[0]
    assert "run on kernels of ecornn: lower, upper" in told
    assert "the first call ran without Echo" not in told


class Translator(nn.Module):
    """Its decoder's step is compiled by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.LSTM(WIDTH, WIDTH)
        self.step = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x_TBH: Tensor, start_BH: Tensor) -> Tensor:
        output, (state, _) = self.encoder(x_TBH)
        state = state[0] + start_BH
        for _ in range(LOOP):
            state = torch.tanh(self.step(state) + output.mean(0))
        return state.square().mean()


@pytest.mark.parametrize("memory", ["auto", "min"])
def test_around_a_loop_layers_are_run_again(memory: str) -> None:
    torch.manual_seed(6)
    with torch.device("cuda"):
        model = Translator()
        given = torch.randn(STEPS, 3 * BATCH, WIDTH), torch.randn(3 * BATCH, WIDTH)
    exact = copy.deepcopy(model).double()
    expected = step(exact, exact, *(x.double() for x in given))
    run = ecornn.compile(model, memory=memory)
    for _ in range(3):
        found = step(run, model, *given)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.double() - theirs).norm() <= 1e-4 * theirs.norm()
    told = str(run.explain())
    assert "run on kernels of ecornn: encoder" in told
    assert f"step, {LOOP} times" in told
    assert "encoder is run again in the backward pass" in told
    model.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    run(*given).backward()
    torch.cuda.synchronize()
    predicted = run.explain().predicted_peak_bytes(held)
    assert predicted == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.05)
    graph, _ = capture(lambda: step(run, model, *given))
    for weight in model.parameters():
        assert weight.grad is not None
        weight.grad.fill_(float("nan"))
    graph.replay()
    for weight, theirs in zip(model.parameters(), expected[1:], strict=True):
        assert weight.grad is not None
        assert (weight.grad.double() - theirs).norm() <= 1e-4 * theirs.norm()


def test_what_has_too_few_steps_for_our_kernels_is_left_to_torch() -> None:
    model, words, tags = made()
    run = ecornn.compile(model)
    step(run, model, words[:1], tags[:1])
    assert type(model.upper) is nn.GRU
    assert "upper is left to torch: with this few steps" in str(run.explain())


@pytest.mark.parametrize(
    ("keep", "batch", "told"),
    [("auto", 81, "in 2 launches"), ("states", 300, "launches, one after the other")],
)
def test_a_batch_too_large_for_one_launch_runs_in_more(keep: str, batch: int, told: str) -> None:
    """In two, and where torch's kernels are no choice in as many as it takes."""
    layer = ecornn.LSTM(1024, 1024, keep=keep, device="cuda")
    torch.backends.cudnn.allow_tf32 = True
    x = torch.randn(16, batch, 1024, device="cuda")
    assert layer.explain(x).backend == "persistent"
    assert told in str(layer.explain(x))
    exact = copy.deepcopy(layer).double()
    found, expected = layer(x)[0], exact(x.double())[0]
    assert (found.double() - expected).norm() <= 2e-3 * expected.norm()
    arriving = torch.randn_like(found)
    found.backward(arriving)
    expected.backward(arriving.double())
    for mine, theirs in zip(layer.parameters(), exact.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert (mine.grad.double() - theirs.grad).norm() <= 2e-3 * theirs.grad.norm()


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(800, 800, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0].square().mean()


@pytest.mark.parametrize("memory", ["auto", "min"])
def test_a_large_batch_runs_on_our_kernels_where_it_would_not_fit(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's layer keeps six values a unit, step and sequence: 630 MB."""
    torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(7)
    with torch.device("cuda"):
        model, x = Large(), torch.randn(64, 256, 800)
    exact = copy.deepcopy(model).double()
    expected = step(exact, exact, x.double())
    monkeypatch.setattr(scarce, "room_on", lambda _: 400 << 20)
    run = ecornn.compile(model, memory=memory)
    found = step(run, model, x)
    assert type(model.layer) is ecornn.GRU
    assert "in more launches than are taken to be quick" in " ".join(str(run.explain()).split())
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.double() - theirs).norm() <= 2e-3 * theirs.norm()


def test_the_room_on_a_gpu_is_what_the_process_may_have() -> None:
    torch.cuda.empty_cache()
    device = torch.device("cuda", 0)
    total = torch.cuda.get_device_properties(0).total_memory
    room = gpu_room.room_on(device)
    assert room is not None
    assert 0 < room <= total - torch.cuda.memory_allocated()
    torch.cuda.set_per_process_memory_fraction((2 << 30) / total)
    try:
        taken = torch.empty(1 << 30, dtype=torch.uint8, device=device)
        left = gpu_room.room_on(device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert left == pytest.approx((1 << 30) - torch.cuda.memory_allocated() + taken.nbytes, abs=4096)


def test_a_model_that_would_not_fit_is_planned_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that has room for four fifths of what it would take, of which some is left free."""
    torch.manual_seed(8)
    with torch.device("cuda"):
        model = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(256, 256), nn.GELU())))
        x = torch.randn(1 << 16, 256)

    def peak() -> tuple[int, str]:
        torch._dynamo.reset()
        run = ecornn.compile(model)
        for _ in range(2):
            model.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run(x).square().mean().backward()
            torch.cuda.synchronize()
        told = " ".join(str(run.explain()).split())
        return torch.cuda.max_memory_allocated() - before, told

    unlimited, _ = peak()
    monkeypatch.setattr(gpu_room, "room_on", lambda _: int(0.8 * unlimited))
    found, told = peak()
    assert "no plan of little time fits the GPU" in told
    assert found < 0.85 * unlimited
