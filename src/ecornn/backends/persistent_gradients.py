"""All gradients of a small layer of one direction from those of its gates, by one launch."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from ecornn.kernels.persistent.device import numbers_of
from ecornn.kernels.persistent.gradients import (
    GradientArguments,
    blocks,
    gradient_launcher,
    is_small,
    split_on,
)

#: All fields of the arguments at once, to the structure's padded end.
_PACKED = struct.Struct("@10Q7i4x")


class AtOnce:
    """Layers of one size, which `serves` said yes to."""

    def __init__(self, cell: str, x_TBI: Tensor, hidden: int) -> None:
        steps, batch, inputs = x_TBI.shape
        numbers = numbers_of(x_TBI.dtype)
        assert numbers is not None
        self._launch = gradient_launcher(cell, numbers, x_TBI.device.index)
        size = (cell, steps * batch, hidden, inputs, self._launch.geometry.tile.cluster)
        self._blocks = [blocks(*size, needs_input=needed) for needed in (False, True)]
        self._sizes = (steps * batch, batch, hidden, inputs, hidden, 0)
        vector = 16 // x_TBI.element_size()
        self._by_vectors = hidden % vector == 0 and inputs % vector == 0

    @staticmethod
    def serves(cell: str, x_TBI: Tensor, hidden: int) -> bool:
        steps, batch, inputs = x_TBI.shape
        size, split = (steps * batch, hidden, inputs), split_on(x_TBI.device)
        return 0 not in size and is_small(cell, x_TBI.dtype, *size, split=split)

    def __call__(
        self,
        d_gates: Tensor,
        x: Tensor,
        h0: Tensor,
        weights: Sequence[Tensor],
        output: Tensor,
        *,
        needs_input: bool,
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Those of the input and of the weights, which are (w_ih, w_hh), or with both biases. All
        are contiguous."""
        d_input = torch.empty_like(x) if needs_input else None
        d_weights = [torch.empty_like(w) for w in weights]
        xs, y, h, w = x.data_ptr(), output.data_ptr(), h0.data_ptr(), weights[0].data_ptr()
        places = [d.data_ptr() for d in d_weights]
        packed = _PACKED.pack(
            *(d_gates.data_ptr(), xs, y, h, w, 0 if d_input is None else d_input.data_ptr()),
            *(places if len(places) == 4 else (*places, 0, 0)),
            *self._sizes,
            self._by_vectors and (xs | y | h | w) % 16 == 0,
        )
        self._launch(GradientArguments.from_buffer_copy(packed), self._blocks[needs_input])
        return d_input, d_weights
