"""torch's recurrent layers, run again in the backward pass instead of keeping what they need there.

cuDNN's reserve space cannot be divided: it is kept as a whole, about six times a layer's output,
or made again as a whole by the forward pass of the layer. That takes time, so it
is done where as little memory as possible is asked for, or this itself is. torch's own checkpoint
carries it out. The layer is run by the same operator with the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def refusal(args: Sequence[Any], kwargs: Any) -> str | None:
    """Why a call is left to torch; None if it can be run again."""
    if kwargs or len(args) != 9 or type(args[0]) not in PLAIN:
        return "not called as torch.nn calls it"
    if any(leaf.is_inference() for leaf in tree_leaves(args) if isinstance(leaf, Tensor)):
        return "made in inference mode: a change of it would not be seen"
    packed = isinstance(args[3], list | tuple)  # the weights, one place later
    layers, dropout, train = args[4 + packed], args[5 + packed], args[6 + packed]
    if train and dropout > 0 and layers > 1:
        return "draws random numbers"
    weights = args[2 + packed]
    if not (torch.is_grad_enabled() and any(w.requires_grad for w in (args[0], *weights))):
        return "no gradient is asked for"
    return "few results" if output_bytes(args) < FEWEST_BYTES else None


def output_bytes(args: Sequence[Any]) -> int:
    """Of all layers and directions."""
    packed = isinstance(args[3], list | tuple)
    states = args[1 + packed]
    state = states[0] if isinstance(states, tuple) else states
    positions = args[0].numel() // max(args[0].shape[-1], 1)
    return int(positions * state.shape[0] * state.shape[-1] * args[0].itemsize)


def run_again_later(layer: Callable[..., Any], args: Sequence[Any]) -> Any:
    """A checkpoint does not see that an argument was changed meanwhile, as torch's layers do."""
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    versions = [tensor._version for tensor in tensors]

    def run(*given: Any) -> Any:
        if [tensor._version for tensor in tensors] != versions:
            raise InvalidInput(
                "lean",
                "a recurrent layer of which an argument was changed in place since it ran",
                "the same arguments when it is run again",
                "clone what is changed, or keep what the layer keeps: not memory='min', nor"
                " lean='layers'",
            )
        return layer(*given)

    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)
