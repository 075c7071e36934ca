"""A small model, compiled for the least that its code holds and compared with itself uncompiled, in
the process of a test or in one of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from random import SystemRandom
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.async_compile import AsyncCompile

import ecornn
from ecornn.echo.ahead import Ahead


class Model(nn.Module):
    """Of its plans some are compiled to choose among them. With another `factor` it has other code
    and kernels, which no cache knows."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.factor, self.first = factor, nn.Linear(16, 48)
        self.rest = nn.Sequential(nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 16))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.rest(self.first(x) * self.factor)
        return found


def unknown_factor() -> float:
    return SystemRandom().uniform(0.5, 1.5)


def compiled(model: nn.Module) -> Any:
    return ecornn.compile(model, memory="min", codegen="inductor", regions=())


def compile_and_compare(factor: float) -> Any:
    """What was compiled; raises where its results or gradients are others than the model's."""
    model, x = Model(factor), torch.randn(40, 16)
    run = compiled(model)
    for _ in range(2):
        found, expected = run(x), model(x)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        gradients = [
            torch.autograd.grad(one.square().sum(), list(model.parameters()))
            for one in (found, expected)
        ]
        for ours, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    return run


def choose_and_stop(factor: float) -> None:
    """What is chosen is not compiled."""
    choose = Ahead.least

    def chosen(its: Ahead) -> None:
        choose(its)
        raise RuntimeError("it is chosen")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ahead, "least", chosen)
        with pytest.raises(RuntimeError, match="it is chosen"):
            compiled(Model(factor))(torch.randn(40, 16))


def count_kernels(set_attribute: Callable[..., None] = setattr) -> list[str]:
    """The sources of those that are asked for from here on."""
    found: list[str] = []
    make: Callable[..., Any] = AsyncCompile.cpp_pybinding

    def counted(its: Any, types: Any, source: str) -> Any:
        found.append(source)
        return make(its, types, source)

    set_attribute(AsyncCompile, "cpp_pybinding", counted)
    return found


def from_the_cache() -> tuple[int, int]:
    """How many passes came out of inductor's cache, and how many did not."""
    found = counters["inductor"]
    return found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]


def main(what: str, factor: float) -> None:
    kernels = count_kernels()
    if what == "choose":
        choose_and_stop(factor)
        assert not kernels
        assert from_the_cache()[0] == 0
    else:
        compile_and_compare(factor)
        assert kernels
        assert from_the_cache()[1] == 0


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
