"""The reference's explicit backward pass against autograd through its forward pass, float64."""

from __future__ import annotations

import itertools
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from ecornn.kernels import reference
from ecornn.kernels.reference import DirectionWeights, Problem, problem
from ecornn.kernels.reference.backward import Kept, OutputGrads
from ecornn.spec import GATES, weight_layout
from support.tolerances import assert_matches, tolerance

STEPS, BATCH, INPUT, HIDDEN, PROJECTED = 5, 3, 2, 4, 3
CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def make_weights(cell: str, *, bias: bool, projection: bool, norm: bool) -> DirectionWeights:
    rows = GATES[cell] * HIDDEN
    state = PROJECTED if projection else HIDDEN
    shapes = {
        "w_ih": (rows, INPUT),
        "w_hh": (rows, state),
        "w_hr": (PROJECTED, HIDDEN),
        "norm_c": (HIDDEN,),
        "norm_c_bias": (HIDDEN,),
    }
    layout = weight_layout(cell, bias=bias, projection=projection, layer_norm=norm)
    return DirectionWeights(**{n: leaf(*shapes.get(n, (rows,))) for n in layout.split(",")})


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def make_problem(cell: str, reverse: bool, resets: str, lengths: str, zoneout: bool) -> Problem:
    drawn = torch.rand(STEPS, BATCH, 1, dtype=torch.float64).round()
    return Problem(
        cell,
        reverse,
        reset_to=resets or "zero",
        after_end=lengths or "zeros",
        resets_TB=torch.rand(STEPS, BATCH) < 0.4 if resets else None,
        lengths_B=torch.tensor([STEPS, 0, 3]) if lengths else None,
        zoneout_h=drawn if zoneout else None,
        zoneout_c=torch.full((1, 1, 1), 0.3, dtype=torch.float64) if zoneout else None,
    )


def parts(w: DirectionWeights) -> dict[str, Tensor]:
    found = {f.name: getattr(w, f.name) for f in fields(w)}
    return {name: value for name, value in found.items() if value is not None}


@pytest.mark.parametrize("chunk", [1 << 22, 40], ids=["one chunk", "many chunks"])
@pytest.mark.parametrize("keep", ["states", "gates"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("cell", CELLS)
def test_every_gradient_equals_autograds(
    cell: str, reverse: bool, keep: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(problem, "CHUNK_ELEMENTS", chunk)
    features = itertools.product(
        (False, True),  # bias
        (False, True) if cell == "lstm" else (False,),  # projection
        (False, True),  # layer norm
        ("", "zero", "initial"),  # resets
        ("", "zeros", "frozen"),  # lengths
        (False, True),  # zoneout
    )
    for bias, projection, norm, resets, lengths, zoneout in features:
        w = make_weights(cell, bias=bias, projection=projection, norm=norm)
        asked = make_problem(cell, reverse, resets, lengths, zoneout)
        x, h0 = leaf(STEPS, BATCH, INPUT), leaf(BATCH, w.w_hh.shape[1])
        c0 = leaf(BATCH, HIDDEN) if cell == "lstm" else None
        made = reference.forward(x, h0, c0, w, asked, keep)
        outputs = [t for t in made[:4] if t is not None]
        d_outputs = [torch.randn_like(t) for t in outputs]
        names = ["x", "h0", *(["c0"] if c0 is not None else []), *parts(w)]
        inputs = [x, h0, *([c0] if c0 is not None else []), *parts(w).values()]
        expected = torch.autograd.grad(outputs, inputs, d_outputs)

        rest = iter(d_outputs)
        arriving = OutputGrads(*(None if t is None else next(rest) for t in made[:4]))
        kept = Kept(made.output_TBR, made.cells_TBH, made.pre_TBK, made.raw_TBG)
        with torch.no_grad():
            found = reference.backward(arriving, x, h0, c0, w, asked, kept)
        states = [found.h0_BR] if found.c0_BH is None else [found.h0_BR, found.c0_BH]
        mine = [found.x_TBI, *states, *parts(found.weights).values()]
        for name, a, b in zip(names, mine, expected, strict=True):
            assert a is not None
            case = f"{name} with {bias=} {projection=} {norm=} {resets=} {lengths=} {zoneout=}"
            assert_matches(a, b, tolerance(torch.float64, STEPS, order=1), case)


@pytest.mark.parametrize("cell", CELLS)
def test_per_sample_weight_gradients_equal_one_backward_a_sample(cell: str) -> None:
    samples, size = 3, 2
    w = make_weights(cell, bias=True, projection=False, norm=True)
    asked = Problem(cell)
    x, h0 = leaf(STEPS, samples * size, INPUT), leaf(samples * size, HIDDEN)
    c0 = leaf(samples * size, HIDDEN) if cell == "lstm" else None
    d_output = torch.randn(STEPS, samples * size, HIDDEN, dtype=torch.float64)

    def gradients(rows: slice, samples: int) -> dict[str, Tensor]:
        c = None if c0 is None else c0[rows]
        made = reference.forward(x[:, rows], h0[rows], c, w, asked, "states")
        kept = Kept(made.output_TBR, made.cells_TBH)
        arriving = OutputGrads(d_output[:, rows], None, None, None)
        found = reference.backward(
            arriving, x[:, rows], h0[rows], c, w, asked, kept, samples=samples
        )
        return parts(found.weights)

    together = gradients(slice(None), samples)
    for s in range(samples):
        for name, value in gradients(slice(s * size, (s + 1) * size), 1).items():
            assert_matches(together[name][s], value, tolerance(torch.float64, STEPS), name)


@pytest.mark.parametrize("keep", ["none", "states", "gates"])
def test_only_what_is_asked_for_is_kept(keep: str) -> None:
    w = make_weights("gru", bias=True, projection=False, norm=True)
    made = reference.forward(leaf(3, 2, INPUT), leaf(2, HIDDEN), None, w, Problem("gru"), keep)
    assert (made.pre_TBK is not None) == (keep == "gates")
    assert (made.raw_TBG is not None) == (keep == "gates")
    assert made.cells_TBH is None
    assert made.c_n_BH is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_accumulated_in_float32(dtype: torch.dtype) -> None:
    """A product over 4096 ones would stop growing at 256 (bf16) or 2048 (fp16) in its own dtype."""
    hidden = 4096
    w = DirectionWeights(torch.zeros(1, 1), torch.ones(1, hidden)).to(dtype)
    h0 = torch.full((1, hidden), 1 / hidden, dtype=dtype)
    made = reference.forward(torch.zeros(1, 1, 1, dtype=dtype), h0, None, w, Problem("rnn_relu"))
    assert made.output_TBR.dtype == dtype
    assert made.output_TBR.item() == 1.0
