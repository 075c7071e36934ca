"""vmap over operators whose batch is already inside them: the mapped dimension joins the batch.

The forward operator's tensor arguments are (input, h0, c0, weights, resets, lengths, zoneout_h,
zoneout_c); the backward operator's are four gradients, output, cells, kept, two constants
(needs_input, samples), and then the forward operator's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

#: Where each tensor argument of the forward operator has its batch; weights have none.
CALL_BATCH_DIMS: tuple[int | None, ...] = (1, 1, 1, None, 1, 0, 2, 2)
WEIGHTS = 3
#: Gradients, output, cells and kept all have it here.
RESULT_BATCH_DIM = 1
BACKWARD_TENSORS = 7
SAMPLES = 8


def vmap_forward(op: Any, size: int, in_dims: Sequence[Any], args: Sequence[Any]) -> Any:
    """The rule for the forward operator: (results, their mapped dimensions)."""
    if _mapped(in_dims[WEIGHTS]):
        return _one_by_one(op, size, in_dims, args)
    output, h_n, c_n, cells, kept = op(*_fold_call(size, in_dims, args))
    results = [_unfold(t, size) for t in (output, h_n, c_n, cells)]
    unfolded = [_unfold(t, size) for t in kept]
    values = (*(value for value, _ in results), [value for value, _ in unfolded])
    return values, (*(dim for _, dim in results), [dim for _, dim in unfolded])


def vmap_backward(op: Any, size: int, in_dims: Sequence[Any], args: Sequence[Any]) -> Any:
    """The rule for the backward operator: weight gradients come back one a sample."""
    start = SAMPLES + 1
    if _mapped(in_dims[start + WEIGHTS]):
        return _one_by_one(op, size, in_dims, args)

    def fold_result(value: Any, dims: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [fold_result(v, d) for v, d in zip(value, _spread(dims, value), strict=True)]
        if value is None or value.dim() == (0 if dims is None else 1) + 1:
            # nothing, or an empty tensor that stands for nothing
            return value if dims is None else value.select(dims, 0)
        return _fold(value, dims, RESULT_BATCH_DIM, size)

    ahead = [fold_result(args[i], in_dims[i]) for i in range(BACKWARD_TENSORS)]
    needs_input, samples = args[BACKWARD_TENSORS], args[SAMPLES]
    call = _fold_call(size, in_dims[start:], args[start:])
    found = op(*ahead, needs_input, size * samples, *call)

    states = 3 if args[start + 2] is not None else 2
    results = [_unfold(t, size) for t in found[:states]]
    for grad in found[states:]:
        # a weight gradient's leading dimension is the samples, the mapped one outermost; one
        # sample has none
        grad = grad.unsqueeze(0) if size * samples == 1 else grad
        by_sample = grad.view(size, *((samples,) if samples > 1 else ()), *grad.shape[1:])
        results.append((by_sample, 0))
    return [value for value, _ in results], [dim for _, dim in results]


def _fold_call(size: int, in_dims: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    folded = list(args)
    for i, batch_dim in enumerate(CALL_BATCH_DIMS):
        value, dim = args[i], in_dims[i]
        if batch_dim is None or value is None:
            continue
        if batch_dim == 2 and dim is None and value.shape[batch_dim] == 1:
            continue  # a zoneout probability that holds for the whole batch
        folded[i] = _fold(value, dim, batch_dim, size)
    return folded


def _fold(value: Tensor, dim: int | None, batch_dim: int, size: int) -> Tensor:
    """Put the mapped dimension in front of the batch and make the two one."""
    if dim is None:
        value = value.unsqueeze(batch_dim)
        value = value.expand(*value.shape[:batch_dim], size, *value.shape[batch_dim + 1 :])
    else:
        value = value.movedim(dim, batch_dim)
    return value.flatten(batch_dim, batch_dim + 1)


def _unfold(value: Tensor, size: int) -> tuple[Tensor, int | None]:
    if value.dim() <= RESULT_BATCH_DIM:
        return value, None  # empty: stands for nothing
    return value.unflatten(RESULT_BATCH_DIM, (size, -1)), RESULT_BATCH_DIM


def _mapped(dims: Any) -> bool:
    if isinstance(dims, (list, tuple)):
        return any(d is not None for d in dims)
    return dims is not None


def _spread(dims: Any, values: Sequence[Any]) -> Sequence[Any]:
    return dims if isinstance(dims, (list, tuple)) else [dims] * len(values)


def _one_by_one(
    op: Callable[..., Any], size: int, in_dims: Sequence[Any], args: Sequence[Any]
) -> Any:
    """Weights that differ from sample to sample leave nothing to share: one call a sample."""

    def take(value: Any, dims: Any, v: int) -> Any:
        if isinstance(value, (list, tuple)):
            return [take(x, d, v) for x, d in zip(value, _spread(dims, value), strict=True)]
        return value if dims is None else value.select(dims, v)

    each = [op(*(take(a, d, v) for a, d in zip(args, in_dims, strict=True))) for v in range(size)]
    flat = [pytree.tree_flatten(result) for result in each]
    stacked = [torch.stack(column) for column in zip(*(leaves for leaves, _ in flat), strict=True)]
    results = pytree.tree_unflatten(stacked, flat[0][1])
    return results, pytree.tree_map(lambda _: 0, results)
