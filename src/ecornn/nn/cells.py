"""Single-step cells: torch.nn's, with errors that say what to do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ecornn.errors import InvalidInput
from ecornn.nn import checks


def _check_step(module: torch.nn.RNNCellBase, x: Any, states: tuple[Any, ...]) -> None:
    weight = module.weight_ih
    cast = checks.casting(weight.device.type)
    if not isinstance(x, Tensor):
        raise InvalidInput(
            "input", f"a {type(x).__name__}", "a Tensor", "convert it with torch.as_tensor"
        )
    checks.check_dense("input", x)
    if x.dim() not in (1, 2):
        raise InvalidInput(
            "input",
            checks.shape_of(x),
            "(B, I) or, without a batch, (I,)",
            "a cell takes one step: loop over time, or use the layer",
        )
    if x.shape[-1] != module.input_size:
        raise InvalidInput(
            "input",
            f"{x.shape[-1]} features in {tuple(x.shape)}",
            f"{module.input_size}, the cell's input_size",
            "check the order of the dimensions",
        )
    checks.check_values_of("input", x, weight, cast=cast)
    expected = (*x.shape[:-1], module.hidden_size)
    for name, state in zip(("h", "c"), states, strict=False):
        if not isinstance(state, Tensor) or tuple(state.shape) != expected:
            got = checks.shape_of(state) if isinstance(state, Tensor) else type(state).__name__
            raise InvalidInput(
                f"hx, {name}",
                got,
                f"{expected}",
                "the state has the input's batch and the cell's hidden_size",
            )
        checks.check_values_of(f"hx, {name}", state, weight, cast=cast)


class LSTMCell(torch.nn.LSTMCell):
    """A drop-in replacement for `torch.nn.LSTMCell`."""

    def forward(
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        _check_step(self, input, () if hx is None else checks.check_pair(hx))
        return super().forward(input, hx)


class GRUCell(torch.nn.GRUCell):
    """A drop-in replacement for `torch.nn.GRUCell`."""

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        _check_step(self, input, () if hx is None else (hx,))
        return super().forward(input, hx)


class RNNCell(torch.nn.RNNCell):
    """A drop-in replacement for `torch.nn.RNNCell`."""

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        _check_step(self, input, () if hx is None else (hx,))
        return super().forward(input, hx)
