"""Right factors of large products over many rows, as the GPU reads them the fastest.

The units of a Hopper GPU multiply TF32 of which both factors lie along the inner dimension. A
weight's gradient sums over rows, and neither of its factors lies so: cuBLAS has slower kernels for
that. Once one of them does, it takes the fast ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from ecornn.backends.persistent_calls import products_precision
from ecornn.kernels.persistent.transposed import (
    transpose_arguments,
    transpose_blocks,
    transpose_launcher,
)

#: Multiplications and additions from which a product gains more than the transposition takes.
LEAST_WORK = 1e10
#: So many times the rows of the weights are many. On an H200 of 4,096 gates and 1,024 inputs the
#: product of 16,384 rows took 382 µs instead of 466, transposition included, of 4,096 rows as long
#: as before, and of 1,024 rows 53 instead of 46.
MANY = 4


def right_factor(parts: Sequence[Tensor], outer: int) -> Tensor:
    """The rows of all parts, one after another, for a product that sums over them and whose result
    has `outer` rows. Under the precision that the product will have."""
    first, rows = parts[0], sum([part.shape[0] for part in parts])
    if is_copied(first, rows, first.shape[1], outer, products_precision()):
        return _by_columns(parts, rows)
    return first if len(parts) == 1 else torch.cat(list(parts))


def is_copied(like: Tensor, rows: int, columns: int, outer: int, precision: str) -> bool:
    """Whether such a factor is stored column by column, in a product of such precision."""
    if 2.0 * rows * columns * outer < LEAST_WORK or like.dtype != torch.float32:
        return False
    return precision == "tf32" and reads_along_the_inner(like.device)


def weights_as_factor(w_ih: Tensor, rows: int) -> Tensor:
    """For the input's gradient. The other factor, the gates' gradients, lies along the inner
    dimension already, so that less is gained."""
    return right_factor([w_ih], rows) if is_many(rows, w_ih.shape[0]) else w_ih


def is_many(rows: int, gates: int) -> bool:
    return rows >= MANY * gates


@cache
def reads_along_the_inner(device: torch.device) -> bool:
    """Measured on an H200 alone."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _by_columns(parts: Sequence[Tensor], rows: int) -> Tensor:
    first = parts[0]
    found = first.new_empty(first.shape[1], rows)
    launch, at = transpose_launcher(first.device.index), 0
    for part in parts:
        count = part.shape[0]
        if count > 0:
            values = part if part.stride(1) == 1 else part.contiguous()
            arguments = transpose_arguments(values, found[:, at : at + count])
            launch(arguments, transpose_blocks(count, first.shape[1]))
        at += count
    return found.t()
