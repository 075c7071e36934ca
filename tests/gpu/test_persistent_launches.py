"""Launches of the persistent kernels in processes and modes of all kinds, that none hangs or goes
wrong by chance, and what their plan says."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ecornn
from ecornn.backends.persistent_plain import PlainLayer
from ecornn.backends.protocol import BackwardRequest, LayerCall, ResultGrads
from ecornn.backends.registry import by_name
from ecornn.kernels.persistent import device
from ecornn.kernels.persistent.choose import Request
from ecornn.kernels.persistent.floor import Floor
from ecornn.kernels.persistent.launch import Launcher
from support.persistent_calls import arriving, assert_like_the_definition, make_call, run
from support.tolerances import ONE_STEP, assert_matches, tolerance

pytestmark = pytest.mark.gpu

#: TF32 has half precision's eleven bits.
TF32_BOUND = ONE_STEP[torch.float16]


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("batch", [1, 16])
def test_a_kernel_that_begins_early_waits_for_its_input(batch: int, dtype: torch.dtype) -> None:
    """Gates stand where those of another input stood, and their product takes longer than the
    kernel's weights do."""
    torch.use_deterministic_algorithms(False)  # which fills memory between the two kernels
    call = make_call("lstm", dtype, 64, batch, 256, inputs=256, keep="none")
    layer, weights = PlainLayer(call), tuple(call.flat_weights())
    assert layer._early
    outputs: dict[bool, list[Tensor]] = {}
    for early in (True, False):
        layer._early = early
        generator = torch.Generator("cuda").manual_seed(1)
        outputs[early] = []
        for _ in range(100):
            x = torch.randn(call.input_TBI.shape, generator=generator, device="cuda").to(dtype)
            outputs[early].append(
                layer.forward(x, call.h0_DBR, call.c0_DBH, weights).output_TBO.clone()
            )
    assert all(map(torch.equal, outputs[True], outputs[False]))


class Varied(NamedTuple):
    cell: str
    dtype: torch.dtype
    hidden: int
    batch: int
    steps: int
    keep: str = "states"
    lengths: bool = False

    @property
    def call(self) -> LayerCall:
        more = {}
        if self.lengths:
            more["lengths_B"] = torch.arange(self.batch, device="cuda") % (self.steps + 1)
        sizes = (self.hidden, self.batch, self.steps)
        return replace(make_call(self.cell, self.dtype, *sizes, **more), keep=self.keep)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
#: One block, clusters and the whole chip; every cell and dtype; odd sizes; both ways to keep.
VARIED = (
    Varied("lstm", BF16, 64, 1, 20, "gates"),
    Varied("lstm", FP16, 256, 4, 10),
    Varied("lstm", FP32, 512, 16, 7, "gates"),
    Varied("lstm", BF16, 1024, 16, 10),
    Varied("lstm", FP16, 1024, 1, 20, "gates"),
    Varied("lstm", FP32, 1024, 4, 5),
    Varied("lstm", BF16, 2048, 4, 6, "gates"),
    Varied("lstm", BF16, 256, 6, 9, lengths=True),
    Varied("gru", BF16, 256, 16, 12),
    Varied("gru", FP16, 101, 3, 13, "gates"),
    Varied("gru", FP32, 64, 16, 10, "gates"),
    Varied("gru", BF16, 1024, 4, 8, lengths=True),
    Varied("rnn_tanh", BF16, 512, 4, 1),
    Varied("rnn_tanh", FP32, 256, 1, 15),
    Varied("rnn_relu", FP16, 64, 4, 11),
    Varied("rnn_relu", BF16, 1024, 16, 3),
)


def everything(call: LayerCall, grads: ResultGrads) -> list[Tensor]:
    """All results and gradients of both passes."""
    result, found = run("persistent", call, grads)
    every = (*result[:3], found.input_TBI, found.h0_DBR, found.c0_DBH, *found.weights)
    return [t for t in every if t is not None]


def requests_of(call: LayerCall) -> list[Request]:
    numbers = device.numbers_of(call.input_TBI.dtype)
    assert numbers is not None
    sizes = (call.h0_DBR.shape[-1], call.input_TBI.shape[1], 1, call.lengths_B is not None)
    return [Request(name, call.cell, numbers, *sizes) for name in ("forward", "backward")]


