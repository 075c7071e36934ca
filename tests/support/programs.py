"""Random programs for the tests of Echo: steps, each from two earlier tensors to a new one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda a, b: a + b,
    "tanh": lambda a, b: a.tanh(),
    "product": lambda a, b: (a @ b.transpose(-1, -2) @ a).tanh(),
    "turned twice": lambda a, b: a.transpose(0, 1).contiguous().transpose(0, 1) * b,
    "split and joined": lambda a, b: torch.cat(a.chunk(2, -1)[::-1], -1) + b,
    "normalized": lambda a, b: F.layer_norm(a, a.shape[-1:]) * b,
    "softmax": lambda a, b: a.softmax(-1) * b,
    "dropout": lambda a, b: F.dropout(a, 0.3) + b,
    "chosen": lambda a, b: torch.where(a > 0, a, b),
    "rectified": lambda a, b: F.relu(a).sum(-1, keepdim=True) * b,
    "a view of a view": lambda a, b: a.reshape(-1).view(a.shape) * b,
    "largest": lambda a, b: a.max(-1, keepdim=True).values * b,
}

#: The same 200 programs in every run.
two_hundred = settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
#: Fewer, for what compiles each of them.
forty = settings(two_hundred, max_examples=40)
PROGRAMS = st.lists(
    st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 9), st.integers(0, 9)),
    min_size=1,
    max_size=12,
)


def function_of(program: list[tuple[str, int, int]], *, two_results: bool) -> Callable[..., Any]:
    def function(x: Tensor, y: Tensor) -> Any:
        made = [x, y]
        for name, first, second in program:
            made.append(STEPS[name](made[first % len(made)], made[second % len(made)]))
        # all of it is used: torch's own partitioner fails on a dropout that nobody uses
        result = functools.reduce(torch.add, made)
        return (result, made[-1] * 2) if two_results else result

    return function
