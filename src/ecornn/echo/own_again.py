"""Recurrent layers that were torch's, around compiled parts, run again in the backward pass as
those are that still are.

Told to keep their states alone, they hold twice their output between the passes, and their gates
are made again by one product. Run again they hold nothing but their input, and it takes the time of
their forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from ecornn.echo.parts import is_free_to_choose, within
from ecornn.errors import InvalidInput
from ecornn.ops.keeping import inmost_checkpoint, keeping_states_alone

#: Options of our layers by which they draw in training.
_DRAWN = ("recurrent_dropout", "input_dropout", "output_dropout")


def able(layer: Any) -> bool:
    """Nobody told it what to keep, it draws nothing that it would draw anew, and it runs as its
    class does."""
    return is_free_to_choose(layer) and not _draws(layer) and "forward" not in layer.__dict__


def _draws(layer: Any) -> bool:
    between = layer.dropout > 0 and layer.num_layers > 1
    noise = any(map(bool, layer.zoneout)) or any(getattr(layer, name) for name in _DRAWN)
    return bool(layer.training and (between or noise))


def able_outside(model: nn.Module, paths: Collection[str], parts: Collection[str]) -> list[str]:
    """Paths of such layers, among some, that are not within some parts."""
    return [
        path
        for path in paths
        if path not in parts and not within(path, parts) and able(model.get_submodule(path))
    ]


def run_again_later(layer: nn.Module, *, states_alone: bool) -> Callable[..., Any]:
    """What takes the place of the layer's `forward`. `states_alone`: when it is run again it keeps
    no gates, so that at its own turn no more is there than if it had kept its states."""
    return partial(_forward, layer, states_alone)


def _forward(layer: nn.Module, states_alone: bool, /, *args: Any, **kwargs: Any) -> Any:
    forward = partial(type(layer).forward, layer)
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    tensors += layer.parameters()
    asked = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    within_another = inmost_checkpoint() is not None or torch.compiler.is_compiling()
    unseen = any(tensor.is_inference() for tensor in tensors)  # if such a one is changed
    if not asked or within_another or unseen or _draws(layer):
        return forward(*args, **kwargs)
    versions = [tensor._version for tensor in tensors]

    def run(*args: Any, **kwargs: Any) -> Any:
        if [tensor._version for tensor in tensors] != versions:
            raise InvalidInput(
                "lean",
                "a recurrent layer of which an argument or weight was changed in place since it "
                "ran",
                "the same when it is run again",
                "clone what is changed, or keep what the layer keeps, by lean=False",
            )
        with keeping_states_alone(states_alone):
            return forward(*args, **kwargs)

    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
