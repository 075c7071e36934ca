"""`Work`: how much one operation reads, writes and computes, and the call that it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry


@dataclass(frozen=True)
class TensorLike:
    """What a tensor was, without its numbers."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes(self) -> int:
        """Of memory that is touched: what is expanded is there once."""
        elements = 1
        for size, stride in zip(self.shape, self.strides, strict=True):
            elements *= 1 if stride == 0 and size else size
        return elements * self.dtype.itemsize

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}{list(self.shape)}/{list(self.strides)}@{self.device.type}"


@dataclass(frozen=True)
class Call:
    """An operator and its arguments, tensors as `TensorLike`. Two calls with the same `key` run
    the same code on tensors of the same form."""

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    @cached_property
    def key(self) -> str:
        named = [f"{name}={value!r}" for name, value in self.kwargs]
        return f"{self.target}({', '.join([*map(repr, self.args), *named])})"

    def tensors(self) -> Iterator[TensorLike]:
        return _leaves((self.args, tuple(value for _, value in self.kwargs)))


@dataclass(frozen=True)
class Work:
    call: Call | None = None  # None: not a call, or one made by hand
    read_bytes: int = 0
    written_bytes: int = 0
    flops: int = 0  # torch's own count where it has one, otherwise one an element written
    dtype: torch.dtype | None = None
    device: torch.device | None = None


NOTHING = Work()


def work_of(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Work:
    """What a call on fake tensors stands for."""
    call = Call(target, _without_numbers(args), tuple(_without_numbers(kwargs).items()))
    read = list(call.tensors())
    written = list(_leaves(_without_numbers(result)))
    # what a product computes in is what it reads; a comparison writes booleans
    first = next((t for t in (*read, *written) if t.dtype.is_floating_point), None)
    first = first or next(iter((*read, *written)), None)
    elements = sum(t.bytes // t.dtype.itemsize for t in written)
    return Work(
        call,
        sum(t.bytes for t in read),
        sum(t.bytes for t in written),
        _counted(target, args, kwargs, result) or elements,
        first.dtype if first else None,
        first.device if first else None,
    )


def _counted(target: Any, args: Any, kwargs: Any, result: Any) -> int:
    count: Callable[..., int] | None = flop_registry.get(getattr(target, "overloadpacket", None))
    return int(count(*args, **kwargs, out_val=result)) if count else 0


def _without_numbers(value: Any) -> Any:
    if isinstance(value, Tensor):
        return TensorLike(tuple(value.shape), tuple(value.stride()), value.dtype, value.device)
    if isinstance(value, dict):
        return {key: _without_numbers(of) for key, of in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_without_numbers(of) for of in value)
    return value


def _leaves(value: Any) -> Iterator[TensorLike]:
    if isinstance(value, TensorLike):
        yield value
    elif isinstance(value, tuple):
        for of in value:
            yield from _leaves(of)
