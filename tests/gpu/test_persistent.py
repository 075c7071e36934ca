"""The persistent kernels on a GPU, against the definition in float64: every cell, number format,
regime of exchange and feature."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import ecornn
from ecornn.backends.protocol import BackwardRequest, LayerCall, ResultGrads
from ecornn.backends.registry import by_name
from ecornn.kernels.persistent import device
from ecornn.kernels.persistent.choose import Request, candidates
from ecornn.kernels.persistent.tile import Geometry
from ecornn.kernels.reference import DirectionWeights
from support.persistent_calls import (
    arriving,
    assert_like_the_definition,
    make_call,
    run,
    widened,
)
from support.tolerances import ONE_STEP, assert_matches

pytestmark = pytest.mark.gpu

CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
HALVES = (torch.bfloat16, torch.float16)
#: TF32 has half precision's eleven bits.
TF32_BOUND = ONE_STEP[torch.float16]


@pytest.fixture(params=["tf32", "tf32x3", "ieee"])
def float32_products(request: Any) -> Any:
    rnn = torch.backends.cudnn.rnn
    before = rnn.fp32_precision
    rnn.fp32_precision = "none" if request.param == "tf32x3" else request.param
    assert device.numbers_of(torch.float32) == request.param
    yield request.param
    rnn.fp32_precision = before


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


@pytest.mark.parametrize("float32_products", ["ieee"], indirect=True)
@pytest.mark.parametrize(
    ("hidden", "batch"),
    # every width of a tile, by groups of sequences that the chip has room for, and odd sizes
    [*SIZES, (512, 7), (1024, 1), (1024, 2), (1, 1), (7, 3), (100, 5), (333, 9), (1001, 2)],
)
@pytest.mark.parametrize("cell", CELLS)
def test_ieee(cell: str, hidden: int, batch: int, float32_products: str) -> None:
    assert_like_the_definition(make_call(cell, torch.float32, hidden, batch, 12, inputs=5))


@pytest.mark.parametrize("float32_products", ["ieee"], indirect=True)
@pytest.mark.parametrize("hidden", [40, 256, 1024])
@pytest.mark.parametrize("cell", CELLS)
def test_ieee_both_ways_with_ends_and_resets(cell: str, hidden: int, float32_products: str) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    lengths = torch.tensor([19, 1, 7, 18, 12, 3], device="cuda")
    resets = torch.rand(19, 6, generator=generator, device="cuda") < 0.2
    more: dict[str, Any] = {"lengths_B": lengths, "resets_TB": resets, "directions": 2}
    assert_like_the_definition(make_call(cell, torch.float32, hidden, 6, 19, **more))


def test_a_layer_says_how_it_multiplies(float32_products: str) -> None:
    layer = ecornn.LSTM(256, 256, backend="persistent", device="cuda")
    many, few = (str(layer.explain(torch.randn(20, n, 256, device="cuda"))) for n in (64, 4))
    for kernel in ("forward", "backward"):
        assert f"{kernel} lstm {float32_products}:" in many
        # of few sequences the ordinary units were measured to be the quicker ones (decision 0037)
        assert f"{kernel} lstm ieee:" in few
    better = f"ieee is as precise as {float32_products} at least"
    assert (better in few) == (float32_products != "ieee")


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
