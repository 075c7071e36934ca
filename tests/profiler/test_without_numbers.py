"""Operators that torch cannot run without numbers: the CTC loss."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ecornn.bench.models.speech import CTCLoss, joined
from ecornn.bench.models.step import Step, make_step
from ecornn.errors import InvalidInput
from ecornn.profiler import MemoryReport, fit, meta_kernels, profile
from ecornn.profiler.steps import read_step
from ecornn.profiler.without_numbers import BY_CUDNN, WIDEST
from support.cudnn_ctc import CudnnOnTheCpu

FRAMES, BATCH, CLASSES, LONGEST = 9, 3, 6, 5
TEXTS = (3, LONGEST, 4)


class Model(nn.Module):
    """`lengths`: "numbers", "cpu", or "same" for tensors on the model's own device."""

    def __init__(self, lengths: str, targets: str, dtype: torch.dtype, **how: Any) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(BATCH, FRAMES, CLASSES, dtype=dtype))
        shape = {"padded": (BATCH, LONGEST), "wide": (BATCH, LONGEST + 2), "joined": (sum(TEXTS),)}
        self.register_buffer("targets", torch.ones(shape[targets], dtype=torch.long))
        self.lengths: Any = [FRAMES] * BATCH, list(TEXTS)
        if lengths != "numbers":
            self.lengths = tuple(map(torch.tensor, self.lengths))
        self.how, self.follow = how, lengths == "same"

    def on_meta(self) -> Model:
        if self.follow:
            self.lengths = tuple(one.to("meta") for one in self.lengths)
        return self.to("meta")

    def forward(self) -> Tensor:
        # not contiguous, of which the gradient knows nothing
        log_probs = self.table.log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log_probs, self.targets, *self.lengths, **self.how)


