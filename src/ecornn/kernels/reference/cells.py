"""Arithmetic of one step of each cell, and its derivative, after the products are done.

A cell sees its pre-activations `pre` (what the gates' non-linearities are applied to) and the
state that enters the step. The pre-activations are the sum of the input's and the state's gate
contributions, except for the GRU's candidate, whose two contributions stay apart because the
reset gate stands between them: `pre` is (r, z, n from the input, n from the state).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

#: torch.nn.LayerNorm's default.
NORM_EPSILON = 1e-5


class Norm(NamedTuple):
    """A layer norm's result before scale and shift, and the factor its derivative needs."""

    normalized: Tensor
    inverse_deviation: Tensor


def layer_norm(x: Tensor) -> Norm:
    centred = x - x.mean(-1, keepdim=True)
    inverse = torch.rsqrt(centred.square().mean(-1, keepdim=True) + NORM_EPSILON)
    return Norm(centred * inverse, inverse)


def layer_norm_backward(grad: Tensor, norm: Norm) -> Tensor:
    """Gradient of the normalized value (scale already applied) with respect to what entered."""
    normalized, inverse = norm
    along = (grad * normalized).mean(-1, keepdim=True)
    return (grad - grad.mean(-1, keepdim=True) - normalized * along) * inverse


def preactivations(cell: str, from_input: Tensor, from_state: Tensor) -> Tensor:
    if cell != "gru":
        return from_input + from_state
    hidden = from_input.shape[-1] // 3
    both = from_input[..., : 2 * hidden] + from_state[..., : 2 * hidden]
    return torch.cat([both, from_input[..., 2 * hidden :], from_state[..., 2 * hidden :]], -1)


def activate(cell: str, pre: Tensor) -> tuple[Tensor, ...]:
    """The gates: (i, f, g, o); (r, z, n, the state's share of n); or (y,)."""
    if cell == "lstm":
        i, f, g, o = pre.chunk(4, -1)
        return i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    if cell == "gru":
        r, z, n_input, n_state = pre.chunk(4, -1)
        r = r.sigmoid()
        return r, z.sigmoid(), (n_input + r * n_state).tanh(), n_state
    return (pre.tanh() if cell == "rnn_tanh" else pre.relu(),)


def lstm_cell_state(gates: tuple[Tensor, ...], c_in: Tensor) -> Tensor:
    i, f, g, _ = gates
    return f * c_in + i * g


def gru_output(gates: tuple[Tensor, ...], h_in: Tensor) -> Tensor:
    _, z, n, _ = gates
    return n + z * (h_in - n)


def lstm_backward(
    gates: tuple[Tensor, ...], c_in: Tensor, d_output_gate: Tensor, d_cell: Tensor
) -> tuple[Tensor, Tensor]:
    """(gradient of `pre`, gradient of c_in) from those of o and of the new cell state."""
    i, f, g, o = gates
    d_pre = torch.cat(
        [
            d_cell * g * i * (1 - i),
            d_cell * c_in * f * (1 - f),
            d_cell * i * (1 - g * g),
            d_output_gate * o * (1 - o),
        ],
        -1,
    )
    return d_pre, d_cell * f


def gru_backward(
    gates: tuple[Tensor, ...], h_in: Tensor, d_y: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of the input's gates, of the state's gates, of h_in directly)."""
    r, z, n, n_state = gates
    d_n = d_y * (1 - z) * (1 - n * n)
    d_r = d_n * n_state * r * (1 - r)
    d_z = d_y * (h_in - n) * z * (1 - z)
    d_both = torch.cat([d_r, d_z], -1)
    return torch.cat([d_both, d_n], -1), torch.cat([d_both, d_n * r], -1), d_y * z


def rnn_backward(cell: str, gates: tuple[Tensor, ...], d_y: Tensor) -> Tensor:
    (y,) = gates
    return d_y * (1 - y * y) if cell == "rnn_tanh" else d_y * (y > 0)
