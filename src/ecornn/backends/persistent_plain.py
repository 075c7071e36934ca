"""One layer of one direction with nothing special about it but perhaps lengths, with as little work
on the host as it takes.

Between a call and its launch the general way (`persistent_forward`, `persistent_backward`) reads,
checks and arranges for what a plain call does not have; on an H200's machine that took as long as
the kernel of a small layer. Here all that is the same for each call of one size is made once, and a
call fills in pointers. What this does not serve, the general way does.

Shape suffixes: see `protocol`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ecornn.backends.persistent_backward import recomputed_in
from ecornn.backends.persistent_calls import (
    Launch,
    Matched,
    Piece,
    beside_output,
    check_weights,
    is_readable,
    launches,
    marked,
    padded,
    through_l2,
)
from ecornn.backends.persistent_forward import forward_pieces
from ecornn.backends.persistent_gradients import GateGradients
from ecornn.backends.protocol import LayerCall
from ecornn.backends.zeros import is_zero_state
from ecornn.kernels.persistent.arguments import (
    BACKWARD,
    FORWARD,
    BackwardArguments,
    ForwardArguments,
)
from ecornn.kernels.persistent.device import failure_flag, numbers_of
from ecornn.kernels.persistent.launch import Launcher
from ecornn.kernels.persistent.shares import (
    SHARES,
    ShareArguments,
    is_small_product,
    share_blocks,
    share_launcher,
)
from ecornn.spec import GATES


class PlainResult(NamedTuple):
    output_TBO: Tensor
    h_n_DBR: Tensor
    c_n_DBH: Tensor | None
    cells_TBE: Tensor | None
    kept: Tensor | None


class PlainGrads(NamedTuple):
    """`weights` as the layer's; the states' only where they are wanted."""

    input_TBI: Tensor | None
    h0_DBR: Tensor | None
    c0_DBH: Tensor | None
    weights: list[Tensor]


class PlainLayer:
    """Calls of one size, which `serves` said yes to."""

    def __init__(self, call: LayerCall) -> None:
        check_weights(call)
        x, self.hidden = call.input_TBI, call.h0_DBR.shape[-1]
        self.cell, self.device, self.dtype = call.cell, x.device.index, x.dtype
        self.steps, self.batch, self.inputs = x.shape
        self.rows = self.steps * self.batch
        self.lstm, self.keep = call.cell == "lstm", call.keep
        self._weight_shapes = [weight.shape for weight in call.flat_weights()]
        vector = 16 // x.element_size()
        self._by_vectors = self.hidden % vector == 0 and self.inputs % vector == 0
        every = launches("forward", call)
        self._forward = every[0].launcher
        tile = self._forward.geometry.tile
        self._beside = beside_output(tile, self.hidden)
        self._output_marked = tile.grid and self._beside is None
        self._pieces = forward_pieces(call)
        row = self.hidden if self._beside is None else self._beside.width
        self._forward_sizes = [self._sizes(every[0], row, piece) for piece in self._pieces]
        self._shares_shape = (self.rows, GATES[self.cell] * self.hidden)
        self._share_blocks = share_blocks(*self._shares_shape)
        self._share_launch: Launcher | None = None
        numbers = numbers_of(x.dtype)
        assert numbers is not None
        self._matching = Matched(x.dtype)
        if is_small_product(x.element_size(), *self._shares_shape, self.inputs):
            self._share_launch = share_launcher(numbers, self.device)
        # Our own product is right ahead of the kernel, which loads its weights meanwhile: 2 to 3 µs
        # of a call's 80 to 110 where blocks wait for no others. Blocks of a cluster that were begun
        # beside the product's would wait for those of them that share a multiprocessor: with 128
        # units and 16 sequences in float32 a call took 204 µs instead of 175.
        alone = tile.cluster == 1 and not tile.grid
        self._early = self._share_launch is not None and len(self._pieces) == 1 and alone
        #: Whether `backward` serves; if not, the general one does.
        self.has_backward = call.keep != "none" and self._prepare_backward(call)

    @staticmethod
    def serves(call: LayerCall) -> bool:
        """Whether calls of this size can be served, by one launch."""
        x, hidden = call.input_TBI, call.h0_DBR.shape[-1]
        special = call.resets_TB is not None or call.cell_states or call.after_end != "zeros"
        if special or call.directions > 1 or 0 in x.shape or padded(hidden, x.dtype) != hidden:
            return False
        if call.keep == "states" and call.cell == "gru":
            return False  # computes its gates again, whose state's share is apart
        again = call.keep == "states" and call.cell == "lstm"
        if again and (call.lengths_B is not None or len(recomputed_in(call)) > 1):
            return False
        return len(launches("forward", call)) == 1

    def _sizes(self, launch: Launch, exchange_row: int, piece: Piece) -> tuple[int, ...]:
        """The arguments' integers, in their order."""
        group = launch.launcher.geometry.group_batch
        times = (piece.steps, piece.first_step, piece.total)
        return (
            *times,
            self.batch,
            self.hidden,
            self.hidden,
            exchange_row,
            0,
            self.batch,
            0,
            group,
            0,
        )

    def _prepare_backward(self, call: LayerCall) -> bool:
        every = launches("backward", call)
        gradients = GateGradients(self.cell, call.input_TBI, self.hidden)
        if len(every) > 1 or (self.cell == "gru" and not gradients.at_once):
            return False
        self._backward = every[0].launcher
        self._d_gates_marked = through_l2(every)
        stored = 4 if self.cell == "gru" else GATES[self.cell]  # a GRU's candidate has two
        self._d_gates_shape = (self.rows, stored * self.hidden)
        whole = Piece(0, self.steps, self.steps)
        self._backward_sizes = self._sizes(every[0], self._d_gates_shape[1], whole)
        self._gradients = gradients
        return True

    def fits(
        self,
        x: Tensor,
        h0: Tensor,
        c0: Tensor | None,
        weights: Sequence[Tensor],
        *results: Tensor | None,
    ) -> bool:
        """Whether all memory is as the kernels read it; `results`: what the forward pass left,
        which hooks on saved tensors may have given another form."""
        return is_readable(h0, weights, self._weight_shapes, (x, c0, *results))

    def forward(
        self,
        x: Tensor,
        h0: Tensor,
        c0: Tensor | None,
        weights: tuple[Tensor, ...],
        lengths: Tensor | None = None,
    ) -> PlainResult:
        """`lengths` where the call that this was made for had some."""
        flag = failure_flag()
        flag.check()
        # before all else: the device is busy with it while the host goes on
        gates = self._first_shares(x, weights[0])
        shape = (self.steps, self.batch, self.hidden)
        output = marked(shape, x) if self._output_marked else x.new_empty(shape)
        exchange = output
        if self._beside is not None:
            exchange = marked((self.rows, self._beside.width), x, self._beside.dtype)
        cells = x.new_empty(shape) if self.lstm and self.keep != "none" else None
        kept = None
        if self.keep == "gates":  # those of an LSTM stand where its gates' inputs stood
            kept = gates if self.lstm else x.new_empty(self.rows, 4 * self.hidden)
        h_n = torch.empty_like(h0)
        c_n = None if c0 is None else torch.empty_like(c0)
        b_ih, b_hh = (w.data_ptr() for w in weights[2:]) if len(weights) > 2 else (0, 0)
        y, e, h = output.data_ptr(), exchange.data_ptr(), h0.data_ptr()
        c = 0 if c0 is None else c0.data_ptr()
        ends = 0 if lengths is None else lengths.data_ptr()
        h_in, c_in, carried = h, 0, (h0, c0)
        for piece, sizes in zip(self._pieces, self._forward_sizes, strict=True):
            if piece.first_step > 0:
                self._shares_of(x, weights[0], piece, gates)
            leaving = (h_n, c_n) if piece.last else _carried(h0, c0)
            h_out, c_out = (0 if t is None else t.data_ptr() for t in leaving)
            packed = FORWARD.pack(
                # gates, weights, b_ih, b_hh, exchange, output, cells, kept, for two directions
                *(gates.data_ptr(), 0, weights[1].data_ptr(), 0, b_ih, 0, b_hh, 0, e, 0, y, 0),
                *(0 if cells is None else cells.data_ptr(), 0),
                *(0 if kept is None else kept.data_ptr(), 0),
                # h0, c0, h_in, c_in, h_out, c_n, c_out, lengths, resets, failed
                *(h, c, h_in, c_in, h_out, *((c_out, 0) if piece.last else (0, c_out))),
                *(ends, 0, flag.address),
                *sizes,
            )
            self._forward(ForwardArguments.from_buffer_copy(packed), early=self._early)
            # held until the next launch: memory given back now could be written to before it
            h_in, c_in, carried = h_out, c_out, leaving
        del carried
        return PlainResult(output, h_n, c_n, cells, kept)

    def _first_shares(self, x: Tensor, w_ih: Tensor) -> Tensor:
        """The first piece's, in a buffer for those of every piece."""
        first = self._pieces[0]
        if first.last:
            return self._shares(x, w_ih)
        gates = x.new_empty(first.steps * self.batch, self._shares_shape[1])
        self._shares_of(x, w_ih, first, gates)
        return gates

    def _shares_of(self, x: Tensor, w_ih: Tensor, piece: Piece, gates: Tensor) -> None:
        """The input's share of a piece's gates."""
        start, count = piece.first_step * self.batch, piece.steps * self.batch
        rows = x.view(self.rows, self.inputs).narrow(0, start, count)
        some = gates if gates.shape[0] == count else gates[:count]
        with self._matching():
            torch.mm(rows, w_ih.t(), out=some)

    def _shares(self, x: Tensor, w_ih: Tensor) -> Tensor:
        """The input's share of all gates."""
        if self._share_launch is None:
            with self._matching():  # one call: views for a product take the host as long as that
                return torch._C._nn.linear(x, w_ih)
        found = x.new_empty(self._shares_shape)
        xs, w = x.data_ptr(), w_ih.data_ptr()
        packed = SHARES.pack(
            *(xs, w, found.data_ptr(), *self._shares_shape, self.inputs),
            self._by_vectors and (xs | w) % 16 == 0,
        )
        self._share_launch(ShareArguments.from_buffer_copy(packed), self._share_blocks)
        return found

    def _gates_again(
        self, x: Tensor, h0: Tensor, weights: tuple[Tensor, ...], output: Tensor
    ) -> Tensor:
        """An LSTM's, without biases: two products over all steps."""
        gates = x.new_empty(self._shares_shape)
        across, states = weights[1].t(), output.view(self.rows, self.hidden)
        first, rest = gates[: self.batch], gates[self.batch :]
        with self._matching():
            torch.mm(x.view(self.rows, self.inputs), weights[0].t(), out=gates)
            if not is_zero_state(h0):
                torch.addmm(first, h0.view(self.batch, self.hidden), across, out=first)
            if self.steps > 1:
                torch.addmm(rest, states[: self.rows - self.batch], across, out=rest)
        return gates

    def backward(
        self,
        grads: tuple[Tensor | None, Tensor | None, Tensor | None],
        call: tuple[Tensor, Tensor, Tensor | None, tuple[Tensor, ...]],
        result: list[Tensor | None],
        *,
        needs_input: bool,
        needs_states: bool,
        lengths: Tensor | None = None,
    ) -> PlainGrads:
        """Where `has_backward`. `grads` of output, h_n and c_n; `call`: input, states and weights;
        `result`: output, cells and what was kept, a list that is emptied: if nobody else holds
        these, the gradients have their memory."""
        flag = failure_flag()
        flag.check()
        (x, h0, c0, weights), (output, cells, kept) = call, result
        assert output is not None
        result.clear()
        grads = tuple(None if d is None else d.contiguous() for d in grads)  # type: ignore[assignment]
        b_ih = b_hh = 0
        shape, again = self._d_gates_shape, self.lstm and kept is None
        if again:
            kept = self._gates_again(x, h0, weights, output)
            b_ih, b_hh = (w.data_ptr() for w in weights[2:]) if len(weights) > 2 else (0, 0)
        if self._d_gates_marked:
            d_gates = marked(shape, x)
        else:  # in the place of gates that are ours: each is read by the warp that writes there
            d_gates = kept if again and kept is not None else x.new_empty(shape)
        d_h0 = torch.empty_like(h0)  # the kernel writes them in any case
        d_c0 = None if c0 is None else torch.empty_like(c0)
        dg, h, y = d_gates.data_ptr(), h0.data_ptr(), output.data_ptr()
        dy, dh, dc = (0 if d is None else d.data_ptr() for d in grads)
        packed = BACKWARD.pack(
            # gates, b_ih, b_hh, weights, exchange, d_gates, output, cells, d_output, d_cells
            *(0 if kept is None else kept.data_ptr(), 0, b_ih, 0, b_hh, 0),
            *(weights[1].data_ptr(), 0),
            *(dg, 0, dg, 0, y, 0, 0 if cells is None else cells.data_ptr(), 0, dy, 0, 0, 0),
            # h0, c0, d_h_n, d_c_n, d_h_in, d_c_in, d_h_out, d_c_out
            *(h, 0 if c0 is None else c0.data_ptr(), dh, dc, 0, 0, 0, 0),
            # d_h0, d_c0, d_h_initial, d_c_initial, lengths, resets, failed
            *(d_h0.data_ptr(), 0 if d_c0 is None else d_c0.data_ptr(), 0, 0),
            *(0 if lengths is None else lengths.data_ptr(), 0, flag.address),
            *self._backward_sizes,
        )
        self._backward(BackwardArguments.from_buffer_copy(packed))
        del grads, cells, kept
        if lengths is not None:
            # beyond the ends the gates' gradients are zeros, and 0 · NaN would reach the weights
            beyond_TB = torch.arange(self.steps, device=x.device).unsqueeze(1) >= lengths
            x = x.masked_fill(beyond_TB.unsqueeze(-1), 0.0)
        given = (d_gates, x, h0, weights, output)
        d_input, d_weights = self._gradients(*given, needs_input=needs_input)
        return PlainGrads(
            d_input, d_h0 if needs_states else None, d_c0 if needs_states else None, d_weights
        )


def _carried(h0: Tensor, c0: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The states between two pieces."""
    return torch.empty_like(h0), None if c0 is None else torch.empty_like(c0, dtype=torch.float32)
