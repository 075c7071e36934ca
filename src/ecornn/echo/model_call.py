"""`ModelCall`: what a model was called with, without its numbers; and whether a call asks for
gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

#: Why there may be none of a call.
OBJECTS = "it is called with objects that may hold tensors, and these are not kept"


@dataclass(frozen=True)
class Form:
    """A tensor that a model was called with, without its numbers."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


#: What holds no tensor.
PLAIN = (
    *(int, float, complex, str, bytes, type(None), slice, range, Enum),
    *(torch.dtype, torch.device, torch.Size),
)


@dataclass(frozen=True)
class ModelCall:
    """What a model was called with, and under which autocast: (device's type, dtype) or None."""

    args: Any
    kwargs: Any
    autocast: tuple[str, torch.dtype] | None

    @classmethod
    def of(cls, args: Any, kwargs: Any, device: torch.device) -> ModelCall | None:
        """None where something is handed over that may hold tensors, which must not be kept."""
        if not all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in tree_leaves((args, kwargs))):
            return None
        kind = device.type
        # of a device that has none, such as meta, torch does not even tell whether it is on
        cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if cast else None
        args, kwargs = tree_map(_form, (args, kwargs))
        return cls(args, kwargs, None if dtype is None else (kind, dtype))

    @contextmanager
    def context(self) -> Iterator[None]:
        """As around the model: what is cast meanwhile is forgotten at the end, also where the
        caller's own autocast goes on."""
        with nullcontext() if self.autocast is None else torch.autocast(*self.autocast):
            yield
        torch.clear_autocast_cache()

    @contextmanager
    def around(self) -> Iterator[None]:
        """Outside of the model's call, as in the backward pass, nothing is cast, and what a layer
        that is run again there has cast is forgotten when it has run."""
        torch.clear_autocast_cache()
        plain = self.autocast and torch.autocast(self.autocast[0], enabled=False)
        with plain or nullcontext(), _within_no_autocast():
            yield


@contextmanager
def _within_no_autocast() -> Iterator[None]:
    """Only the outermost autocast of a thread forgets at its end what was cast, and one that is
    switched off counts too: inside this, the next one is the outermost."""
    depth = torch.autocast_increment_nesting()
    for _ in range(depth):
        torch.autocast_decrement_nesting()
    try:
        yield
    finally:
        for _ in range(depth - 1):
            torch.autocast_increment_nesting()


def _form(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    form = tuple(value.shape), tuple(value.stride()), value.dtype, value.device
    return Form(*form, value.requires_grad)


def asks_for_gradients(model: nn.Module, args: Any, kwargs: Any) -> bool:
    if not torch.is_grad_enabled():
        return False
    tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    return any(tensor.requires_grad for tensor in (*model.parameters(), *tensors))
