"""What a model is made of, in one walk.

`named_modules`, `named_parameters` and `named_buffers` each walk through all modules, which of a
model of two hundred takes as long as many an operator; and each would be asked more than once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.parameter import is_lazy

#: Where a model's class has its own, that is asked.
_TOLD_BY = ("named_modules", "named_parameters", "named_buffers", "_named_members")


class Contents(NamedTuple):
    """By their paths, each once, in the order in which torch tells them."""

    modules: list[tuple[str, nn.Module]]
    parameters: list[tuple[str, nn.Parameter]]
    buffers: list[tuple[str, Tensor]]

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for _, tensor in (*self.parameters, *self.buffers)]

    def bytes_by_device(self) -> dict[torch.device, int]:
        found: dict[torch.device, int] = {}
        for tensor in self.tensors:
            device = tensor.device
            found[device] = found.get(device, 0) + _bytes_of(tensor)
        return found

    @property
    def main_device(self) -> torch.device | None:
        """The one that holds most; None if there is nothing."""
        found = {tensor.device for tensor in self.tensors}
        if len(found) > 1:  # which is rare, and asking for bytes takes as long as all the rest
            held = self.bytes_by_device()
            return max(held, key=lambda one: held[one])
        return next(iter(found), None)

    @property
    def are_fake(self) -> bool:
        return any(isinstance(one, FakeTensor) for one in self.tensors)


def contents_of(model: nn.Module) -> Contents:
    if _has_own(type(model), _TOLD_BY):
        return _as_told(model)
    modules: list[tuple[str, nn.Module]] = []
    parameters: dict[int, tuple[str, nn.Parameter]] = {}
    buffers: dict[int, tuple[str, Tensor]] = {}
    seen: set[int] = set()
    usual = {type(model)}
    waiting: list[tuple[str, nn.Module | None]] = [("", model)]
    while waiting:
        path, module = waiting.pop()
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        if type(module) not in usual:
            if _has_own(type(module), _TOLD_BY[:1]):
                return _as_told(model)
            usual.add(type(module))
        modules.append((path, module))
        prefix = f"{path}." if path else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                parameters.setdefault(id(parameter), (prefix + name, parameter))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                buffers.setdefault(id(buffer), (prefix + name, buffer))
        if module._modules:
            inner = [(prefix + name, one) for name, one in module._modules.items()]
            waiting += reversed(inner)  # the first one next
    return Contents(modules, list(parameters.values()), list(buffers.values()))


def _has_own(kind: type[nn.Module], names: tuple[str, ...]) -> bool:
    return any(getattr(kind, name) is not getattr(nn.Module, name) for name in names)


def _as_told(model: nn.Module) -> Contents:
    return Contents(
        list(model.named_modules()), list(model.named_parameters()), list(model.named_buffers())
    )


def _bytes_of(tensor: Tensor) -> int:
    """At least 1. That is also for those that get their memory when the model is first called."""
    return 1 if is_lazy(tensor) else max(tensor.nbytes, 1)