class Made(TorchDispatchMode):
    """Of the CTC loss's operators: shape, strides, dtype and bytes of each result."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "ctc_loss" in str(func):
            self.results += [
                (str(func), one.shape, one.stride(), one.dtype, one.untyped_storage().nbytes())
                for one in tree_leaves(result)
                if isinstance(one, Tensor)
            ]
        return result


def observed(model: nn.Module) -> MemoryReport:
    def step() -> None:
        model.zero_grad()
        model().sum().backward()

    return profile(step, model)


def speech(device: str) -> Step:
    step = make_step("speech", size="tiny", device=device)
    if device == "cpu":
        step.batch[2][1] = step.batch[1].shape[1]  # one text fills its row, as padding leaves it
    return step


def kinds_of(report: MemoryReport) -> Counter[tuple[Any, ...]]:
    """Without shapes of gradients: some are made as (1, n) on one device, as (n,) on the other."""
    kinds = ("weights", "optimizer state", "gradients", "feature maps")
    return Counter(
        (one.module, one.kind, one.bytes, one.shape if one.kept_by else (), one.dtype, one.kept_by)
        for one in report.held
        if one.kind in kinds
    )


def test_the_speech_model_takes_on_meta_tensors_what_it_takes_on_the_cpu() -> None:
    cpu, meta = (read_step(speech(device)).observed() for device in ("cpu", "meta"))
    assert meta.peak_bytes == cpu.peak_bytes
    assert [(row.module, row.kind, row.bytes) for row in meta.rows] == [
        (row.module, row.kind, row.bytes) for row in cpu.rows
    ]
    assert kinds_of(meta) == kinds_of(cpu)
    paths = [one for one in meta.held if one.operator == "aten._ctc_loss" and one.kept_by]
    assert {one.shape for one in paths} == {(4,), (4, 20, 13)}
    assert all("speech.py:" in one.line for one in paths)
    assert meta.notes == (WIDEST,)
    assert cpu.notes == ()


@pytest.mark.parametrize(
    ("lengths", "targets"),
    [(a, b) for a in ("numbers", "cpu") for b in ("padded", "wide", "joined")]
    + [("same", "padded"), ("same", "joined")],
)
@pytest.mark.parametrize(
    ("dtype", "how"),
    [
        (torch.float32, {"reduction": "mean"}),
        (torch.float64, {"reduction": "sum", "zero_infinity": True}),
        (torch.float32, {"reduction": "none", "blank": 2}),
    ],
)
def test_every_way_to_call_it(lengths: str, targets: str, dtype: Any, how: dict[str, Any]) -> None:
    model = Model(lengths, targets, dtype, **how)
    with Made() as on_cpu:
        model().sum().backward()
    cpu = observed(model)
    model = model.on_meta()
    if lengths == "same" and targets == "joined":
        with pytest.raises(InvalidInput, match=r"target_lengths: .*shape \(12,\).*as numbers or"):
            observed(model)
        return
    with meta_kernels(), Made() as on_meta:
        model().sum().backward()
    meta = observed(model)
    assert on_meta.results == on_cpu.results
    assert len(on_cpu.results) == 3
    # lengths that stay on the CPU are counted there alone
    elsewhere = sum(one.nbytes for one in model.lengths) if lengths == "cpu" else 0
    assert meta.peak_bytes == cpu.peak_bytes - elsewhere
    assert kinds_of(meta) == kinds_of(cpu)
    assert (WIDEST in meta.notes) == (lengths == "same")


def test_a_bound_is_taken_and_told() -> None:
    """Rows of seven labels of which the longest text has five: two columns a label more."""
    model = Model("same", "wide", torch.float32)
    cpu = {one.shape for one in observed(model).held if one.operator == "aten._ctc_loss"}
    report = observed(model.on_meta())
    meta = {one.shape for one in report.held if one.operator == "aten._ctc_loss"}
    assert cpu == {(BATCH,), (BATCH, FRAMES, 2 * LONGEST + 1)}
    assert meta == {(BATCH,), (BATCH, FRAMES, 2 * (LONGEST + 2) + 1)}
    assert report.notes == (WIDEST,)


def test_one_text_alone_is_as_long_as_its_targets() -> None:
    log_probs = torch.empty(FRAMES, CLASSES, device="meta", requires_grad=True)
    targets = torch.empty(4, dtype=torch.long, device="meta")
    frames, text = (torch.tensor(n, device="meta") for n in (FRAMES, 4))
    with meta_kernels(), Made() as made:
        F.ctc_loss(log_probs, targets, frames, text).backward()
    assert [result[1] for result in made.results] == [(1,), (1, FRAMES, 9), (FRAMES, 1, CLASSES)]
    assert log_probs.grad is not None
    assert log_probs.grad.shape == log_probs.shape


@pytest.mark.parametrize(
    ("frames", "texts", "message"),
    [
        ([FRAMES + 1] * BATCH, list(TEXTS), "at most 9"),
        ([FRAMES] * BATCH, [LONGEST + 1] * BATCH, "at least 6"),
        ([FRAMES] * 2, list(TEXTS), "input_lengths"),
    ],
)
@pytest.mark.parametrize("as_tensors", [False, True])
def test_what_the_cpu_refuses_is_refused(
    frames: Any, texts: Any, message: str, as_tensors: bool
) -> None:
    if as_tensors:
        frames, texts = torch.tensor(frames), torch.tensor(texts)
    given = torch.randn(FRAMES, BATCH, CLASSES), torch.ones(BATCH, LONGEST, dtype=torch.long)
    with pytest.raises(RuntimeError, match=message):
        F.ctc_loss(*given, frames, texts)
    with meta_kernels(), pytest.raises(RuntimeError, match=message):
        F.ctc_loss(*(one.to("meta") for one in given), frames, texts)


class ByCudnn(nn.Module):
    """cuDNN's operator, called with joined labels."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(BATCH, FRAMES, CLASSES))
        padded, lengths = torch.ones(BATCH, LONGEST, dtype=torch.long), torch.tensor(TEXTS)
        self.register_buffer("labels", joined(padded, lengths))
        self.register_buffer("lengths", lengths.int())

    def forward(self) -> Tensor:
        log_probs = self.table.log_softmax(-1).transpose(0, 1)
        return CTCLoss()(log_probs, self.labels, self.lengths)


