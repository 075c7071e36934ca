"""Compiled graphs that run in one step: which one a graph comes after, by what autograd knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx
from torch._guards import TracingContext

KEY = "ecornn: compiled by"


def marking(compiled: Callable[..., Any], whose: object) -> Callable[..., Any]:
    """`compiled`, whose results can be told by `comes_after`, and what is made of them."""

    def run(*args: Any) -> Any:
        results = compiled(*args)
        for one in results:
            node: Any = one.grad_fn if isinstance(one, Tensor) else None
            if node is not None:
                node.metadata[KEY] = whose
        return results

    return run


def comes_after(inputs: Sequence[Any], whose: object) -> bool:
    """Whether some input was made of results that `whose` graphs have marked."""
    waiting = [one.grad_fn for one in inputs if isinstance(one, Tensor)]
    seen = {None}
    while waiting:
        node: Any = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.metadata.get(KEY) is whose:
            return True
        waiting += [further for further, _ in node.next_functions]
    return False


def why_one_of_several(module: fx.GraphModule) -> str | None:
    """Why a graph as torch.compile has traced it is not all that a step runs; None if it may be."""
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is not None and reason.graph_break:
        return f"torch's compiler makes several graphs of it ({reason.reason.splitlines()[0]})"
    context = TracingContext.try_get()
    if context is not None and getattr(context, "ddp_optimizer_ctx", None) is not None:
        return "torch's compiler makes several graphs of it (for DistributedDataParallel)"
    return None
