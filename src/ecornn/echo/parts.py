"""Which parts of a model are compiled by themselves: those that it calls many times, or the largest
without layers that torch's compiler leaves alone."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import nn

from ecornn.errors import InvalidInput
from ecornn.ops.keeping import OPEN, TracedAsOperators

#: A part that is called less often is left to the graph of the whole: unrolling is no burden then.
FEWEST_CALLS = 4
#: Why none is compiled by itself.
SELDOM = f"no part of it, single layers aside, is called {FEWEST_CALLS} times or more"


def named(model: nn.Module, region: str | nn.Module) -> str:
    """The path of a part."""
    path: str
    for path, part in model.named_modules():
        if path and (part is region or path == region):
            return path
    parts = ", ".join(path for path, _ in model.named_children()) or "none"
    raise InvalidInput(
        "regions", repr(region), "a part of the model or its path", f"its parts are: {parts}"
    )


def called_often(model: nn.Module, counts: dict[str, int]) -> dict[str, int]:
    """Of parts that are called so often that they are compiled once for all calls, these calls."""
    often = {
        path: count
        for path, count in counts.items()
        if count >= FEWEST_CALLS and worth_compiling(model.get_submodule(path))
    }
    return {path: count for path, count in often.items() if not within(path, often)}


def worth_compiling(part: nn.Module) -> bool:
    """A single layer of torch.nn, or a part without weights, leaves nothing to plan by itself: such
    a part, an activation used all over a model among them, stays in the graph of the whole."""
    single = type(part).__module__.startswith("torch.nn") and not list(part.children())
    return not single and any(True for _ in part.parameters())


def runs_untraced_layers(model: nn.Module) -> bool:
    """torch's compiler leaves its own recurrent layers alone, and with them every function that
    calls them in a loop. It traces subclasses of theirs that are marked."""
    allowed = getattr(torch._dynamo.config, "allow_rnn", False)
    of_torch = (p for p in model.modules() if not isinstance(p, TracedAsOperators))
    return not allowed and any(isinstance(part, nn.RNNBase) for part in of_torch)


def traceable(model: nn.Module, counts: dict[str, int]) -> list[str]:
    """The largest parts that were called and have no such layer. A recurrent layer of this package
    alone is none: what it keeps is told to it as it is called."""
    found = [
        path
        for path in counts
        if not runs_untraced_layers(part := model.get_submodule(path))
        and not isinstance(part, TracedAsOperators)
        and worth_compiling(part)
    ]
    return [path for path in found if not within(path, found)]


def is_free_to_choose(part: nn.Module) -> bool:
    """Is it a recurrent layer of this package that nobody told what to keep?"""
    return isinstance(part, TracedAsOperators) and part.keep == OPEN


def has_free_layers(model: nn.Module, paths: Container[str]) -> bool:
    """Such layers, outside some parts."""
    return any(
        is_free_to_choose(part) and path not in paths and not within(path, paths)
        for path, part in model.named_modules()
    )


def within(path: str, others: Container[str]) -> bool:
    """Is a part within another?"""
    parents = (path.rsplit(".", k)[0] for k in range(1, path.count(".") + 1))
    return any(parent in others for parent in parents)
