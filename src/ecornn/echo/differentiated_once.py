"""Compiled code whose first derivatives autograd takes for constants.

torch refuses to differentiate compiled code twice where something that was kept for the backward
pass is an input with a gradient. Of an output layer and loss that are one operator none need be:
torch 2.11 takes their gradients for constants then, and so does 2.13 where a derivative by one
certain tensor is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ecornn.ops.only_once import only_once, stands_for


def differentiated_once(compiled: Callable[..., Any], why: str) -> Callable[..., Any]:
    """`compiled`, whose first derivatives raise where they are differentiated."""

    def run(*args: Any) -> Any:
        given = [one for one in args if isinstance(one, Tensor) and one.requires_grad]
        if not given or not torch.is_grad_enabled():
            return compiled(*args)
        # before the call, which may write to its inputs
        stand_in, before = stands_for(given, why), {one.grad_fn for one in given}
        found = compiled(*args)
        for node in _compiled_nodes(found, before):
            node.register_hook(partial(_made_once, stand_in, why))
        return found

    return run


def _compiled_nodes(found: Iterable[Any], before: set[Any]) -> Iterator[Any]:
    """Nodes of torch's function for compiled code, which is written in Python. Between one and a
    result there may be those of views; what the inputs come from is not looked at."""
    seen = {None, *before}
    waiting = [one.grad_fn for one in found if isinstance(one, Tensor)]
    while waiting:
        node: Any = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            yield node
        else:
            waiting += [further for further, _ in node.next_functions]


def _made_once(stand_in: Tensor, why: str, d_inputs: tuple[Tensor | None, ...], _: Any) -> Any:
    return only_once(d_inputs, (stand_in,), why) if torch.is_grad_enabled() else None
