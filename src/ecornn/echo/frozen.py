"""Weights that were frozen when code was compiled for them, and are trained later.

torch 2.11 does not look again at whether the weights of a module have gradients: what was compiled
while they were frozen is used from then on, and the gradients are missing without a word. So a part
is compiled for each choice of weights that are trained (`for_what_is_trained`). Code that is called
without that, as of a model that the user has compiled by torch's own function, is not used for
weights that have gradients now (`unless_thawed`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn


class Thawed(UserWarning):
    """Gradients are asked for that compiled code does not make: it is not used."""


def for_what_is_trained(
    run: Callable[..., Any], backend: Callable[..., Any], dynamic: bool | None, part: nn.Module
) -> Callable[..., Any]:
    """`run`, which calls the part, compiled. A backend for each choice: code that another one has
    made is not used, of any function that torch makes of it where it cannot trace on."""
    compiled: dict[str, Callable[..., Any]] = {}
    trained_now = _Trained(part)

    def called(*args: Any, **kwargs: Any) -> Any:
        trained = trained_now()
        if trained not in compiled:
            own = _Own(backend)
            compiled[trained] = torch.compile(run, backend=own, dynamic=dynamic)
        return compiled[trained](*args, **kwargs)

    return called


class _Own:
    """The same backend, by an object of its own."""

    def __init__(self, backend: Callable[..., Any]) -> None:
        self._backend = backend

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] = self._backend(module, inputs)
        return compiled


class _Trained:
    """Which weights of a part are, as it is called. By their places, of which a comparison says
    whether they are those of the part still: adapters may have been added. It takes 36 µs of a
    transformer of 151 modules on a CPU, where a walk takes 52."""

    def __init__(self, part: nn.Module) -> None:
        self._part = part
        self._look()

    def _look(self) -> None:
        modules = list(self._part.modules())
        self._weights = [module._parameters for module in modules]
        self._inner = [module._modules for module in modules]
        self._found = _values(self._inner)

    def __call__(self) -> str:
        if _values(self._inner) != self._found:
            self._look()
        weights = _values(self._weights)
        return "".join(["01"[weight is not None and weight.requires_grad] for weight in weights])


def _values(several: list[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, several)))


def unless_thawed(
    compiled: Callable[..., Any], module: fx.GraphModule, inputs: Sequence[Any]
) -> Callable[..., Any]:
    """`compiled`, or the graph as it was traced where an input has a gradient now that it had not
    when it was compiled."""
    frozen = [k for k, value in enumerate(inputs) if _is_frozen(value)]
    if not frozen or not (torch.is_grad_enabled() or _enables_gradients(module)):
        return compiled

    def run(*args: Any) -> Any:
        if any([args[k].requires_grad for k in frozen]):  # noqa: C419 a list is the faster
            warnings.warn(
                "weights have gradients now that were frozen when they were compiled, which this "
                "version of torch does not notice: this call runs as it is written; to have it "
                "compiled, call torch.compiler.reset() or use ecornn.compile for the model",
                Thawed,
                stacklevel=2,
            )
            return module(*args)
        return compiled(*args)

    return run


def _is_frozen(value: Any) -> bool:
    differentiable = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    return differentiable and not value.requires_grad


def _enables_gradients(module: fx.GraphModule) -> bool:
    """By itself, whether they are asked for around it or not."""
    switch = torch._C._set_grad_enabled
    return any(
        node.target is switch and node.args[0] is not False
        for part in module.modules()
        if isinstance(part, fx.GraphModule)
        for node in part.graph.nodes
    )
