"""A model's twin: a copy without numbers, which can be run in its stead and leaves no trace."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from ecornn.echo.graph import NotUnderstood


def without_numbers(
    model: nn.Module,
    mode: FakeTensorMode,
    *,
    seen_to: Callable[[nn.Module], bool] = lambda part: False,
) -> nn.Module:
    """A copy whose weights and buffers have no numbers, and that calls nobody's hooks: what it
    keeps, counts or appends to, it does for itself. `seen_to`: parts that whoever runs it keeps
    from drawing inside cuDNN."""
    if any(_draws_in_cudnn(part) and not seen_to(part) for part in model.modules()):
        raise NotUnderstood("a recurrent layer draws inside cuDNN, even without numbers")
    tensors = (*model.parameters(), *model.buffers())
    memo: dict[int, Any] = {id(tensor): fake(tensor, mode) for tensor in tensors}
    twin: nn.Module = copy.deepcopy(model, memo)
    for part in twin.modules():
        for hooks in (part._forward_hooks, part._backward_hooks):
            hooks.clear()
        for hooks in (part._forward_pre_hooks, part._backward_pre_hooks):
            hooks.clear()
    return twin


def _draws_in_cudnn(part: nn.Module) -> bool:
    """torch seeds cuDNN's dropout anew at the first call after `manual_seed`, and that would be the
    copy's: the model itself would draw what it does not draw without Echo."""
    drawing = isinstance(part, nn.RNNBase) and part.training and part.dropout > 0
    return drawing and any(weight.is_cuda for weight in part.parameters())


def fake(value: Any, mode: FakeTensorMode) -> Any:
    return mode.from_tensor(value) if isinstance(value, Tensor) else value


def device_of(model: nn.Module) -> torch.device:
    """Of its weights; of several, one that is no CPU."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    other = sorted(map(str, (device for device in devices if device.type != "cpu")))
    return torch.device(other[0] if other else "cpu")


@contextmanager
def leaving_no_trace() -> Iterator[None]:
    """For a run without numbers. Python's and NumPy's generators stand afterwards where they stood;
    torch's do not move. Nor does torch warn that cuDNN's layers ask for
    the memory of tensors that have none: nobody reads it."""
    before = random.getstate(), np.random.get_state()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def alone(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A function of its own around a part's `forward`, code object included: torch keeps what it
    compiles by code object, a few for each, and parts of one class would push each other out."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    code = run.__code__.replace(co_name="region")
    return FunctionType(code, run.__globals__, "region", None, run.__closure__)


def keeping_unseen() -> AbstractContextManager[None]:
    """A checkpoint around the model, for one, is told of nothing that a copy keeps. Detached: a
    result that its own node keeps would never be freed."""
    hooks: AbstractContextManager[None] = saved_tensors_hooks(Tensor.detach, _as_it_is)
    return hooks


def has_hooks_on_what_is_kept() -> bool:
    """A checkpoint's, for one."""
    hooks: Any = torch._C._autograd
    return hooks._top_saved_tensors_default_hooks(True) is not None


@contextmanager
def without_hooks_on_what_is_kept() -> Iterator[None]:
    """The same for what has hooks of its own, which need the very tensors: those from outside are
    taken off meanwhile."""
    taken: list[tuple[Any, Any]] = []
    hooks: Any = torch._C._autograd
    while (innermost := hooks._top_saved_tensors_default_hooks(True)) is not None:
        taken.append(innermost)
        hooks._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(taken):
            hooks._push_saved_tensors_default_hooks(pack, unpack)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
