"""A layer's weights: their names in `state_dict`, and their form for the operator."""

from __future__ import annotations

import torch
from torch import Tensor

from ecornn.spec import GATES

#: Parameter names of torch.nn, and ours for what it lacks; of layer and direction suffix.
PARAMETER_NAMES = {
    "w_ih": "weight_ih_l{}{}",
    "w_hh": "weight_hh_l{}{}",
    "b_ih": "bias_ih_l{}{}",
    "b_hh": "bias_hh_l{}{}",
    "w_hr": "weight_hr_l{}{}",
    "norm_ih": "norm_ih_l{}{}",
    "norm_hh": "norm_hh_l{}{}",
    "norm_c": "norm_c_l{}{}",
    "norm_c_bias": "norm_c_bias_l{}{}",
}


def weight_names(layout: str, layers: int, directions: int) -> tuple[str, ...]:
    """Names of the parameters, layer by layer, direction by direction, in the operator's order."""
    return tuple(
        PARAMETER_NAMES[part].format(k, "_reverse" if d else "")
        for k in range(layers)
        for d in range(directions)
        for part in layout.split(",")
    )


def is_norm(name: str) -> bool:
    return name.startswith("norm_")


def add_norms(layer: torch.nn.RNNBase, cell: str, names: tuple[str, ...]) -> None:
    """Register the layer norms' parameters that `names` has, on the weights' device and dtype."""
    like: Tensor = getattr(layer, names[0])
    for name in names:
        if is_norm(name):
            gates = 1 if name.startswith("norm_c") else GATES[cell]
            empty = torch.empty(gates * layer.hidden_size, device=like.device, dtype=like.dtype)
            layer.register_parameter(name, torch.nn.Parameter(empty))
    reset_norms(layer)


def reset_norms(layer: torch.nn.RNNBase) -> None:
    """A norm starts as the plain normalization: scale one, shift zero."""
    for name, parameter in layer.named_parameters(recurse=False):
        if is_norm(name):
            fill = torch.nn.init.zeros_ if "bias" in name else torch.nn.init.ones_
            fill(parameter)
