"""One call of torch's own recurrent kernels, recorded by autograd as torch.nn's layers are."""

from __future__ import annotations

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

    cuDNN wants every matrix and then every bias of the stack in one piece of memory, and torch
    warns and copies on each call where they are not. The parameters stay where they are, so
    that tying, pruning, sharding or swapping them needs no care; the copy costs one kernel.
    """
    is_bias = [bias and i % per_direction in (2, 3) for i in range(len(weights))]
    order = sorted(range(len(weights)), key=lambda i: (is_bias[i], i))
    if bias and _in_one_buffer_already([weights[i] for i in order]):
        return weights
    pieces = [weights[i].reshape(-1) for i in order]
    if not bias:
        # cuDNN's buffer has room for two biases a direction whether they are used or not
        directions = len(weights) // per_direction
        pieces.append(weights[0].new_zeros(directions * 2 * weights[0].shape[0]))
    flat = torch.cat(pieces)
    views: list[Tensor] = [flat] * len(weights)
    for i, view in zip(order, flat.split([piece.numel() for piece in pieces]), strict=False):
        views[i] = view.view(weights[i].shape)
    return views


def _in_one_buffer_already(weights: list[Tensor]) -> bool:
    """Whether the weights lie one after another from the start of their storage, as those of a
    torch.nn layer on CUDA do."""
    expected = weights[0].untyped_storage().data_ptr()
    for weight in weights:
        if weight.data_ptr() != expected or not weight.is_contiguous():
            return False
        expected += weight.numel() * weight.element_size()
    return True
