"""torch.compile for layers that subclass torch.nn's.

Dynamo breaks the graph at every instance of torch.nn.RNN, GRU or LSTM, because torch's own layers
do not trace well; `torch._dynamo.config.allow_rnn` lifts that for all of them, torch's included.
Ours trace as one operator a layer, so the flag is raised for ours alone, while Dynamo wraps them.
"""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

import torch

from ecornn.nn import stack
from ecornn.ops.keeping import TracedAsOperators


@cache
def let_dynamo_trace() -> None:
    """Prepare Dynamo, once. Called when the first layer is made, not when ecornn is imported:
    importing torch._dynamo takes about a second."""
    import torch._dynamo
    from torch._dynamo.variables.builder import VariableBuilder

    # the planner runs at trace time, and its answer is a constant of the graph
    torch._dynamo.assume_constant_result(stack.plan_from)
    # torch 2.11 fails on its own function, on tensors without numbers, where later ones go on
    # without a graph; torch.nn's layers are not traced, and nothing around them
    torch._dynamo.disallow_in_graph(torch._VF._pad_packed_sequence)
    wrap = getattr(VariableBuilder, "wrap_module", None)
    if wrap is None or not hasattr(torch._dynamo.config, "allow_rnn"):
        return  # a newer Dynamo without the restriction this lifts

    @wraps(wrap)
    def wrap_module(self: Any, value: torch.nn.Module) -> Any:
        if not isinstance(value, TracedAsOperators):
            return wrap(self, value)
        with torch._dynamo.config.patch(allow_rnn=True):
            return wrap(self, value)

    VariableBuilder.wrap_module = wrap_module  # type: ignore[method-assign]
