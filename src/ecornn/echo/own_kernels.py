"""Recurrent layers of torch.nn that run on this package's kernels: which of a model's, and why the
others do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ecornn.backends.registry import by_name
from ecornn.echo.graph import NotUnderstood
from ecornn.echo.parts import FEWEST_CALLS
from ecornn.ops.conversion import become_ours, can_become_ours

#: The backend that has kernels of this package's.
KERNELS = "persistent"


class OwnKernels:
    def __init__(self) -> None:
        #: By path of a layer that was called: why torch runs it; None if our kernels do.
        self.refused: dict[str, str | None] = {}
        #: Of those that are refused: would our kernels serve all calls in any number of launches?
        self._if_slower: dict[str, bool] = {}
        #: Served in more launches than are taken to be as quick as torch's kernels.
        self.slower: list[str] = []
        #: A layer that draws, which our kernels serve in launches alone: torch's draws where nobody
        #: can run it without numbers.
        self.draws: str | None = None

    @property
    def served(self) -> list[str]:
        return [path for path, why in self.refused.items() if why is None]

    @staticmethod
    def sees_to(layer: nn.Module) -> bool:
        """That it does not draw inside cuDNN."""
        return can_become_ours(layer)

    def leave_loops(self, counts: dict[str, int]) -> None:
        """Ours, a layer that is called this often would be compiled by itself, and for its sake
        nothing else of the model; torch's is none of the parts that count."""
        for path in self.served:
            times = counts.get(path, 0)  # the model itself is no part of it
            if times >= FEWEST_CALLS:
                self.refused[path] = f"it is called {times} times in one forward pass"

    def slower_ones_served(self, counts: dict[str, int]) -> OwnKernels | None:
        """What it would be if memory counted more than time: those that are refused, served in
        more launches than are taken to be quick. None where some would be left to torch."""
        slower = [path for path, why in self.refused.items() if why is not None]
        if not slower or not all(self._if_slower.get(path) for path in slower):
            return None
        found = OwnKernels()
        found.refused, found.slower = dict.fromkeys(self.refused), slower
        found.leave_loops(counts)
        return found if len(found.served) == len(found.refused) else None

    def told(self) -> list[str]:
        found = []
        if self.served:
            found.append(
                f"recurrent layers of torch.nn that run on kernels of ecornn: {_names(self.served)}"
            )
        if self.slower:
            why = "in more launches than are taken to be quick, for the sake of memory"
            found.append(f"of these, {why}: {_names(self.slower)}")
        others = ((path, why) for path, why in self.refused.items() if why is not None)
        return [
            *found,
            *(f"{path or '(the model)'} is left to torch: {why}" for path, why in others),
        ]

    @contextmanager
    def noted(self, twin: nn.Module) -> Iterator[None]:
        """While a copy of the model runs, its layers ours: what would run each of them."""
        hooks = []
        for path, layer in twin.named_modules():
            if can_become_ours(layer):
                become_ours(layer)
                hooks.append(layer.register_forward_pre_hook(self._note(path), with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _note(self, path: str) -> Callable[..., None]:
        def note(layer: Any, args: Any, kwargs: Any) -> None:
            why = refusal(layer, args, kwargs)
            self.refused[path] = self.refused.get(path) or why
            if why is None:
                return
            able = self._if_slower.get(path, True) and serves_in_launches(layer, args, kwargs)
            self._if_slower[path] = able
            if layer.training and layer.dropout > 0:
                if not able:
                    raise NotUnderstood(_drawing(path))
                self.draws = _drawing(path)
                layer.backend = KERNELS  # the copy's: it has no numbers to draw by itself

        return note


def _drawing(path: str) -> str:
    return f"{path} draws inside cuDNN, even without numbers"


def _names(paths: list[str]) -> str:
    return ", ".join(path or "(the model)" for path in paths)


def refusal(layer: Any, args: Any, kwargs: Any) -> str | None:
    """Why our kernels do not serve a call of a layer of ours; None if they do."""
    with torch.enable_grad():  # often the first call of a model that is trained is made without
        plan = layer.explain(*args, **kwargs)
    reasons = (why.reason for why in plan.rejections if why.backend == KERNELS)
    return None if plan.backend == KERNELS else next(reasons, f"{plan.backend} runs it")


def serves_in_launches(layer: Any, args: Any, kwargs: Any) -> bool:
    """Whether our kernels would serve the call in as many launches as it takes. Not where it has so
    few steps that they are refused for that."""
    with torch.enable_grad():
        spec = layer.explain(*args, **kwargs).spec
    backend = by_name(KERNELS)
    refused = backend.unavailable() or backend.refuse(replace(spec, backend=KERNELS))
    return refused is None and not spec.short


def run_on_own_kernels(model: nn.Module, paths: list[str]) -> None:
    for path in paths:
        become_ours(model.get_submodule(path))


def has_layers_of_torch(model: nn.Module) -> bool:
    """On a GPU, where the kernels are."""
    layers = filter(can_become_ours, model.modules())
    return any(weight.is_cuda for layer in layers for weight in layer.parameters())
