"""What the operator declares of its gates, and the mode that a compiler may choose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import ecornn
from ecornn.ops.keeping import FEW_BYTES, Gates, flops_of, gate_shapes, gates_of
from ecornn.ops.recurrence import read_call
from ecornn.spec import weight_layout

forward = torch.ops.ecornn.recurrence
backward = torch.ops.ecornn.recurrence_backward
STEPS, BATCH, WIDTH, HIDDEN = 7, 3, 5, 4
ROWS = {"lstm": 4, "gru": 3, "rnn_tanh": 1}


def arguments(cell: str, keep: str, directions: int = 1, norm: bool = False) -> list[Any]:
    torch.manual_seed(0)
    layer = {"lstm": ecornn.LSTM, "gru": ecornn.GRU, "rnn_tanh": ecornn.RNN}[cell](
        WIDTH, HIDDEN, bidirectional=directions == 2, layer_norm=norm
    )
    weights = [weight.detach() for weight in layer._weights_now(False)]
    h0 = torch.randn(directions, BATCH, HIDDEN)
    c0 = torch.randn(directions, BATCH, HIDDEN) if cell == "lstm" else None
    layout = weight_layout(cell, bias=True, projection=False, layer_norm=norm)
    constants = (cell, layout, "zero", "zeros", False, "reference", keep)
    return [torch.randn(STEPS, BATCH, WIDTH), h0, c0, weights, None, None, None, None, *constants]


def results(args: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """(what is kept, gradients)"""
    output, _, _, cells, kept = forward(*args)
    grads = (torch.ones_like(output), None, None, None)
    return kept, backward(*grads, output, cells, kept, True, 1, *args)


@pytest.mark.parametrize("cell", ROWS)
def test_a_mode_that_nobody_chose_is_states(cell: str) -> None:
    kept, found = results(arguments(cell, "auto"))
    assert kept == []
    assert all(map(torch.equal, found, results(arguments(cell, "states"))[1]))
    torch.library.opcheck(forward.default, arguments(cell, "auto"))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("cell", ROWS)
def test_gates_are_as_large_as_declared(cell: str, directions: int, norm: bool) -> None:
    args = arguments(cell, "gates", directions, norm)
    kept, _ = results(args)
    call = read_call(*args)
    assert [tuple(one.shape) for one in kept] == gate_shapes(call)
    gates = gates_of(call)
    assert gates.bytes == sum(one.nbytes for one in kept) == directions * gates.bytes_of_direction
    assert gates.flops == 2 * STEPS * BATCH * directions * ROWS[cell] * HIDDEN * (WIDTH + HIDDEN)
    read = STEPS * BATCH * (WIDTH + HIDDEN) + ROWS[cell] * HIDDEN * (WIDTH + HIDDEN)
    assert gates.read_bytes == 4 * directions * read


def test_few() -> None:
    assert Gates(2 * FEW_BYTES, FEW_BYTES, 1, 1).few
    assert not Gates(FEW_BYTES + 1, FEW_BYTES + 1, 1, 1).few


@pytest.mark.parametrize("cell", ROWS)
def test_torch_counts_the_arithmetic(cell: str) -> None:
    """As that of its own layers' products: of one step, a cell's; backwards twice as much, and the
    gates where they are made again."""
    args = arguments(cell, "gates")
    once = flops_of(read_call(*args))
    module = {"lstm": nn.LSTMCell, "gru": nn.GRUCell, "rnn_tanh": nn.RNNCell}[cell](WIDTH, HIDDEN)
    with FlopCounterMode(display=False) as of_torch:
        module(torch.randn(STEPS * BATCH, WIDTH))
    assert once == of_torch.get_total_flops()
    for keep, times in (("gates", 3), ("states", 4), ("auto", 4)):
        with FlopCounterMode(display=False) as counted:
            results(arguments(cell, keep))
        assert counted.get_total_flops() == times * once
