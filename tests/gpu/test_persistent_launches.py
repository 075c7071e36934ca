"""Launches of the persistent kernels in processes and modes of all kinds, that none hangs or goes
wrong by chance, and what their plan says."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ecornn
from ecornn.backends.registry import by_name
from ecornn.kernels.persistent import device
from ecornn.kernels.persistent.floor import Floor
from support.persistent_calls import arriving, make_call, run
from support.tolerances import assert_matches, tolerance

pytestmark = pytest.mark.gpu


def test_a_process_whose_first_backward_pass_is_a_layer_s() -> None:
    """autograd's thread has no CUDA context of its own then."""
    program = """
import torch, ecornn
layer = ecornn.LSTM(64, 64, device="cuda", dtype=torch.bfloat16, backend="persistent")
x = torch.randn(9, 2, 64, device="cuda", dtype=torch.bfloat16)
out = layer(x)[0]
out.backward(torch.ones_like(out))
print(float(layer.weight_hh_l0.grad.float().abs().sum()) > 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr


def test_a_process_whose_default_device_is_the_gpu() -> None:
    """What is made once, in the host's memory, must not be made on it."""
    program = """
import torch, ecornn
torch.set_default_device("cuda")
layer = ecornn.LSTM(64, 64, dtype=torch.bfloat16)
x = torch.randn(9, 2, 64, dtype=torch.bfloat16)
packed = torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor([9, 4], device="cpu"))
out = layer(x)[0].sum() + layer(packed)[0].data.sum() + layer(x, lengths=[9, 4])[0].sum()
out.backward()
print(layer.explain(x).backend, float(layer.weight_hh_l0.grad.float().abs().sum()) > 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "persistent True", done.stderr


@pytest.mark.parametrize("cell", ["LSTM", "GRU", "RNN"])
def test_a_checkpoint_of_a_size_that_is_new(cell: str) -> None:
    """The first call of a size, run again, must keep what it kept the first time."""
    layer = getattr(ecornn, cell)(24, 40, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(23, 5, 24, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grads = []
    for call in (lambda x: checkpoint(layer, x, use_reentrant=False), layer):
        found = call(x)[0].float().square().sum()
        grads.append(torch.autograd.grad(found, [x, *layer.parameters()]))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("hidden", [64, 512])
def test_a_backward_pass_under_autocast(hidden: int) -> None:
    layer = ecornn.LSTM(64, hidden, device="cuda")
    x = torch.randn(23, 4, 64, device="cuda", requires_grad=True)
    leaves = [x, *layer.parameters()]
    loss = layer(x)[0].square().sum()
    wanted = torch.autograd.grad(loss, leaves, retain_graph=True)
    with torch.autocast("cuda", dtype=torch.float16):
        found = torch.autograd.grad(loss, leaves)
    for a, b in zip(found, wanted, strict=True):
        assert_matches(a, b.double(), tolerance(torch.float32, 23, order=1))


def test_an_empty_batch() -> None:
    layer = ecornn.LSTM(8, 16, device="cuda", dtype=torch.bfloat16)
    x = torch.zeros(20, 0, 8, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    output, (h, c) = layer(x)
    assert (output.shape, h.shape, c.shape) == ((20, 0, 16), (1, 0, 16), (1, 0, 16))
    output.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())


def test_fake_tensors_launch_nothing() -> None:
    with torch._subclasses.FakeTensorMode():
        layer = ecornn.LSTM(8, 16, device="cuda", dtype=torch.bfloat16)
        output, _ = layer(torch.zeros(20, 3, 8, device="cuda", dtype=torch.bfloat16))
    assert output.shape == (20, 3, 16)
    assert isinstance(output, torch._subclasses.FakeTensor)


def test_a_length_beyond_the_end_counts_as_the_end() -> None:
    """As in a captured graph, where nobody can check them."""
    call = make_call("lstm", torch.float16, 64, 3, 9, directions=2)
    beyond, end = (torch.tensor([9, n, 4], device="cuda") for n in (12, 9))
    first, second = (
        run("persistent", replace(call, lengths_B=lengths), arriving(call))
        for lengths in (beyond, end)
    )
    assert torch.equal(first[0].output_TBO, second[0].output_TBO)
    assert torch.equal(first[1].h0_DBR, second[1].h0_DBR)


@pytest.mark.parametrize("hidden", [64, 256, 1024])
def test_equal_bits_again_and_again(hidden: int) -> None:
    call = make_call("lstm", torch.bfloat16, hidden, 8, 40)
    grads = arriving(call)
    first, first_grads = run("persistent", call, grads)
    for _ in range(20):
        again, again_grads = run("persistent", call, grads)
        assert torch.equal(first.output_TBO, again.output_TBO)
        assert torch.equal(first_grads.h0_DBR, again_grads.h0_DBR)
        assert torch.equal(first_grads.weights[1], again_grads.weights[1])


def test_ten_thousand_launches_beside_another_stream() -> None:
    """Shapes in turn, each against its own first result; another stream keeps the GPU busy."""
    shapes = list(itertools.product((64, 256, 512, 1024), (1, 4, 16), ("lstm", "gru")))
    calls = [make_call(cell, torch.bfloat16, hidden, b, 10) for hidden, b, cell in shapes]
    first = [by_name("persistent").forward(call).output_TBO.clone() for call in calls]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    other = torch.cuda.Stream()
    busy = torch.randn(2048, 2048, device="cuda")
    for launch in range(10_000):
        index = launch % len(calls)
        if launch % 5 == 0:
            with torch.cuda.stream(other):
                busy = (busy @ busy).clamp(-1, 1)
        output = by_name("persistent").forward(calls[index]).output_TBO
        wrong += (output != first[index]).any()
    torch.cuda.synchronize()
    device.failure_flag().check()
    assert wrong.item() == 0


@pytest.mark.parametrize(("hidden", "batch"), [(64, 1), (256, 4), (1024, 1), (1024, 4)])
def test_the_floor_runs_and_is_below_the_layer(hidden: int, batch: int) -> None:
    floor = Floor("lstm", torch.bfloat16, hidden, batch, 200, torch.device("cuda"))
    call = replace(make_call("lstm", torch.bfloat16, hidden, batch, 200), keep="none")

    def milliseconds(function: Callable[[], object]) -> float:
        for _ in range(3):
            function()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            function()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    assert milliseconds(floor.run) < milliseconds(lambda: by_name("persistent").forward(call))
    device.failure_flag().check()
    assert str(batch) in floor.description


def test_a_kernel_that_gave_up_is_an_error_at_the_next_call() -> None:
    call = make_call("lstm", torch.bfloat16, 64, 2, 8)
    device.failure_flag().value[0] = 1
    with pytest.raises(ecornn.KernelGaveUp, match="gave up"):
        by_name("persistent").forward(call)
    by_name("persistent").forward(call)


def test_the_plan_says_how_it_runs() -> None:
    layer = ecornn.LSTM(256, 256, device="cuda", dtype=torch.bfloat16)
    text = layer.explain(torch.zeros(50, 4, 256, device="cuda", dtype=torch.bfloat16)).explain()
    assert "runs on persistent" in text
    assert "units" in text
    assert "KiB of weights a block" in text
    short = layer.explain(torch.zeros(2, 4, 256, device="cuda", dtype=torch.bfloat16))
    assert short.backend == "aten"
    assert "few steps" in short.explain()


def test_what_does_not_fit_is_refused_with_the_reason() -> None:
    layer = ecornn.LSTM(8, 6000, device="cuda", dtype=torch.bfloat16)
    found = layer.explain(torch.zeros(50, 4, 8, device="cuda", dtype=torch.bfloat16))
    assert found.backend == "aten"
    assert "do not fit" in found.explain()
    named = ecornn.LSTM(8, 6000, device="cuda", dtype=torch.bfloat16, backend="persistent")
    with pytest.raises(ecornn.NoBackend, match="do not fit"):
        named(torch.zeros(50, 4, 8, device="cuda", dtype=torch.bfloat16))
