"""A PackedSequence as a padded batch with lengths, and back.

The size of the batch is a value inside the PackedSequence, so no tracer can know it: under
torch.compile these two run eagerly between two graphs, and fullgraph=True refuses them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn.utils.rnn import PackedSequence


@_disable_dynamo
def pad(packed: PackedSequence) -> tuple[Tensor, Tensor]:
    """(T, B, I) in the packed sequence's own sorted order, and the lengths on its device."""
    steps = packed.batch_sizes.shape[0]
    x, lengths = torch._VF._pad_packed_sequence(packed.data, packed.batch_sizes, False, 0.0, steps)
    return x, lengths.to(x.device)


@_disable_dynamo
def pack(values_TBF: Tensor, like: PackedSequence, lengths_B: Tensor) -> PackedSequence:
    data, sizes = torch._VF._pack_padded_sequence(values_TBF, lengths_B.cpu(), False)
    return PackedSequence(data, sizes, like.sorted_indices, like.unsorted_indices)
