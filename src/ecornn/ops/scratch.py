"""What our operators take while they run, for whoever counts memory without numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ecornn.backends.protocol import Scratch
from ecornn.backends.registry import by_name
from ecornn.ops.batching import SAMPLES
from ecornn.ops.keeping import settled
from ecornn.ops.linear_cross_entropy import OPERATOR as LINEAR_CROSS_ENTROPY
from ecornn.ops.linear_cross_entropy import scratch_of
from ecornn.ops.recurrence import read_call, recurrence, recurrence_backward

FORWARD, BACKWARD = recurrence._opoverload, recurrence_backward._opoverload


def scratch_bytes(func: Any, args: Sequence[Any]) -> int:
    """Bytes that an operator, if it is one of ours, takes beside its results and gives back."""
    if func is FORWARD:
        return _of(args).forward
    if func is BACKWARD:
        return _beside_gradients(args[SAMPLES - 1], args[SAMPLES + 1 :])
    if func is LINEAR_CROSS_ENTROPY:
        input_NH, weight_VH, *_ = args
        return scratch_of(len(input_NH), weight_VH, input_NH.dtype)
    return 0


def _beside_gradients(needs_input: bool, args: Sequence[Any]) -> int:
    x, _, _, weights, *_ = args
    gradients = [*weights, x] if needs_input else weights
    return _of(args).beside(sum(one.numel() * one.element_size() for one in gradients))


def _of(args: Sequence[Any]) -> Scratch:
    call = read_call(*args)
    return by_name(args[-2]).scratch(replace(call, keep=settled(call.keep)))
