"""A loop's first call, made like the others.

A part that is handed its own results, as a decoder is its states, begins with states that somebody
made: zeros, of which no gradient is asked. torch compiles code for that one call and again, all of
it, for the others, which differ in nothing else. So such states are handed over as if a gradient
of them were asked for; it is made and not used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_flatten, tree_unflatten


class Starts:
    """Of one part. `places`: among the tensors that it is called with, those which are results of
    its calls before."""

    def __init__(self, places: Collection[int] = ()) -> None:
        self._places = frozenset(places)
        self.next_is_first = False  # call in a forward pass of the model

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        if not self._places:
            return run

        def called(*args: Any, **kwargs: Any) -> Any:
            if self.next_is_first:
                self.next_is_first = False
                if torch.is_grad_enabled():
                    args, kwargs = self._with_gradients(args, kwargs)
            return run(*args, **kwargs)

        return called

    def _with_gradients(self, args: Any, kwargs: Any) -> Any:
        leaves, form = tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        for place in self._places:
            if place < len(places):
                leaves[places[place]] = _asked_for(leaves[places[place]])
        return tree_unflatten(leaves, form)


def _asked_for(state: Tensor) -> Tensor:
    """Others stay as they are."""
    numbers = state.is_floating_point() and type(state) in (Tensor, FakeTensor)
    if not numbers or state.requires_grad or state.is_inference():
        return state
    return state.detach().requires_grad_()
