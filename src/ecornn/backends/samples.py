"""Per-sample weight gradients for kernels that only know sums over the batch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ecornn.backends.protocol import (
    Backend,
    BackwardRequest,
    CallGrads,
    LayerCall,
    LayerResult,
    ResultGrads,
)


def sample_by_sample(
    backend: Backend, call: LayerCall, result: LayerResult, grads: ResultGrads, ask: BackwardRequest
) -> CallGrads:
    """One backward pass a sample, put together again."""
    one = BackwardRequest(ask.needs_input)
    parts = [
        backend.backward(
            sample_of(call, s, ask.samples),
            LayerResult(
                _some(_part(result.output_TBO, s, ask.samples)),
                _some(_part(result.h_n_DBR, s, ask.samples)),
                _part(result.c_n_DBH, s, ask.samples),
                _part(result.cells_TBE, s, ask.samples),
                [_some(_part(t, s, ask.samples)) for t in result.kept],
            ),
            ResultGrads(*(_part(g, s, ask.samples) for g in grads)),
            one,
        )
        for s in range(ask.samples)
    ]
    return CallGrads(
        torch.cat([_some(p.input_TBI) for p in parts], 1) if ask.needs_input else None,
        torch.cat([p.h0_DBR for p in parts], 1),
        None if call.c0_DBH is None else torch.cat([_some(p.c0_DBH) for p in parts], 1),
        [torch.stack(column) for column in zip(*(p.weights for p in parts), strict=True)],
    )


def sample_of(call: LayerCall, s: int, samples: int) -> LayerCall:
    """The s-th of `samples` equal groups of a call's batch."""
    lengths = call.lengths_B
    return replace(
        call,
        input_TBI=_some(_part(call.input_TBI, s, samples)),
        h0_DBR=_some(_part(call.h0_DBR, s, samples)),
        c0_DBH=_part(call.c0_DBH, s, samples),
        resets_TB=_part(call.resets_TB, s, samples),
        lengths_B=None if lengths is None else lengths.chunk(samples)[s],
        zoneout_h=_part(call.zoneout_h, s, samples, 2),
        zoneout_c=_part(call.zoneout_c, s, samples, 2),
    )


def _part(value: Tensor | None, s: int, samples: int, dim: int = 1) -> Tensor | None:
    if value is None or value.dim() <= dim or value.shape[dim] == 1:
        return value
    size = value.shape[dim] // samples
    return value.narrow(dim, s * size, size)


def _some(value: Tensor | None) -> Tensor:
    assert value is not None
    return value
