"""torch's recurrent layers, run again in the backward pass instead of keeping what they need there.

cuDNN's reserve space cannot be divided: it is kept as a whole, about six times a layer's output,
or made again as a whole by the forward pass of the layer. That takes time, so it is done for those
calls for which it is asked: calls are told apart by their order in a forward pass. torch's own
checkpoint carries it out. The layer is run by the same operator with the same arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from ecornn.echo.lean.cross_entropy import PLAIN
from ecornn.errors import InvalidInput

LAYERS = {torch.lstm: "lstm", torch.gru: "gru", torch.rnn_tanh: "rnn", torch.rnn_relu: "rnn"}
#: Layers whose results are smaller are left alone: there is little to save.
FEWEST_BYTES = 2 * 2**20

#: Places of calls in a forward pass: all of them, however many there are, or none.
EVERY_CALL: Container[int] = range(sys.maxsize)
NO_CALL: Container[int] = range(0)


@dataclass(frozen=True)
class Arguments:
    """Of a layer, or a stack of them, as torch.nn hands them to torch's functions."""

    all: Sequence[Any]
    given: Tensor
    state: Tensor  # of all layers and directions
    weights: Sequence[Tensor]
    layers: int
    steps: int
    draws: bool

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Any) -> Arguments | None:
        """None where somebody else calls them otherwise."""
        if kwargs or len(args) != 9 or type(args[0]) not in PLAIN:
            return None
        packed = isinstance(args[3], list | tuple)  # the weights, one place later
        states, weights, _, layers, dropout, train = args[1 + packed : 7 + packed]
        steps = args[1].numel() if packed else args[0].shape[1 if args[8] else 0]
        state = states[0] if isinstance(states, tuple) else states
        draws = train and dropout > 0 and layers > 1
        return cls(args, args[0], state, weights, layers, steps, draws)

    @property
    def rows(self) -> int:
        return self.given.numel() // max(self.given.shape[-1], 1)

    @property
    def output_bytes(self) -> int:
        """Of all layers and directions."""
        return int(self.rows * self.state.shape[0] * self.state.shape[-1] * self.given.itemsize)


def refusal(call: Arguments | None, *, grad_enabled: bool | None = None) -> str | None:
    """Why a call is left to torch; None if it can be run again. `grad_enabled`: as it will be when
    the call is made with numbers; by default as it is now."""
    if call is None:
        return "not called as torch.nn calls it"
    if any(leaf.is_inference() for leaf in tree_leaves(call.all) if isinstance(leaf, Tensor)):
        return "made in inference mode: a change of it would not be seen"
    if call.draws:
        return "draws random numbers"
    enabled = torch.is_grad_enabled() if grad_enabled is None else grad_enabled
    if not (enabled and any(tensor.requires_grad for tensor in (call.given, *call.weights))):
        return "no gradient is asked for"
    return "few results" if call.output_bytes < FEWEST_BYTES else None


def run_again_later(layer: Callable[..., Any], call: Arguments) -> Any:
    """A checkpoint does not see that an argument was changed meanwhile, as torch's layers do."""
    tensors = [leaf for leaf in tree_leaves(call.all) if isinstance(leaf, Tensor)]
    versions = [tensor._version for tensor in tensors]

    def run(*given: Any) -> Any:
        if [tensor._version for tensor in tensors] != versions:
            raise InvalidInput(
                "lean",
                "a recurrent layer of which an argument was changed in place since it ran",
                "the same arguments when it is run again",
                "clone what is changed, or keep what the layer keeps, by lean=False",
            )
        return layer(*given)

    return checkpoint(run, *call.all, use_reentrant=False, preserve_rng_state=False)
