"""The nodes of a compiled part's calls in autograd's graph, noted by the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ecornn.echo.counted import tensors_of


class Registry(Protocol):
    def register(self, node: Any, stream: int | None) -> None: ...


#: By the kind of node that torch has made for a compiled graph.
BY_KIND: WeakKeyDictionary[type, Registry] = WeakKeyDictionary()


class CommonInputs:
    """Those of a part's inputs that all of its calls were seen to have in common, of the call that
    is under way: for a compiler that is asked for it. Should threads call a part at once, one of
    them may find none, and its code makes a gradient each time."""

    def __init__(self, places: Collection[int] = ()) -> None:
        self._places = places
        self.call: tuple[Any, Any] | None = None

    def tensors(self) -> list[Tensor]:
        given = [] if self.call is None else tensors_of(*self.call)
        return [tensor for place, tensor in enumerate(given) if place in self._places]


def noting_calls(run: Callable[..., Any], common: CommonInputs) -> Callable[..., Any]:
    """Around a compiled part: each call's node is made known to the sums of its graph."""

    def called(*args: Any, **kwargs: Any) -> Any:
        common.call = args, kwargs
        try:
            result = run(*args, **kwargs)
        finally:
            common.call = None
        if BY_KIND and torch.is_grad_enabled():
            first_of(result, _note)
        return result

    return called


def _current_stream(near: Tensor) -> int | None:
    if not near.is_cuda:
        return None
    return int(torch._C._cuda_getCurrentRawStream(near.get_device()))


def _note(result: Tensor) -> bool:
    node = result.grad_fn
    sums = None if node is None else BY_KIND.get(type(node))
    if sums is None:
        return False
    sums.register(node, _current_stream(result))
    return True


def first_of(result: Any, noted: Callable[[Tensor], bool]) -> bool:
    """Of a part's results, until one is. Of a part that torch has made several graphs of, only the
    last one's calls are known by them."""
    if isinstance(result, Tensor):
        return noted(result)
    if isinstance(result, dict):
        result = result.values()
    elif not isinstance(result, (tuple, list)):
        return False
    return any(first_of(one, noted) for one in result)
