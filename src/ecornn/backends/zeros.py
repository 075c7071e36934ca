"""Initial states of zeros, without filling memory at each call.

On a GPU, filling two small states takes two launches, and a small layer has few others. All of them
are views of one tensor of zeros, which nothing writes to: neither torch's kernels
nor ours write to an initial state, and a layer does not give it to anybody.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: States with more values than this are filled at each call.
MOST_VALUES = 1 << 16
#: Views are forgotten when there are more than this; what they are views of never is.
MOST_SHAPES = 1024

_Place = tuple[int, torch.dtype]
_ZEROS: dict[_Place, Tensor] = {}
_VIEWS: dict[tuple[_Place, tuple[int, ...]], Tensor] = {}


def zero_state(x: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """A state of zeros on the device and of the type of `x`, for reading only."""
    if not x.is_cuda or torch._C._len_torch_dispatch_stack() > 0:
        return x.new_zeros(shape)
    place = (x.get_device(), x.dtype)
    view = _VIEWS.get((place, shape))
    return _new_view(x, place, shape) if view is None else view


def is_zero_state(state: Tensor) -> bool:
    """Whether it came from here. False is no promise that it is not zero."""
    zeros = _ZEROS.get((state.get_device(), state.dtype))
    # anywhere in it: of a stack's states each layer has a part
    return zeros is not None and 0 <= state.data_ptr() - zeros.data_ptr() < zeros.nbytes


def _new_view(x: Tensor, place: _Place, shape: tuple[int, int, int]) -> Tensor:
    size = shape[0] * shape[1] * shape[2]
    # what is made during a capture is the graph's
    if size > MOST_VALUES or torch.cuda.is_current_stream_capturing():
        return x.new_zeros(shape)
    with torch.inference_mode(False):  # what is made in it cannot be kept for a backward pass
        if place not in _ZEROS:
            zeros = torch.zeros(MOST_VALUES, dtype=x.dtype, device=x.device)
            torch.cuda.current_stream(x.device).synchronize()  # other streams will read it
            _ZEROS.setdefault(place, zeros)
        if len(_VIEWS) >= MOST_SHAPES:
            _VIEWS.clear()
        return _VIEWS.setdefault((place, shape), _ZEROS[place][:size].view(shape))
