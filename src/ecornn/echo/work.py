"""`Work`: how much one operation reads, writes and computes, and the call that it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
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
class StorageLike:
    """What a storage was: torch prints every byte of one."""

    bytes: int
    device: torch.device

    def __repr__(self) -> str:
        return f"storage[{self.bytes}]@{self.device.type}"


@dataclass(frozen=True)
class ArrayLike:
    """What an array of NumPy was, without its numbers."""

    shape: tuple[int, ...]
    dtype: str

    def __repr__(self) -> str:
        return f"array:{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, eq=False)
class Other:
    """Something of which only this is known: it is the same as itself."""

    value: Any = field(repr=False)

    def __repr__(self) -> str:
        return f"{type(self.value).__qualname__} at {id(self.value):#x}"


#: Say all that there is to say of them in a short text.
PLAIN = (
    *(int, float, complex, str, type(None), type(Ellipsis), type, range),
    *(torch.SymInt, torch.SymFloat, torch.SymBool),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(torch._ops.OpOverload, torch._ops.OpOverloadPacket, FunctionType, BuiltinFunctionType),
)


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
    #: An operator that is not torch's has declared `flops`, as those of products.
    declared: bool = False


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
    flops = _counted(target, args, kwargs, result)
    foreign = getattr(target, "namespace", "aten") not in ("aten", "prims")
    return Work(
        call,
        sum(t.bytes for t in read),
        sum(t.bytes for t in written),
        flops or elements,
        first.dtype if first else None,
        first.device if first else None,
        bool(flops) and foreign,
    )


def touched_bytes(result: Any) -> int:
    """Of the tensors of a result, what is expanded once."""
    return sum(tensor.bytes for tensor in _leaves(_without_numbers(result)))


def _counted(target: Any, args: Any, kwargs: Any, result: Any) -> int:
    count: Callable[..., int] | None = flop_registry.get(getattr(target, "overloadpacket", None))
    return int(count(*args, **kwargs, out_val=result)) if count else 0


def _without_numbers(value: Any) -> Any:
    """Of what an operator is given, what has a short text: keys are made of these."""
    if isinstance(value, Tensor):
        return TensorLike(tuple(value.shape), tuple(value.stride()), value.dtype, value.device)
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, dict):
        return {key: _without_numbers(of) for key, of in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_without_numbers(of) for of in value)
    if isinstance(value, slice):
        return slice(*map(_without_numbers, (value.start, value.stop, value.step)))
    if isinstance(value, torch.TypedStorage):
        value = value._untyped_storage  # everything public of it warns
    if isinstance(value, torch.UntypedStorage):
        return StorageLike(value.nbytes(), torch.device(value.device))
    if isinstance(value, np.ndarray):
        return ArrayLike(value.shape, str(value.dtype))
    if is_dataclass(value) and not isinstance(value, type):
        parts = ((one.name, _without_numbers(getattr(value, one.name))) for one in fields(value))
        return (type(value).__qualname__, *parts)
    return Other(value)


def _leaves(value: Any) -> Iterator[TensorLike]:
    if isinstance(value, TensorLike):
        yield value
    elif isinstance(value, dict):
        for of in value.values():
            yield from _leaves(of)
    elif isinstance(value, tuple):
        for of in value:
            yield from _leaves(of)
