"""What is known of operators and of what they are called with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ecornn.profiler.places import Line

#: Stands for an operator where a compiler's code is all there is to see.
COMPILED = "compiled code"
#: Arguments without tensors in them; others are looked into.
SCALARS = frozenset(
    {int, float, bool, complex, str, type(None)}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator}
)


class Origin(NamedTuple):
    """Who made a node of autograd's graph."""

    module: str
    operator: str
    line: Line | None


class Operator(NamedTuple):
    name: str
    #: Makes nothing but another look at what it is given: takes no time in the report.
    only_views: bool
    #: What runs it, without a call in Python in between where there is one.
    call: Any
    func: Any


def describe(func: Any, rule: Callable[..., Any] | None = None) -> Operator:
    """`rule` runs it, if there is one."""
    packet = getattr(func, "overloadpacket", func)
    views = bool(getattr(func, "is_view", False))
    return Operator(str(packet), views, rule or getattr(func, "_op", func), func)


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(value)
        elif isinstance(value, dict):
            found += tensors_in(value.values())
    return found
