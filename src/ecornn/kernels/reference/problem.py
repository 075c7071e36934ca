"""One direction of one recurrent layer as plain values, and the masks that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

#: Gate inputs are formed for this many elements at a time, so that the loop never holds a
#: whole T·B·G buffer: 4 Mi elements keep the product large and the buffer at 16 MiB.
CHUNK_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class DirectionWeights:
    """Weights of one direction; the field names are `spec.WEIGHT_PARTS`."""

    w_ih: Tensor  # (G, I)
    w_hh: Tensor  # (G, R)
    b_ih: Tensor | None = None  # (G,)
    b_hh: Tensor | None = None  # (G,)
    w_hr: Tensor | None = None  # (R, H) projection
    norm_ih: Tensor | None = None  # (G,) scale of the layer norm on x·w_ihᵀ
    norm_hh: Tensor | None = None  # (G,) scale of the layer norm on h·w_hhᵀ
    norm_c: Tensor | None = None  # (H,) scale and shift of the layer norm on the cell state
    norm_c_bias: Tensor | None = None  # (H,)

    def map(self, change: Callable[[Tensor], Tensor]) -> DirectionWeights:
        """The same weights, each one changed."""
        changed = {
            f.name: change(v) for f in fields(self) if (v := getattr(self, f.name)) is not None
        }
        return DirectionWeights(**changed)

    def to(self, dtype: torch.dtype) -> DirectionWeights:
        return self.map(lambda weight: weight.to(dtype))


@dataclass(frozen=True)
class Problem:
    """Everything one direction's loop needs beside the numbers that flow through it."""

    cell: str
    reverse: bool = False
    reset_to: str = "zero"
    after_end: str = "zeros"
    resets_TB: Tensor | None = None
    lengths_B: Tensor | None = None
    #: 1 where the previous h (c) is kept, 0 where the new one is taken, or the expectation.
    zoneout_h: Tensor | None = None  # broadcastable to (T, B, R)
    zoneout_c: Tensor | None = None  # broadcastable to (T, B, H)


class Masks(NamedTuple):
    """Where a step runs at all, and where the state that enters it is cut off; None: everywhere
    and nowhere."""

    active_TB1: Tensor | None
    cut_TB1: Tensor | None


def masks(problem: Problem, steps: int) -> Masks:
    """A reset is a boundary *before* its step that neither direction crosses.

    So the forward direction is cut where it enters the marked step, the reverse direction where
    it enters the step before it. Resets beyond a sequence's end have no effect.
    """
    active = cut = None
    if problem.lengths_B is not None:
        time_T1 = torch.arange(steps, device=problem.lengths_B.device).unsqueeze(1)
        active = (time_T1 < problem.lengths_B.unsqueeze(0)).unsqueeze(-1)
    if problem.resets_TB is not None:
        cut = problem.resets_TB.unsqueeze(-1)
        if active is not None:
            cut = cut & active
        if problem.reverse:
            cut = torch.cat([cut[1:], torch.zeros_like(cut[:1])])
    return Masks(active, cut)


def input_of(x_TBI: Tensor, mask: Masks, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """The input of steps [start, stop): whatever lies beyond a sequence's end, NaN included,
    must not reach a product."""
    x = x_TBI[start:stop].to(dtype)
    if mask.active_TB1 is None:
        return x
    return torch.where(mask.active_TB1[start:stop], x, x.new_zeros(()))


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half precisions are multiplied and accumulated in float32; h is rounded once a step."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def chunks(steps: int, elements_a_step: int, *, descending: bool) -> Iterator[tuple[int, int]]:
    """Time ranges [start, stop) whose gate inputs fit `CHUNK_ELEMENTS`, in running order."""
    size = max(1, CHUNK_ELEMENTS // max(1, elements_a_step))
    starts = range(0, steps, size)
    for start in reversed(starts) if descending else starts:
        yield start, min(start + size, steps)
