"""What the persistent backend's forward and backward passes share: pieces of time, products in the
precision torch's settings allow, and pointers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ecornn.backends.protocol import LayerCall
from ecornn.errors import InvalidInput, NoBackend
from ecornn.kernels.persistent.arguments import FROZEN_AFTER_END, RESET_TO_INITIAL
from ecornn.kernels.persistent.choose import Request
from ecornn.kernels.persistent.device import failure_flag, geometry, numbers_of
from ecornn.kernels.persistent.launch import Launcher, launcher, set_all_bits
from ecornn.kernels.persistent.tile import Tile, round_up
from ecornn.spec import GATES

#: A buffer of gates up to this size is made in one piece: it is smaller than what saving it costs,
#: a launch for each piece. Twice that where nothing is kept for a backward pass, in which there
#: are two such buffers.
SMALL_BYTES = 32 << 20


#: Kernels count the values of one step in 32 bits.
MOST_VALUES = 2**31


class Piece(NamedTuple):
    """Some consecutive steps of one launch. Directions run against each other in time."""

    first_step: int
    steps: int
    total: int

    def times(self, *, descending: bool) -> tuple[int, int]:
        """[start, stop) in time."""
        if descending:
            return self.total - self.first_step - self.steps, self.total - self.first_step
        return self.first_step, self.first_step + self.steps

    @property
    def last(self) -> bool:
        return self.first_step + self.steps == self.total


def small_bytes(keep: str) -> int:
    """Up to which a forward pass's buffer of gates is made in one piece."""
    return SMALL_BYTES * (2 if keep == "none" else 1)


