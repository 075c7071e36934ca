"""`Recorded`: what a compiled graph runs in its two passes, for those who rehearse it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from ecornn.echo.graph import number_of_the_call
from ecornn.echo.replay import Code
from ecornn.echo.weight_sums import WeightSums

#: Operators that are run one by one, given a list that they empty; or what inductor has generated.
Pass = Callable[[list[Any]], Any] | Code


@dataclass
class Recorded:
    key: str  # of the graph that torch has traced
    #: How many of the forward pass's outputs are the model's, the others being kept for the
    #: backward pass; None if there is none.
    results: int | None = None
    forward: Pass | None = None
    backward: Pass | None = None
    #: What becomes of the backward pass's results before autograd has them.
    sums: WeightSums | None = None


def key_of(module: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """Alike for graphs of the same operators on inputs of the same forms."""
    targets = " ".join(f"{node.op}:{node.target}" for node in module.graph.nodes)
    return f"{[_form(value) for value in inputs]} {targets}"


def _form(value: Any) -> str:
    if not isinstance(value, Tensor):
        return "number"
    size, stride = ([number_of_the_call(n) for n in of] for of in (value.shape, value.stride()))
    return f"{value.dtype} {size} {stride} {value.device.type} {value.requires_grad}"
