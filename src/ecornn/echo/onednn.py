"""What oneDNN's LSTM keeps for its backward pass on a CPU: measured, since torch's description of
the operator says nothing of it. It is most of what such a layer holds.

It grows with the length by the same bytes a step, in whole pages. So a long layer is run for real
on two short lengths.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

#: Lengths that are run where a layer is longer than the second.
SHORT = (16, 32)

aten = torch.ops.aten


def workspace_bytes(*args: Any) -> int:
    """Of a call of `mkldnn_rnn_layer`, whose tensors may have no numbers."""
    if not torch.is_grad_enabled():
        return 0
    given, *rest = args
    batch_first = rest[13]
    steps, batch = (given.shape[0], given.shape[1])[:: -1 if batch_first else 1]
    sizes = tuple(tuple(int(n) for n in weight.shape) for weight in rest[:4])
    options = tuple(tuple(o) if isinstance(o, (list, tuple)) else o for o in rest[6:])
    asked = (int(batch), int(given.shape[2]), sizes, tuple(rest[4].shape), given.dtype, options)
    if steps <= SHORT[1]:
        return _measured(int(steps), *asked)
    short, long = (_measured(length, *asked) for length in SHORT)
    return long + (long - short) * (int(steps) - SHORT[1]) // (SHORT[1] - SHORT[0])


@cache
def _measured(
    steps: int,
    batch: int,
    features: int,
    weights: tuple[tuple[int, ...], ...],
    states: tuple[int, ...],
    dtype: torch.dtype,
    options: tuple[Any, ...],
) -> int:
    with _disable_current_modes(), torch.enable_grad():

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype)

        batch_first = options[7]
        given = zeros(batch, steps, features) if batch_first else zeros(steps, batch, features)
        state = zeros(*states)
        again = [list(o) if isinstance(o, tuple) else o for o in options]
        made = aten.mkldnn_rnn_layer(given, *(zeros(*w) for w in weights), state, state, *again)
        return int(made[3].nbytes)
