"""One call of torch's own recurrent kernels, recorded by autograd as torch.nn's layers are."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor


class NetworkCall(NamedTuple):
    """A whole stack in one call of ATen, time first; `weights` as torch.nn lists them."""

    cell: str
    input_TBI: Tensor
    h0: Tensor  # (layers · D, B, R)
    c0: Tensor | None
    weights: list[Tensor]
    bias: bool
    layers: int
    bidirectional: bool
    dropout: float
    needs_grad: bool


def run_network(call: NetworkCall) -> tuple[Tensor, Tensor, Tensor | None]:
    """(output, h_n, c_n), recorded by autograd as torch.nn's own layers are."""
    weights = call.weights
    if call.input_TBI.is_cuda:
        weights = in_one_buffer(weights, call.bias, per_direction=_weights_a_direction(call))
    common = (
        weights,
        call.bias,
        call.layers,
        call.dropout,
        # cuDNN has a backward pass only for calls marked as training; with no dropout the mark
        # changes nothing else
        call.needs_grad or call.dropout > 0,
        call.bidirectional,
        False,
    )
    h0 = call.h0.contiguous()
    if call.cell == "lstm":
        assert call.c0 is not None
        output, h_n, c_n = torch.lstm(call.input_TBI, (h0, call.c0.contiguous()), *common)
        return output, h_n, c_n
    run = {"gru": torch.gru, "rnn_tanh": torch.rnn_tanh, "rnn_relu": torch.rnn_relu}[call.cell]
    output, h_n = run(call.input_TBI, h0, *common)
    return output, h_n, None


def _weights_a_direction(call: NetworkCall) -> int:
    return len(call.weights) // (call.layers * (2 if call.bidirectional else 1))


def in_one_buffer(weights: list[Tensor], bias: bool, per_direction: int) -> list[Tensor]:
    """Views of one buffer that holds the weights as they are now, in cuDNN's order.

    cuDNN wants every matrix and then every bias of the stack in one piece of memory. torch.nn lays
    parameters out so when a layer is moved to CUDA, and where they still are, they are used in
    place. Where they are not (tied, pruned, re-parametrized, sharded, copied), torch warns and
    copies; here one kernel copies them as they are now.
    """
    order = _cudnn_order(len(weights), bias, per_direction)
    # cuDNN's buffer has room for two biases a direction whether they are used or not
    room = 0 if bias else len(weights) // per_direction * 2 * weights[0].shape[0]
    if _in_one_buffer_already([weights[i] for i in order], room):
        return weights
    pieces = [weights[i].reshape(-1) for i in order]
    flat = torch.cat([*pieces, weights[0].new_zeros(room)] if room else pieces)
    views: list[Tensor] = [flat] * len(weights)
    for i, view in zip(order, flat.split([*(p.numel() for p in pieces), room]), strict=False):
        views[i] = view.view(weights[i].shape)
    return views


@cache
def _cudnn_order(count: int, bias: bool, per_direction: int) -> tuple[int, ...]:
    """Every matrix, then every bias."""
    is_bias = [bias and i % per_direction in (2, 3) for i in range(count)]
    return tuple(sorted(range(count), key=lambda i: (is_bias[i], i)))


def _in_one_buffer_already(weights: list[Tensor], room: int) -> bool:
    """Whether the weights lie one after another from the start of their storage, with so much
    room behind them."""
    storage = weights[0].untyped_storage()
    expected = storage.data_ptr()
    size = weights[0].element_size()
    for weight in weights:
        if weight.data_ptr() != expected or not weight.is_contiguous():
            return False
        expected += weight.numel() * size
    return expected + room * size <= storage.data_ptr() + storage.nbytes()