def test_cudnn_s_own_keeps_a_gradient_and_no_paths() -> None:
    model = ByCudnn()
    with CudnnOnTheCpu(), Made() as on_cpu:
        model().backward()
    with meta_kernels(), Made() as on_meta:
        model.to("meta")().backward()
    assert on_meta.results == on_cpu.results
    assert [result[1] for result in on_meta.results] == [(BATCH,), (FRAMES, BATCH, CLASSES)]
    report = observed(model)
    kept = {one.shape for one in report.held if one.operator == "aten._cudnn_ctc_loss"}
    assert kept == {(BATCH,), (FRAMES, BATCH, CLASSES)}
    assert report.notes == ()


@pytest.mark.parametrize("texts", [torch.int32, torch.int64])
def test_whose_loss_it_is_follows_from_what_torch_asks(
    texts: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    with FakeTensorMode(), meta_kernels() as rules, Made() as made, torch.no_grad():
        log_probs = torch.empty(FRAMES, 1, CLASSES, device="cuda")
        targets = torch.empty(LONGEST, dtype=torch.int32, device="cuda")
        lengths = torch.empty(1, dtype=texts, device="cuda")
        F.ctc_loss(log_probs, targets, lengths, lengths)  # of one text, which has all labels
    by_cudnn = texts is torch.int32
    kept = (FRAMES, 1, CLASSES) if by_cudnn else (1, FRAMES, 2 * LONGEST + 1)
    assert [one[1] for one in made.results] == [(1,), kept]
    assert (BY_CUDNN in rules._rules.notes) == by_cudnn


def test_the_compiler_is_not_loaded_for_it() -> None:
    code = (
        "import sys, torch\n"
        "from ecornn.profiler import meta_kernels\n"
        "with meta_kernels(): torch.ones(3) + 1\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_compiled_part_runs_as_compiled() -> None:
    """Also if it is compiled within."""
    torch._dynamo.reset()
    compiled: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    function = torch.compile(lambda x: x.sin() + 1, backend=backend)
    with meta_kernels():
        function(torch.ones(3, device="meta"))
    function(torch.ones(3, device="meta"))
    assert len(compiled) == 1
    torch._dynamo.reset()


def test_nothing_of_it_stays() -> None:
    model = Model("same", "padded", torch.float32).on_meta()
    report = observed(model)
    assert report.peak_bytes > 0
    with pytest.raises(NotImplementedError, match="_ctc_loss"):
        model()


def test_lengths_are_only_moved_inside_of_the_loss() -> None:
    """And numbers are those of a call that nobody sees."""
    texts = torch.tensor(TEXTS)
    log_probs = torch.randn(FRAMES, BATCH, CLASSES).log_softmax(-1).requires_grad_()
    given = log_probs, torch.ones(BATCH, LONGEST, dtype=torch.long), torch.tensor([FRAMES] * BATCH)
    F.ctc_loss(*given, texts).backward()
    alone, log_probs.grad = log_probs.grad, None
    with meta_kernels():
        F.ctc_loss(*given, texts).backward()
        F.ctc_loss(*(one.detach().to("meta") for one in given[:2]), given[2], texts)
        assert torch.clamp_min(texts, 4).tolist() == [4, 5, 4]
    assert torch.equal(log_probs.grad, alone)


def test_fake_tensors_too() -> None:
    real = read_step(speech("cpu")).observed()
    with FakeTensorMode():
        fake = read_step(make_step("speech", size="tiny", device="cpu")).observed()
    assert fake.peak_bytes == real.peak_bytes
    assert fake.notes == (WIDEST,)


def test_the_largest_batch_of_the_speech_model() -> None:
    budget = 2**20

    def make(batch: int) -> Step:
        return make_step("speech", size="tiny", batch=batch, device="meta")

    found = fit(make, budget, sizes=(2, 4))
    assert found.largest is not None
    assert found.observed[found.largest] <= budget < found.observed[found.largest + 1]
    assert WIDEST in found.notes
