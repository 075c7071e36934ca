"""A PackedSequence as a padded batch with lengths, and back.

Each way is one gather of rows; torch's own functions loop over the steps, and their gradients
take longer than a small layer does.

The size of the batch is a value inside the PackedSequence, so no tracer can know it: under
torch.compile these two run eagerly between two graphs, and fullgraph=True refuses them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn.utils.rnn import PackedSequence
from torch.utils.weak import WeakTensorKeyDictionary

from ecornn.errors import InvalidInput
from ecornn.ops.transforms import transforms_active


class _Rows(NamedTuple):
    """Where a packed sequence's steps stand, on its device."""

    version: int  # of the sizes these were found from
    padded: Tensor  # for each step and sequence, a row of the data: T · B of them
    packed: Tensor  # for each row of the data, its place among the padded ones
    lengths: Tensor
    shape: tuple[int, int]


#: By the tensor of batch sizes, as long as that lives: finding them and bringing them to a GPU
#: takes as long as a small layer, and a CUDA graph cannot do it.
_ROWS = WeakTensorKeyDictionary()
#: Those that a captured graph reads, each once, by its identity: the graph may be replayed when
#: their packed sequence is gone. Nobody tells when the graph is, so they are never forgotten.
_CAPTURED: dict[int, _Rows] = {}


@_disable_dynamo
def pad(packed: PackedSequence) -> tuple[Tensor, Tensor]:
    """(T, B, I) in the packed sequence's own sorted order, and the lengths on its device. What
    lies beyond an end is some other row of the data."""
    rows = _rows(packed.batch_sizes, packed.data)
    return packed.data.index_select(0, rows.padded).unflatten(0, rows.shape), rows.lengths


@_disable_dynamo
def pack(values_TBF: Tensor, like: PackedSequence) -> PackedSequence:
    """The steps of `values` that `like` has, packed in its order."""
    rows = _rows(like.batch_sizes, values_TBF)
    data = values_TBF.flatten(0, 1).index_select(0, rows.packed)
    return PackedSequence(data, like.batch_sizes, like.sorted_indices, like.unsorted_indices)


def _rows(batch_sizes: Tensor, near: Tensor) -> _Rows:
    """On the device of `near`."""
    if type(batch_sizes) is not Tensor or batch_sizes.is_inference():
        return _find(batch_sizes, 0, near.device)  # it has no version
    found: _Rows | None = _ROWS.get(batch_sizes)
    known = found is not None and found.lengths.device == near.device
    captured = _is_captured(near)
    if not known or found is None or found.version != batch_sizes._version:
        if captured:
            raise InvalidInput(
                "input",
                "a PackedSequence that is new while a CUDA graph is captured",
                "one that the layer was called with before",
                "call the layer once with the same PackedSequence before the capture",
            )
        with torch.inference_mode(False):
            found = _find(batch_sizes, batch_sizes._version, near.device)
        if not transforms_active():  # torch.func's tensors are wrapped, and end with the transform
            _ROWS[batch_sizes] = found
    if captured:
        _CAPTURED[id(found)] = found
    return found


def _is_captured(near: Tensor) -> bool:
    return near.is_cuda and torch.cuda.is_current_stream_capturing()


def _find(batch_sizes: Tensor, version: int, device: torch.device) -> _Rows:
    sizes_T1 = batch_sizes.unsqueeze(1)
    batch = int(batch_sizes[0])
    begins_T1 = sizes_T1.cumsum(0) - sizes_T1
    sequences_B = torch.arange(batch, device=batch_sizes.device)
    padded_TB = begins_T1 + torch.minimum(sequences_B, sizes_T1 - 1)
    is_step_TB = sequences_B < sizes_T1
    return _Rows(
        version,
        padded_TB.flatten().to(device),
        is_step_TB.flatten().nonzero().squeeze(1).to(device),
        is_step_TB.sum(0).to(device),
        (len(sizes_T1), batch),
    )
