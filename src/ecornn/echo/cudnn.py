"""How much memory cuDNN's recurrent layers and CTC loss take beside their results: measured, at a
short length.

What a layer reserves for the backward pass, and its workspaces, are cuDNN's to choose, and grow
with the length by the same bytes a step. So the layer is run for real on two lengths of a few
steps, and what it would take at another length follows. What CUDA's allocator was asked for is
read, so nobody's count of the peak is touched. Not what it handed out: that is more, by up to
megabytes where a larger block was free, and the difference of two lengths is multiplied by many.

The CTC loss has no reserve. Its workspace is for texts as long as cuDNN takes any, whatever they
are: where lengths are on the GPU, cuDNN is told the sizes of the scores alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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


@dataclass(frozen=True)
class AskedLoss:
    """A call of the CTC loss, without its numbers and its frames."""

    batch: int
    classes: int
    deterministic: bool
    device: torch.device


_KNOWN: dict[Asked, tuple[Room, Room]] = {}
_KNOWN_LOSSES: dict[AskedLoss, tuple[int, int]] = {}


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
        with _for_real("its layers", given.device):
            _KNOWN[asked] = measured(asked, SHORT[0]), measured(asked, SHORT[1])
    return at_length(*_KNOWN[asked], steps)


def room_of_ctc(log_probs: Tensor, deterministic: bool) -> int:
    """Bytes that `aten._cudnn_ctc_loss` takes for a while, its lengths being on the GPU."""
    frames, batch, classes = log_probs.shape
    asked = AskedLoss(batch, classes, deterministic, log_probs.device)
    if asked not in _KNOWN_LOSSES:
        with _for_real("a CTC loss", log_probs.device):
            found = measured_loss(asked, SHORT[0]), measured_loss(asked, SHORT[1])
        _KNOWN_LOSSES[asked] = found
    return grown(*_KNOWN_LOSSES[asked], frames)


@contextmanager
def _for_real(what: str, device: torch.device) -> Iterator[None]:
    """Operators run, whatever observes or casts them outside."""
    if not torch.cuda.is_available():
        raise NotUnderstood(f"what cuDNN takes for {what} is measured on a GPU, and none is here")
    as_it_is = torch.autocast(device.type, enabled=False)
    with _disable_current_modes(), torch.no_grad(), as_it_is:
        yield


def at_length(short: Room, longer: Room, steps: int) -> Room:
    return Room(
        grown(short.reserve, longer.reserve, steps),
        grown(short.forward, longer.forward, steps),
        grown(short.backward, longer.backward, steps),
    )


def grown(short: int, longer: int, steps: int) -> int:
    asked = max(0, short + (longer - short) * (steps - SHORT[0]) // (SHORT[1] - SHORT[0]))
    return -(-asked // BLOCK) * BLOCK


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


def measured_loss(asked: AskedLoss, frames: int) -> int:
    """Of texts of one label each."""

    def each(number: int) -> Tensor:
        return torch.full((asked.batch,), number, dtype=torch.int32, device=asked.device)

    scores = torch.zeros(frames, asked.batch, asked.classes, device=asked.device)
    call = (scores, each(1), each(frames), each(1), 0, asked.deterministic, False)
    before = asked_for(asked.device)
    made = aten._cudnn_ctc_loss(*call)
    return asked_for(asked.device) - before - sum(map(_bytes, made))


def in_one_memory(weights: Sequence[Tensor]) -> bool:
    """Are they laid out as torch.nn lays them out for cuDNN? Others are copied at every call. Asked
    of tensors without numbers, which share memory as the true ones do."""
    return len({weight.untyped_storage()._cdata for weight in weights}) == 1


def asked_for(device: torch.device) -> int:
    """Bytes, of the allocator, since the process began."""
    return int(torch.cuda.memory_stats(device)["requested_bytes.all.allocated"])


def _bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.nbytes
