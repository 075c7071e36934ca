"""The weights and values of a case, drawn once and given alike to every contender.

Shape suffixes: T time, B batch, I input size, O output size, S layers · directions, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ecornn.bench.cases import Case

#: Class name in torch.nn and in ecornn.nn, and what the constructor needs beside the sizes.
KINDS: dict[str, tuple[str, dict[str, str]]] = {
    "lstm": ("LSTM", {}),
    "gru": ("GRU", {}),
    "rnn_tanh": ("RNN", {"nonlinearity": "tanh"}),
    "rnn_relu": ("RNN", {"nonlinearity": "relu"}),
}


class Values(NamedTuple):
    """What a call is given, padded, time first; and the gradients that come back to it.
    None: the call passes no such state, or the cell has none."""

    input_TBI: Tensor
    h0_SBH: Tensor | None
    c0_SBH: Tensor | None
    grad_output_TBO: Tensor
    grad_h_SBH: Tensor
    grad_c_SBH: Tensor | None

    def map(self, function: Callable[[Tensor], Tensor]) -> Values:
        changed = [None if value is None else function(value) for value in self]
        return Values(*changed)  # type: ignore[arg-type]  # None is where it was


@dataclass(frozen=True)
class Problem:
    """`weights` by their names in the state_dict, in the case's dtype; `lengths` on the CPU."""

    case: Case
    device: torch.device
    weights: dict[str, Tensor]
    lengths: Tensor | None


def make_layer(
    module: Any, case: Case, device: torch.device, dtype: torch.dtype, **options: Any
) -> Any:
    """The case's layer from `module`, which has LSTM, GRU and RNN as torch.nn does. Its weights
    are not drawn: they are given to it. `options` go to the constructor."""
    name, of_the_cell = KINDS[case.cell]
    layer = getattr(module, name)(
        case.input_size,
        case.hidden,
        case.layers,
        bidirectional=case.bidirectional,
        device="meta",
        dtype=dtype,
        **of_the_cell,
        **options,
    )
    return layer if device.type == "meta" else layer.to_empty(device=device)


def draw_problem(case: Case, device: torch.device, generator: torch.Generator) -> Problem:
    """Weights as torch.nn initializes them: uniform in ± 1/√H."""
    bound = case.hidden**-0.5
    shapes = make_layer(torch.nn, case, torch.device("meta"), case.torch_dtype).state_dict()
    weights = {
        name: torch.empty(shape.shape, device=device)
        .uniform_(-bound, bound, generator=generator)
        .to(case.torch_dtype)
        for name, shape in shapes.items()
    }
    lengths = None
    if case.lengths:
        spread = torch.linspace(1, case.steps, case.batch).round().long()
        spread[-1] = case.steps  # a batch of one is as long as it can be
        lengths = spread[torch.randperm(case.batch)]
    return Problem(case, device, weights, lengths)


def draw_values(problem: Problem, generator: torch.Generator) -> Values:
    """Fresh values, also in the padding: nothing there may reach a result."""
    case = problem.case

    def draw(*shape: int) -> Tensor:
        drawn = torch.randn(shape, device=problem.device, generator=generator)
        return drawn.to(case.torch_dtype)

    state = (case.states, case.batch, case.hidden)
    lstm = case.cell == "lstm"
    return Values(
        draw(case.steps, case.batch, case.input_size),
        draw(*state) if case.initial else None,
        draw(*state) if case.initial and lstm else None,
        draw(case.steps, case.batch, case.output_size),
        draw(*state),
        draw(*state) if lstm else None,
    )