def test_ten_thousand_launches_beside_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both passes of cells, dtypes and sizes in turn, while another stream keeps the GPU busy.
    Each has the bits of its first result, which is held against the definition in float64."""
    calls = [varied.call for varied in VARIED]
    asks = [ask for call in calls for ask in requests_of(call)]
    device.build_side_by_side(asks, torch.cuda.current_device())  # one by one they take minutes
    for call in calls:
        assert_like_the_definition(call, TF32_BOUND if call.input_TBI.dtype == FP32 else None)
    grads = [arriving(call) for call in calls]
    first = [everything(*pair) for pair in zip(calls, grads, strict=True)]
    launched: Counter[str] = Counter()
    launch = Launcher.__call__

    def counted(self: Launcher, *arguments: object, **more: object) -> None:
        launched[self.geometry.tile.kernel] += 1
        launch(self, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Launcher, "__call__", counted)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    other = torch.cuda.Stream()
    busy = torch.randn(2048, 2048, device="cuda")
    turn = 0
    while launched["forward"] + launched["backward"] < 10_000:
        index = turn % len(calls)
        if turn % 3 == 0:
            with torch.cuda.stream(other):
                busy = (busy @ busy).clamp(-1, 1)
        found = everything(calls[index], grads[index])
        for a, b in zip(found, first[index], strict=True):
            wrong += (a != b).any()
        turn += 1
    torch.cuda.synchronize()
    device.failure_flag().check()
    assert wrong.item() == 0


def test_launches_finish_while_another_stream_s_kernel_runs() -> None:
    """The other one sleeps for a second on one block: no launch may wait for its end, and all have
    their blocks beside it."""
    calls = [varied.call for varied in VARIED]
    asks = [ask for call in calls for ask in requests_of(call)]
    device.build_side_by_side(asks, torch.cuda.current_device())
    grads = [arriving(call) for call in calls]
    first = [everything(*pair) for pair in zip(calls, grads, strict=True)]
    torch.cuda.synchronize()
    other, began, ended = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()
    done = torch.cuda.Event()
    with torch.cuda.stream(other):
        began.record()
        torch.cuda._sleep(2_000_000_000)
        ended.record()
    began.synchronize()
    again = [everything(*pair) for pair in zip(calls, grads, strict=True)]
    done.record()
    done.synchronize()
    assert not ended.query(), "they waited for the other stream"
    torch.cuda.synchronize()
    device.failure_flag().check()
    for found, wanted in zip(again, first, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def launched_by(function: Callable[[], object]) -> Counter[str]:
    """Everything that the device is given, by name; not the first time, which compiles."""
    function()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as observed:
        function()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    return Counter(event.name for event in observed.events() if event.device_type == on_device)


@pytest.mark.parametrize("feature", ["lengths", "resets", "both"])
@pytest.mark.parametrize("hidden", [64, 256, 1024])
@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh"])
def test_lengths_and_resets_take_no_launch(cell: str, hidden: int, feature: str) -> None:
    """Forwards the device is given as much as without them. Backwards the recurrence is one launch
    too; only the products around it need what lies beyond the ends masked."""
    batch, steps = 6, 19
    more = {}
    if feature != "resets":
        more["lengths_B"] = torch.tensor([19, 1, 7, 18, 12, 3], device="cuda")
    if feature != "lengths":
        more["resets_TB"] = torch.rand(steps, batch, device="cuda") < 0.2
    plain = make_call(cell, torch.bfloat16, hidden, batch, steps)
    with_them = replace(plain, **more)
    backend = by_name("persistent")
    counts = [launched_by(lambda call=call: backend.forward(call)) for call in (plain, with_them)]
    assert counts[0]["forward"] == counts[1]["forward"] == 1, counts
    assert counts[0].total() == counts[1].total(), counts
    for call in (plain, with_them):
        result, grads = backend.forward(call), arriving(call)
        given = (call, result, grads, BackwardRequest())
        count = launched_by(lambda given=given: backend.backward(*given))
        assert count["backward"] == 1, count


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
