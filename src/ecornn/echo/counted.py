"""How often a model calls its parts in one forward pass, and with which tensors every time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def tensors_of(args: Any, kwargs: Any) -> list[Tensor]:
    """What a part is called with, in a fixed order."""
    return [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]


@dataclass
class Calls:
    """Calls with tensors, by path."""

    counts: dict[str, int] = field(default_factory=dict)
    #: Tensors of the first call, None in the place of those that were others later. They are held
    #: for the time of counting: another one could have the address of one that is gone.
    _first: dict[str, list[Tensor | None]] = field(default_factory=dict)

    def add(self, path: str, given: list[Tensor], *, compare: bool) -> None:
        self.counts[path] = self.counts.get(path, 0) + 1
        if not compare:
            return
        first = self._first.setdefault(path, list(given))
        again = given if len(given) == len(first) else []
        for place, tensor in enumerate(first):
            if not again or tensor is not again[place]:
                first[place] = None

    def common(self) -> dict[str, frozenset[int]]:
        """Places of tensors that all calls of a part have in common."""
        return {
            path: frozenset(place for place, tensor in enumerate(first) if tensor is not None)
            for path, first in self._first.items()
            if self.counts[path] > 1
        }


@contextmanager
def counted(model: nn.Module, *, compare: bool = True) -> Iterator[Calls]:
    """`compare`: tensors are held meanwhile, to see which are the same at all calls."""
    calls = Calls()
    hooks = []

    def count(path: str) -> Callable[..., None]:
        def hook(part: nn.Module, args: Any, kwargs: Any) -> None:
            if given := tensors_of(args, kwargs):
                calls.add(path, given, compare=compare)

        return hook

    for path, part in model.named_modules():
        if path:
            hooks.append(part.register_forward_pre_hook(count(path), with_kwargs=True))
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()
