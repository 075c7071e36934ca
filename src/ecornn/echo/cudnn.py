"""How much memory cuDNN's recurrent layers take beside their results: measured, at a short length.

What a layer reserves for the backward pass, and its workspaces, are cuDNN's to choose, and grow
with the length by the same bytes a step. So the layer is run for real on two lengths of a few
steps, and what it would take at another length follows. What CUDA's allocator was asked for is
read, so nobody's count of the peak is touched. Not what it handed out: that is more, by up to
megabytes where a larger block was free, and the difference of two lengths is multiplied by many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ecornn.echo.graph import NotUnderstood

#: Lengths that are run.
SHORT = (2, 6)
#: The allocator hands out a multiple of this.
BLOCK = 512

aten = torch.ops.aten


@dataclass(frozen=True)
class Room:
    """Bytes that are kept for the backward pass, and those that each pass takes for a while."""

    reserve: int
    forward: int
    backward: int


@dataclass(frozen=True)
class Asked:
    """A layer's call, without its numbers and its length. `options`: those of the operator, but
    for the lengths of a packed sequence and the state of the dropout."""

    batch: int
    features: int
    weights: tuple[tuple[int, ...], ...]
    stride0: int
    states: tuple[int, ...]
    cells: tuple[int, ...] | None
    options: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device


_KNOWN: dict[Asked, tuple[Room, Room]] = {}


def room_of_cudnn(
    given: Tensor,
    weights: list[Tensor],
    stride0: int,
    _buffer: Tensor | None,
    hx: Tensor,
    cx: Tensor | None,
    *options: Any,
) -> Room:
    """The arguments of `aten._cudnn_rnn`."""
    batch_first, dropout, train, packed = options[4], options[5], options[6], options[8]
    if len(packed):
        raise NotUnderstood("what cuDNN's layers take of a packed sequence is not known")
    if train and dropout:
        raise NotUnderstood("what cuDNN's layers take for dropout is not known")
    steps, batch = given.shape[1 if batch_first else 0], given.shape[0 if batch_first else 1]
    cells = None if cx is None else tuple(cx.shape)
    asked = Asked(
        batch,
        given.shape[2],
        tuple(tuple(weight.shape) for weight in weights),
        stride0,
        tuple(hx.shape),
        cells,
        tuple(options[:8]),
        given.dtype,
        given.device,
    )
    if asked not in _KNOWN:
        if not torch.cuda.is_available():
            raise NotUnderstood("what cuDNN's layers take is measured on a GPU, and none is here")
        as_it_is = torch.autocast(given.device.type, enabled=False)
        with _disable_current_modes(), torch.no_grad(), as_it_is:
            _KNOWN[asked] = measured(asked, SHORT[0]), measured(asked, SHORT[1])
    return at_length(*_KNOWN[asked], steps)


def at_length(short: Room, longer: Room, steps: int) -> Room:
    def of(a: int, b: int) -> int:
        asked = max(0, a + (b - a) * (steps - SHORT[0]) // (SHORT[1] - SHORT[0]))
        return -(-asked // BLOCK) * BLOCK

    return Room(
        of(short.reserve, longer.reserve),
        of(short.forward, longer.forward),
        of(short.backward, longer.backward),
    )


def measured(asked: Asked, steps: int) -> Room:
    """The weights lie in one memory, as torch.nn's do. Where they do not, the operator makes it,
    and returns it: whoever calls it counts that."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=asked.dtype, device=asked.device)

    mode, hidden, projected, layers, batch_first, _, train, bidirectional = asked.options
    first, second = (asked.batch, steps) if batch_first else (steps, asked.batch)
    given = zeros(first, second, asked.features)
    weights = [zeros(*shape) for shape in asked.weights]
    buffer = aten._cudnn_rnn_flatten_weight(
        *(weights, asked.stride0, asked.features, mode, hidden),
        *(projected, layers, batch_first, bidirectional),
    )
    hx = zeros(*asked.states)
    cx = None if asked.cells is None else zeros(*asked.cells)
    call = (given, weights, asked.stride0, buffer, hx, cx)
    options = (*asked.options, (), None)
    before = asked_for(asked.device)
    output, *states, reserve, _ = aten._cudnn_rnn(*call, *options)
    taken = asked_for(asked.device) - before
    kept = _bytes(reserve)
    forward = taken - kept - sum(map(_bytes, (output, *states)))
    if not train:
        return Room(kept, forward, 0)
    arriving = torch.zeros_like(output)
    # to ask for the cells of a layer that has none is refused
    wanted = [True, True, cx is not None, True]
    before = asked_for(asked.device)
    made = aten._cudnn_rnn_backward(*call, output, arriving, None, None, *options, reserve, wanted)
    taken = asked_for(asked.device) - before
    backward = taken - sum(map(_bytes, made[:3])) - _bytes(buffer)  # the weights' gradients
    # the gradients of the input and of the weights are two calls, one workspace after the other
    return Room(kept, forward, backward // 2)


def in_one_memory(weights: Sequence[Tensor]) -> bool:
    """Are they laid out as torch.nn lays them out for cuDNN? Others are copied at every call. Asked
    of tensors without numbers, which share memory as the true ones do."""
    return len({weight.untyped_storage()._cdata for weight in weights}) == 1


def asked_for(device: torch.device) -> int:
    """Bytes, of the allocator, since the process began."""
    return int(torch.cuda.memory_stats(device)["requested_bytes.all.allocated"])


def _bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.nbytes
