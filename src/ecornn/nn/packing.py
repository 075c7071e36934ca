"""A PackedSequence as a padded batch with lengths, and back.

Each way is one gather of rows; torch's own functions loop over the steps, and their gradients
take longer than a small layer does.

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
    """(T, B, I) in the packed sequence's own sorted order, and the lengths on its device. What
    lies beyond an end is some other row of the data."""
    sizes_T1 = packed.batch_sizes.unsqueeze(1)
    batch = int(packed.batch_sizes[0])
    begins_T1 = sizes_T1.cumsum(0) - sizes_T1
    rows_TB = begins_T1 + torch.minimum(torch.arange(batch), sizes_T1 - 1)
    rows = rows_TB.flatten().to(packed.data.device)
    x = packed.data.index_select(0, rows).unflatten(0, (len(sizes_T1), batch))
    return x, _is_step(packed.batch_sizes, batch).sum(0).to(packed.data.device)


@_disable_dynamo
def pack(values_TBF: Tensor, like: PackedSequence) -> PackedSequence:
    """The steps of `values` that `like` has, packed in its order."""
    steps = _is_step(like.batch_sizes, values_TBF.shape[1]).flatten().nonzero().squeeze(1)
    data = values_TBF.flatten(0, 1).index_select(0, steps.to(values_TBF.device))
    return PackedSequence(data, like.batch_sizes, like.sorted_indices, like.unsorted_indices)


def _is_step(batch_sizes: Tensor, batch: int) -> Tensor:
    """(T, B): whether the packed sequence has this step of this sequence."""
    return torch.arange(batch) < batch_sizes.unsqueeze(1)