def pieces(
    steps: int, row_bytes: int, share: float, buffers: int = 1, small: int | None = None
) -> list[Piece]:
    """Time in equal pieces, whose `buffers` of `row_bytes` a step take `share` of the whole at
    most, rounded up to a step, unless each of them is small as a whole."""
    size, small = steps, SMALL_BYTES if small is None else small
    if steps * row_bytes > small:
        size = max(math.ceil(steps * share), small // (buffers * row_bytes))
    count = -(-steps // size)
    size = -(-steps // count)
    return [Piece(at, min(size, steps - at), steps) for at in range(0, steps, size)]


class Launch(NamedTuple):
    """A kernel for some of the sequences and directions of a call."""

    launcher: Launcher
    first_sequence: int
    end_sequence: int
    first_direction: int


#: Launches by what they depend on; the key is a plain tuple because it is made at every call.
_LAUNCHES: dict[tuple[Any, ...], list[Launch]] = {}


def launches(kernel_name: str, call: LayerCall) -> list[Launch]:
    """All sequences and directions in one launch, or in as few as they need."""
    x = call.input_TBI
    numbers = numbers_of(x.dtype)
    assert numbers is not None
    key = (
        kernel_name,
        call.cell,
        numbers,
        call.h0_DBR.shape[-1],
        x.shape[1],
        len(call.weights),
        call.lengths_B is not None or call.resets_TB is not None,
        x.device.index,
    )
    found = _LAUNCHES.get(key)
    if found is None:
        found = _LAUNCHES[key] = _find_launches(*key)
    return found


def _find_launches(
    name: str,
    cell: str,
    numbers: str,
    hidden: int,
    batch: int,
    directions: int,
    features: bool,
    device: int,
) -> list[Launch]:
    if batch == 0:
        return []
    if batch * directions * 4 * hidden >= MOST_VALUES:
        raise NoBackend(
            f"a step of {batch} sequences and {hidden} units has 2^31 values or more, which the "
            "persistent kernels do not count: split the batch, or make the layer with "
            "backend='aten'"
        )
    for size in sizes_at_once(batch):
        for together in range(directions, 0, -1):
            ask = Request(name, cell, numbers, hidden, size, together, features)
            found = geometry(ask, device)
            if found is not None:
                return [
                    Launch(launcher(found, device), at, min(at + size, batch), direction)
                    for direction in range(0, directions, together)
                    for at in range(0, batch, size)
                ]
    raise NoBackend(
        f"the weights of {hidden} units do not fit on GPU {device}; the plan was made for the "
        f"current one: call the layer under torch.cuda.device({device}), or with backend='aten'"
    )


def sizes_at_once(batch: int) -> Iterator[int]:
    """Of a launch's sequences, the largest first: what may be tried where they do not all fit. In
    1, 2, 3, 4, 6, 8, 12, … launches, so that what fits is found soon and no more than half as many
    again are made as need be."""
    launches, last = 1, 0
    while last != 1:
        size = max(1, -(-batch // launches))
        if size != last:
            yield size
        last = size
        launches += max(1, (1 << launches.bit_length()) // 4)


def check_weights(call: LayerCall) -> None:
    """Kernels read them by pointers: nothing else would see that one is not like the others."""
    x, hidden = call.input_TBI, call.h0_DBR.shape[-1]
    rows = GATES[call.cell] * hidden
    shapes = {"w_ih": (rows, x.shape[2]), "w_hh": (rows, hidden), "b_ih": (rows,), "b_hh": (rows,)}
    for w in call.weights:
        for name, shape in shapes.items():
            part: Tensor | None = getattr(w, name)
            if part is None:
                continue
            if part.shape != shape or part.dtype != x.dtype or part.device != x.device:
                raise InvalidInput(
                    name,
                    f"{tuple(part.shape)} of {part.dtype} on {part.device}",
                    f"{shape} of {x.dtype} on {x.device}, like the input",
                    "give all weights of a layer the sizes, the dtype and the device it has",
                )


def is_readable(
    h0: Tensor,
    weights: Sequence[Tensor],
    shapes: Sequence[torch.Size],
    others: Sequence[Tensor | None],
) -> bool:
    """Whether all memory is as kernels of one size read it: another layer's weights need not be as
    those that were checked when the size was first met."""
    places, dtype, device = h0.data_ptr(), h0.dtype, h0.device
    for weight, shape in zip(weights, shapes, strict=True):
        if weight.shape != shape or not weight.is_contiguous():
            return False
        if weight.dtype != dtype or weight.device != device:
            return False
        places |= weight.data_ptr()
    if places % 16 != 0:
        return False
    return all([t is None or t.is_contiguous() for t in (h0, *others)])  # noqa: C419


def through_l2(every: list[Launch]) -> bool:
    """Whether some of the launches exchange by marks in memory."""
    return any(launch.launcher.geometry.tile.grid for launch in every)


class Beside(NamedTuple):
    """A row that blocks exchange, and what it is of if that is not what the output is of."""

    width: int
    dtype: torch.dtype | None


def beside_output(tile: Tile, hidden: int) -> Beside | None:
    """What blocks exchange forwards through L2 where it is not the output itself, with its rows of
    `hidden` values, because it is padded or narrower. All launches of a call have the same tile."""
    width, narrower = round_up(hidden, tile.vector), tile.exchanged_bytes < tile.element_bytes
    if not tile.grid or (width == hidden and not narrower):
        return None
    return Beside(width, torch.float16 if narrower else None)


def flags(call: LayerCall) -> int:
    return (RESET_TO_INITIAL if call.reset_to == "initial" else 0) | (
        FROZEN_AFTER_END if call.after_end == "frozen" else 0
    )


def run(every: list[Launch], arguments: Any) -> None:
    arguments.failed = failure_flag().address
    for launch, first, end, direction in every:
        arguments.first_sequence, arguments.end_sequence = first, end
        arguments.first_direction = direction
        arguments.group_batch = launch.geometry.group_batch
        launch(arguments)


def padded(hidden: int, dtype: torch.dtype) -> int:
    """A section of the exchanged vector: 16-byte loads need a whole number of vectors."""
    return round_up(hidden, 16 // dtype.itemsize)


def marked(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A new tensor in which every value is the mark that no result can be: all bits set."""
    found = like.new_empty(shape) if dtype is None else like.new_empty(shape, dtype=dtype)
    size = found.nbytes
    if found.is_cuda and size % 4 == 0:
        set_all_bits(found.data_ptr(), size, found.get_device())
        return found
    found.view(torch.int32 if found.dtype == torch.float32 else torch.int16).fill_(-1)
    return found


def is_aligned(values: Tensor) -> bool:
    """Contiguous and at an address that 16-byte loads take."""
    return values.is_contiguous() and values.data_ptr() % 16 == 0


def aligned(values: Tensor) -> Tensor:
    if is_aligned(values):
        return values
    return values.clone(memory_format=torch.contiguous_format)


def column_sums(rows: Tensor) -> Tensor:
    """In float32; twice, because b_ih and b_hh have the same gradient and must not share its
    memory."""
    # a product with ones: torch's sum over rows took up to 128 MiB of scratch on an H200
    ones = rows.new_ones(2, rows.shape[0])
    if rows.dtype == torch.float32:
        return ones @ rows
    return torch.mm(ones, rows, out_dtype=torch.float32)


_AS_THEY_ARE = nullcontext()


class Matched:
    """torch's products of one dtype in the precision of the kernels that this was made beside:
    what went forwards by these goes backwards so, whatever torch's setting is by then."""

    def __init__(self, dtype: torch.dtype) -> None:
        #: Whether products of float32 must be of TF32; None: of another dtype.
        self._tf32 = numbers_of(dtype) == "tf32" if dtype == torch.float32 else None

    def __call__(self) -> AbstractContextManager[None]:
        """As a rule they match anyway."""
        if self._tf32 is None or (products_precision() == "tf32") == self._tf32:
            return _AS_THEY_ARE
        return _products_in("tf32" if self._tf32 else "ieee")


def matching_products() -> AbstractContextManager[None]:
    """torch's own float32 products in the precision of the kernels: cuDNN multiplies a layer's
    input as TF32 too where torch's setting for RNNs allows it. Beside three products of TF32 they
    are IEEE's: torch has nothing that is closer."""
    return Matched(torch.float32)()


def products_precision() -> str:
    found: str = torch.backends.cuda.matmul.fp32_precision  # "none" is IEEE too
    return found


@contextmanager
def _products_in(precision: str) -> Iterator[None]:
    before = products_precision()
    torch.backends.cuda.matmul.fp32_precision = precision
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
