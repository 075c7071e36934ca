"""What a recurrent layer may keep for its backward pass, and what its operator declares of that:
the sizes of its gates, and the arithmetic that it takes to make them again.

Whoever plans memory reads these and knows no more of recurrent layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch

from ecornn.backends.protocol import LayerCall

#: Of the operator's `keep`: nothing was asked, and whoever compiles the graph may choose.
OPEN = "auto"

#: Where the operators have what of these: the constant in the arguments of both; what is kept among
#: the results of the forward one; the output and what is kept among the arguments of the other.
KEEP_ARGUMENT = -1
KEPT_RESULT = 4
OUTPUT_ARGUMENT, KEPT_ARGUMENT = 4, 6

#: Gates of a layer and direction that take no more than this are kept where the choice is free:
#: computing them anew made a training step over a third longer (keep=states beside keep=gates in
#: benchmarks/results/rnn-h200.json), and a GPU has hundreds of times as much.
FEW_BYTES = 256 << 20


class TracedAsOperators:
    """Marks layers that a compiler traces as operators of this package, although they are
    subclasses of torch.nn's, which it does not take."""

    keep: str


def settled(keep: str) -> str:
    """What an operator keeps whose mode nobody has chosen."""
    return "states" if keep == OPEN else keep


def gate_shapes(call: LayerCall) -> list[tuple[int, int, int]]:
    """Of what the operator keeps beside the states with keep="gates": pre-activations of each
    direction, then, with layer norm, its raw products."""
    steps, batch = call.input_TBI.shape[:2]
    hidden = (call.h0_DBR if call.c0_DBH is None else call.c0_DBH).shape[-1]
    stored = 4 * hidden if call.cell in ("lstm", "gru") else hidden
    shapes = [(steps, batch, stored) for _ in call.weights]
    if call.weights[0].norm_hh is not None:
        shapes += [(steps, batch, call.weights[0].w_hh.shape[0]) for _ in call.weights]
    return shapes


@dataclass(frozen=True)
class Gates:
    """Those of a call: their bytes, and what making them again in the backward pass takes: one
    product of all steps with the weights of input and state."""

    bytes: int
    bytes_of_direction: int
    flops: int
    read_bytes: int

    @property
    def few(self) -> bool:
        """So few that a layer which is free to choose keeps them."""
        return self.bytes_of_direction <= FEW_BYTES


#: Threads in which it is wanted, with the checkpoint around whoever wants it: as a rule none, which
#: every call of a small layer has to find out, and a thread's own variable takes longer to read.
_threads: dict[int, Any] = {}


def states_alone() -> bool:
    """Whether layers that are free to choose keep no gates, few as they may be, in this thread. Not
    within a checkpoint that was begun since: it runs a layer again when nobody wants anything any
    more, and takes what is kept then for what was kept before, by its place."""
    if not _threads:
        return False
    thread = get_ident()
    return thread in _threads and _threads[thread] is inmost_checkpoint()


@contextmanager
def keeping_states_alone(wanted: bool = True) -> Iterator[None]:
    """For whoever plans the memory of a step around layers that it does not compile. What a layer
    keeps is settled in its forward pass."""
    thread = get_ident()
    before = {thread: _threads[thread]} if thread in _threads else {}
    _threads.pop(thread, None)
    if wanted:
        _threads[thread] = inmost_checkpoint()
    try:
        yield
    finally:
        _threads.pop(thread, None)
        _threads.update(before)


def inmost_checkpoint() -> Any:
    """What keeps tensors, if that is one of `torch.utils.checkpoint`; None otherwise."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    keeps = None if hooks is None else hooks[0]
    return keeps if getattr(keeps, "__module__", None) == "torch.utils.checkpoint" else None


def keeps_gates(bytes_of_direction: int) -> bool:
    """Whether a layer that is free to choose keeps gates of this size."""
    return bytes_of_direction <= FEW_BYTES and not states_alone()


def gates_of(call: LayerCall) -> Gates:
    steps, batch, features = call.input_TBI.shape
    itemsize = call.input_TBI.element_size()
    # directions are alike
    bytes_ = sum(itemsize * first * second * third for first, second, third in gate_shapes(call))
    rows, weights = steps * batch, gate_weights(call)
    read = rows * (features + call.h0_DBR.shape[-1]) * call.directions + weights
    return Gates(bytes_, bytes_ // call.directions, 2 * rows * weights, read * itemsize)


def gate_weights(call: LayerCall) -> int:
    """Entries of all matrices from which gates are made."""
    return sum(w.w_ih.numel() + w.w_hh.numel() for w in call.weights)


def flops_of(call: LayerCall) -> int:
    """Of the forward pass: at every step each direction multiplies by its matrices."""
    rows = call.input_TBI.shape[0] * call.input_TBI.shape[1]
    projected = sum(w.w_hr.numel() for w in call.weights if w.w_hr is not None)
    return 2 * rows * (gate_weights(call) + projected)


def backward_flops_of(call: LayerCall, backend: str) -> int:
    """Two products for each of the forward pass, and what was not kept made again."""
    twice = 2 * flops_of(call)
    if backend == "aten":
        return twice + flops_of(call)
    return twice + (0 if call.keep == "gates" else gates_of(call).flops)
