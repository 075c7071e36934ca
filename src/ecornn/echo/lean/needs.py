"""What is asked of torch here beyond its documented functions."""

from __future__ import annotations

from functools import cache

import torch
import torch.overrides

NEEDED = (
    # a mode that is set aside for a while
    "_C._len_torch_function_stack",
    "overrides._pop_mode",
    "overrides._push_mode",
    # calls that must be left alone
    "autograd.forward_ad._current_level",
    "_C._functorch.peek_interpreter_stack",
    "_C._autograd._top_saved_tensors_default_hooks",
    # who refers to a tensor
    "_C._storage_Use_Count",
    "_C._autograd._get_current_graph_task_keep_graph",
    "Tensor._use_count",
)


@cache
def missing() -> str | None:
    """The first of these that this torch has not: then no function is replaced."""
    for path in NEEDED:
        found: object = torch
        for name in path.split("."):
            if not hasattr(found, name):
                return f"torch {torch.__version__} has no torch.{path}"
            found = getattr(found, name)
    return None
