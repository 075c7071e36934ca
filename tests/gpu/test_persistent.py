"""The persistent kernels on a GPU, against the definition in float64: every cell, number format,
regime of exchange and feature, and that a launch never hangs or goes wrong by chance."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ecornn
from ecornn.backends.protocol import BackwardRequest, CallGrads, LayerCall, LayerResult, ResultGrads
from ecornn.backends.registry import by_name
from ecornn.kernels.persistent import device
from ecornn.kernels.persistent.choose import Request, candidates
from ecornn.kernels.persistent.floor import Floor
from ecornn.kernels.persistent.tile import Geometry
from ecornn.kernels.reference import DirectionWeights
from ecornn.spec import GATES
from support.tolerances import ONE_STEP, assert_matches, tolerance

pytestmark = pytest.mark.gpu

CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
HALVES = (torch.bfloat16, torch.float16)
#: TF32 has half precision's eleven bits.
TF32_BOUND = ONE_STEP[torch.float16]


@pytest.fixture(params=["tf32", "ieee"])
def float32_products(request: Any) -> Any:
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    allowed = request.param == "tf32"
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = allowed
    yield request.param
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def make_call(
    cell: str,
    dtype: torch.dtype,
    hidden: int,
    batch: int,
    steps: int,
    *,
    directions: int = 1,
    bias: bool = True,
    inputs: int = 24,
    **more: Any,
) -> LayerCall:
    generator = torch.Generator("cuda").manual_seed(hidden + 7 * batch + steps)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=generator, device="cuda", dtype=torch.float64)
        return (values * scale).to(dtype)

    rows = GATES[cell] * hidden
    # a unit of a ReLU network that rounding switches off changes its gradient by all of it: most
    # units are kept away from zero
    relu = cell == "rnn_relu"
    scale = (0.3 if relu else 1.0) * hidden**-0.5
    weights = tuple(
        DirectionWeights(
            draw(rows, inputs, scale=0.3),
            draw(rows, hidden, scale=scale),
            draw(rows, scale=0.3) + (5.0 if relu else 0.0) if bias else None,
            draw(rows, scale=0.3) if bias else None,
        )
        for _ in range(directions)
    )
    state = (directions, batch, hidden)
    return LayerCall(
        cell,
        draw(steps, batch, inputs),
        draw(*state, scale=0.5),
        draw(*state) if cell == "lstm" else None,
        weights,
        keep="states",
        **more,
    )


def widened(call: LayerCall) -> LayerCall:
    """The same call in float64."""
    return replace(
        call,
        input_TBI=call.input_TBI.double(),
        h0_DBR=call.h0_DBR.double(),
        c0_DBH=None if call.c0_DBH is None else call.c0_DBH.double(),
        weights=tuple(w.to(torch.float64) for w in call.weights),
        keep="states",
    )


def run(name: str, call: LayerCall, grads: ResultGrads) -> tuple[LayerResult, CallGrads]:
    backend = by_name(name)
    result = backend.forward(call)
    return result, backend.backward(call, result, grads, BackwardRequest())


def arriving(call: LayerCall, *, states: bool = True) -> ResultGrads:
    steps, batch = call.input_TBI.shape[:2]
    hidden, d = call.h0_DBR.shape[-1], call.directions
    draw = torch.Generator("cuda").manual_seed(3)

    def values(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=draw, device="cuda", dtype=torch.float64)
        return drawn.to(call.input_TBI.dtype)

    return ResultGrads(
        values(steps, batch, d * hidden),
        values(d, batch, hidden) if states else None,
        values(d, batch, hidden) if states and call.cell == "lstm" else None,
        values(steps, batch, d * hidden) if call.cell == "lstm" and call.cell_states else None,
    )


def assert_like_the_definition(call: LayerCall, bound: float | None = None) -> None:
    grads = arriving(call)
    dtype, steps = call.input_TBI.dtype, call.input_TBI.shape[0]
    wide = ResultGrads(*(None if g is None else g.double() for g in grads))
    want, want_grads = run("reference", widened(call), wide)
    found, found_grads = run("persistent", call, grads)
    one_step = tolerance(dtype) if bound is None else bound
    allowed = one_step * steps**0.5
    pairs = [
        ("output", found.output_TBO, want.output_TBO, allowed),
        ("h_n", found.h_n_DBR, want.h_n_DBR, allowed),
        ("c_n", found.c_n_DBH, want.c_n_DBH, allowed),
        ("d_input", found_grads.input_TBI, want_grads.input_TBI, 2 * allowed),
        ("d_h0", found_grads.h0_DBR, want_grads.h0_DBR, 2 * allowed),
        ("d_c0", found_grads.c0_DBH, want_grads.c0_DBH, 2 * allowed),
    ]
    pairs += [
        (f"weight {i}", f, w, 2 * allowed)
        for i, (f, w) in enumerate(zip(found_grads.weights, want_grads.weights, strict=True))
    ]
    for what, a, b, limit in pairs:
        assert (a is None) == (b is None), what
        if a is not None and b is not None:
            assert_matches(a, b, limit, what)
    device.failure_flag().check()


#: One block, a cluster, and the whole chip; with every number of sequences a tile may hold.
SIZES = ((64, 1), (64, 17), (128, 4), (256, 3), (256, 40), (512, 5), (512, 64), (1024, 9))


@pytest.mark.parametrize(("hidden", "batch"), SIZES)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_half_precision(cell: str, dtype: torch.dtype, hidden: int, batch: int) -> None:
    assert_like_the_definition(make_call(cell, dtype, hidden, batch, 33))


@pytest.mark.parametrize(("hidden", "batch"), [(64, 5), (256, 16), (512, 3), (1024, 4)])
@pytest.mark.parametrize("cell", CELLS)
def test_float32(cell: str, hidden: int, batch: int, float32_products: str) -> None:
    bound = TF32_BOUND if float32_products == "tf32" else None
    assert_like_the_definition(make_call(cell, torch.float32, hidden, batch, 33), bound)


@pytest.mark.parametrize(("hidden", "batch"), [(1, 1), (7, 3), (100, 5), (333, 9), (1001, 2)])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_any_hidden_size(cell: str, dtype: torch.dtype, hidden: int, batch: int) -> None:
    bound = TF32_BOUND if dtype == torch.float32 else None
    assert_like_the_definition(make_call(cell, dtype, hidden, batch, 12, inputs=5), bound)


@pytest.mark.parametrize("hidden", [40, 256, 1024])
@pytest.mark.parametrize("cell", CELLS)
def test_both_directions(cell: str, hidden: int) -> None:
    assert_like_the_definition(make_call(cell, torch.float16, hidden, 6, 21, directions=2))


def test_two_directions_that_do_not_fit_at_once() -> None:
    assert_like_the_definition(make_call("lstm", torch.bfloat16, 2048, 2, 9, directions=2))


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_weights_that_fill_the_chip(batch: int) -> None:
    assert_like_the_definition(make_call("lstm", torch.bfloat16, 2048, batch, 9))


def test_more_sequences_than_one_launch_takes() -> None:
    assert_like_the_definition(make_call("lstm", torch.bfloat16, 1024, 150, 9))


@pytest.mark.parametrize("cell", CELLS)
def test_no_bias_and_one_step(cell: str) -> None:
    assert_like_the_definition(make_call(cell, torch.float16, 256, 3, 1, bias=False))


@pytest.mark.parametrize("hidden", [48, 256, 1024])
@pytest.mark.parametrize(
    "feature",
    ["lengths", "frozen", "resets", "resets to initial", "all"],
)
@pytest.mark.parametrize("cell", CELLS)
def test_ends_and_resets(cell: str, feature: str, hidden: int) -> None:
    steps, batch = 19, 6
    generator = torch.Generator("cuda").manual_seed(1)
    more: dict[str, Any] = {"cell_states": cell == "lstm"}
    if feature in ("lengths", "frozen", "all"):
        more["lengths_B"] = torch.tensor([19, 1, 7, 18, 12, 3], device="cuda")
    if feature in ("resets", "resets to initial", "all"):
        more["resets_TB"] = torch.rand(steps, batch, generator=generator, device="cuda") < 0.2
    if feature in ("resets to initial", "all"):
        more["reset_to"] = "initial"
    if feature in ("frozen", "all"):
        more["after_end"] = "frozen"
    assert_like_the_definition(
        make_call(cell, torch.float16, hidden, batch, steps, directions=2, **more)
    )


#: Ways to share the work of a step, whichever of them is the fastest: (blocks exchange through L2,
#: they are in clusters, a warp has the whole inner dimension, sequences are repeated).
REGIMES = {
    "one block": (False, False, False, False),
    "one block, direct": (False, False, True, False),
    "one block, repeated": (False, False, True, True),
    "cluster": (False, True, False, False),
    "cluster, direct": (False, True, True, False),
    "cluster, repeated": (False, True, True, True),
    "chip": (True, False, False, False),
    "chip in clusters": (True, True, False, False),
}


def regime_of(geometry: Geometry) -> tuple[bool, ...]:
    tile = geometry.tile
    return tile.grid, tile.cluster > 1, tile.direct, tile.width < 8


@pytest.mark.parametrize("features", [False, True], ids=["plain", "features"])
@pytest.mark.parametrize(("hidden", "batch"), [(72, 3), (101, 9), (256, 5)])
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("regime", REGIMES)
def test_every_regime(
    regime: str,
    cell: str,
    hidden: int,
    batch: int,
    features: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ecornn.backends import persistent_calls

    def of_the_regime(ask: Request, index: int) -> Geometry | None:
        fitting = (
            g for g in candidates(ask, device.chip(index)) if regime_of(g) == REGIMES[regime]
        )
        return next(fitting, None)

    def geometry(ask: Request, index: int) -> Geometry:
        # where only the other pass has such a tile, this one's best
        found = of_the_regime(ask, index) or device.geometry(ask, index)
        assert found is not None
        return found

    both = [
        Request(kernel, cell, "fp16", hidden, batch, 1, features)
        for kernel in ("forward", "backward")
    ]
    if not any(of_the_regime(ask, torch.cuda.current_device()) for ask in both):
        pytest.skip(f"neither pass of {cell} {hidden} × {batch} has a tile of this regime")
    monkeypatch.setattr(persistent_calls, "geometry", geometry)
    monkeypatch.setattr(persistent_calls, "_LAUNCHES", {})
    more: dict[str, Any] = {}
    if features:
        more["lengths_B"] = torch.randint(0, 14, (batch,), device="cuda")
        more["resets_TB"] = torch.rand(13, batch, device="cuda") < 0.2
        more["reset_to"] = "initial"
    assert_like_the_definition(make_call(cell, torch.float16, hidden, batch, 13, **more))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("hidden", [64, 256, 1024])
def test_gradients_that_begin_anywhere(hidden: int, dtype: torch.dtype) -> None:
    """A part of a longer tensor may begin where vectors cannot be loaded from."""
    call = make_call("lstm", dtype, hidden, 3, 9, cell_states=True)
    grads = arriving(call)

    def moved(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        flat = torch.empty(values.numel() + 1, device="cuda", dtype=dtype)[1:]
        return flat.view(values.shape).copy_(values)

    (_, want), (_, found) = (
        run("persistent", call, g) for g in (grads, ResultGrads(*map(moved, grads)))
    )
    assert torch.equal(want.h0_DBR, found.h0_DBR)
    assert all(torch.equal(a, b) for a, b in zip(want.weights, found.weights, strict=True))


@pytest.mark.parametrize("hidden", [64, 512])
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("keep", ["states", "gates"])
def test_pieces_of_time_are_joined(
    cell: str, keep: str, hidden: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ecornn.backends import persistent_calls

    monkeypatch.setattr(persistent_calls, "SMALL_BYTES", 1)
    keep = "states" if cell.startswith("rnn") else keep
    lengths = torch.tensor([41, 3, 30], device="cuda")
    resets = torch.zeros(41, 3, dtype=torch.bool, device="cuda")
    resets[11, 0] = resets[20, 2] = True
    call = make_call(cell, torch.float16, hidden, 3, 41, directions=2)
    assert_like_the_definition(replace(call, keep=keep))
    more = replace(call, keep=keep, lengths_B=lengths, resets_TB=resets, reset_to="initial")
    assert_like_the_definition(more)


def test_a_nan_stays_in_its_sequence() -> None:
    for hidden in (64, 256, 1024):
        call = make_call("lstm", torch.bfloat16, hidden, 4, 16)
        call.input_TBI[5, 1, 0] = float("nan")
        output = by_name("persistent").forward(call).output_TBO
        assert output[:, [0, 2, 3]].isfinite().all()
        assert output[:5, 1].isfinite().all()
        assert output[5:, 1].isnan().all()
    device.failure_flag().check()


@pytest.mark.parametrize("float32_products", ["tf32"], indirect=True)
@pytest.mark.parametrize("bits", [0x7F800000, 0x7F800001, 0x7FFFFFFF, -1])
def test_rounding_makes_no_number_of_an_infinity_or_a_nan(bits: int, float32_products: str) -> None:
    """Within a cluster and through L2: an infinity that half of a last bit was added to must be
    multiplied as one, and a NaN whose last bits are all it has as a NaN."""
    for hidden in (64, 256, 1024):
        call = make_call("rnn_relu", torch.float32, hidden, 4, 4)
        call.h0_DBR[0, 1, 5] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
        output = by_name("persistent").forward(call).output_TBO
        want = by_name("reference").forward(widened(call)).output_TBO
        assert output[:, [0, 2, 3]].isfinite().all()
        assert torch.equal(output[:, 1].isnan(), want[:, 1].isnan())
        assert torch.equal(output[:, 1].isinf(), want[:, 1].isinf())
        assert (want[0, 1].isinf() if bits == 0x7F800000 else want[0, 1].isnan()).any()
    device.failure_flag().check()


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
def test_a_memory_is_kept_for_thousands_of_steps(dtype: torch.dtype) -> None:
    """A forget gate near 1, and nothing else happening: c shrinks by exactly that gate."""
    steps, hidden = 4096, 64
    zeros = torch.zeros(4 * hidden, hidden, device="cuda", dtype=dtype)
    bias = torch.zeros(4, hidden, device="cuda", dtype=dtype)
    bias[0], bias[1] = -30.0, 7.0  # nothing comes in, almost nothing is forgotten
    weights = DirectionWeights(zeros, zeros, bias.flatten(), torch.zeros_like(bias).flatten())
    x = torch.zeros(steps, 2, hidden, device="cuda", dtype=dtype)
    c0 = torch.ones(1, 2, hidden, device="cuda", dtype=dtype)
    call = LayerCall("lstm", x, torch.zeros_like(c0), c0, (weights,), keep="states")
    result = by_name("persistent").forward(call)
    kept = torch.sigmoid(torch.tensor(7.0, dtype=torch.float64)) ** steps
    assert result.c_n_DBH is not None
    assert_matches(result.c_n_DBH, torch.full_like(c0, kept.item(), dtype=torch.float64), 1e-2)
    grads = ResultGrads(None, None, torch.ones_like(c0), None)
    found = by_name("persistent").backward(call, result, grads, BackwardRequest())
    assert found.c0_DBH is not None
    assert_matches(found.c0_DBH, torch.full_like(c0, kept.item(), dtype=torch.float64), 1e-2)


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
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout.strip() == "True", run.stderr


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
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout.strip() == "persistent True", run.stderr


@pytest.mark.parametrize("cell", ["LSTM", "GRU", "RNN"])
def test_a_checkpoint_of_a_size_that_is_new(cell: str) -> None:
    """The first call of a size, run again, must keep what it kept the first time."""
    layer = getattr(ecornn, cell)(24, 40, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(23, 5, 24, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grads = []
    for run in (lambda x: checkpoint(layer, x, use_reentrant=False), layer):
        found = run(x)[0].float().square().sum()
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
