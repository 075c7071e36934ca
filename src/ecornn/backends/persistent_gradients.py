"""All gradients of a layer of one direction from those of its gates: of a small one by one launch,
of others by torch's products."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from ecornn.backends.persistent_calls import Matched, column_sums
from ecornn.backends.persistent_products import right_factor, weights_as_factor
from ecornn.backends.zeros import is_zero_state
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


class GateGradients:
    """The same for layers of any size, by whichever is the better way."""

    def __init__(self, cell: str, x_TBI: Tensor, hidden: int) -> None:
        self.at_once = AtOnce.serves(cell, x_TBI, hidden)
        self._at_once = AtOnce(cell, x_TBI, hidden) if self.at_once else None
        self._gru, self._hidden = cell == "gru", hidden
        self._matching = Matched(x_TBI.dtype)
        self._batch, self._inputs = x_TBI.shape[1:]

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
        given = (d_gates, x, h0, weights, output)
        if self._at_once is not None:
            return self._at_once(*given, needs_input=needs_input)
        with self._matching():
            return self._products(*given, needs_input)

    def to_input(self, d_gates: Tensor) -> Tensor:
        """Those that the input's share of the gates has; a GRU's candidate has another for h."""
        return d_gates[:, self._hidden :] if self._gru else d_gates

    def _products(
        self,
        d_gates: Tensor,
        x: Tensor,
        h0: Tensor,
        weights: Sequence[Tensor],
        output: Tensor,
        needs_input: bool,
    ) -> tuple[Tensor | None, list[Tensor]]:
        hidden, batch, rows = self._hidden, self._batch, d_gates.shape[0]
        to_input = self.to_input(d_gates)
        to_state = d_gates[:, : 3 * hidden] if self._gru else d_gates
        d_input: Tensor | None = None
        if needs_input:
            d_input = torch.mm(to_input, weights_as_factor(weights[0], rows)).view(x.shape)
        wide = to_input.shape[1]
        d_w_ih = torch.mm(to_input.t(), right_factor([x.view(rows, self._inputs)], wide))
        states, across = output.view(rows, hidden)[: rows - batch], to_state.t()
        if is_zero_state(h0):  # the first step adds nothing
            d_w_hh = torch.mm(across[:, batch:], right_factor([states], wide))
        else:
            d_w_hh = torch.mm(across, right_factor([h0.view(batch, hidden), states], wide))
        if len(weights) == 2:
            return d_input, [d_w_ih, self._in_order(d_w_hh)]
        # two rows, since b_ih and b_hh must not share memory
        d_b_ih, d_b_hh = column_sums(d_gates).to(d_gates.dtype)
        if self._gru:
            d_b_ih, d_b_hh = d_b_ih[hidden:], self._in_order(d_b_hh[: 3 * hidden])
        return d_input, [d_w_ih, self._in_order(d_w_hh), d_b_ih, d_b_hh]

    def _in_order(self, found: Tensor) -> Tensor:
        """A GRU's back from (n, r, z)."""
        if not self._gru:
            return found
        return torch.cat([found[self._hidden :], found[: self._hidden]])
