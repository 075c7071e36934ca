"""What a `make_step` returns, read in one place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ecornn.errors import InvalidInput
from ecornn.profiler.inventory import contents_of
from ecornn.profiler.model import MemoryReport
from ecornn.profiler.session import Profile, check, device_of, read_optimizers, run_to_end
from ecornn.profiler.without_numbers import meta_kernels

_EXPECTED = "(step, model), (step, model, optimizer), or a callable with `model` and `optimizer`"


@dataclass(frozen=True)
class Made:
    step: Callable[[], Any]
    model: nn.Module
    optimizers: tuple[Optimizer, ...]

    def warm_up(self) -> None:
        """One step that is not observed, which runs where that does."""
        contents = contents_of(self.model)
        without_numbers = contents.are_fake or device_of(contents).type == "meta"
        del contents  # a step may replace its weights: nobody else may hold on to the old ones
        with meta_kernels() if without_numbers else nullcontext():
            run_to_end(self.step)

    def observed(self, warm_up: int = 1) -> MemoryReport:
        """`warm_up` steps come first: the optimizer then has its state, and code is compiled. Where
        there is no history of the allocator's it is read after every operator, since two steps are
        compared operator by operator."""
        check(self.step, self.model)
        for _ in range(warm_up):
            self.warm_up()
        return Profile(self.model, self.optimizers, every=1).of(self.step)


def read_step(made: Any) -> Made:
    parts = made if isinstance(made, tuple) else (made, getattr(made, "model", None), None)
    if len(parts) == 2:
        parts = (*parts, None)
    if not isinstance(made, tuple):
        parts = (*parts[:2], getattr(made, "optimizer", None))
    if len(parts) != 3 or not callable(parts[0]) or not isinstance(parts[1], nn.Module):
        told = type(made).__name__
        if isinstance(made, tuple):
            told = f"({', '.join(type(one).__name__ for one in made)})"
        raise InvalidInput(
            "make_step", f"one that returns {told}", _EXPECTED, "return one of these"
        )
    step, model, optimizer = parts
    return Made(step, model, read_optimizers(optimizer))
