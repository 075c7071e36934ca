"""Gradients that only compare a result of the forward pass, as torch's operators compute them, of a
mask in the place of the result: to the same bits, NaN among them.

Not of hardtanh: torch's kernel for the CPU gives another gradient for NaN in its vectors than in
what is left over. Nor of leaky ReLU: its kernel for bfloat16 gives other bits than its definition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

aten = torch.ops.aten


@dataclass(frozen=True)
class ByMask:
    """`mask` of the result and of the operator's further arguments; `gradient` of the mask, the
    gradient that arrives and these."""

    mask: Callable[..., Tensor]
    gradient: Callable[..., Tensor]


#: By operator; the first argument is the gradient that arrives, the second what is compared.
BY_MASKS: dict[Any, ByMask] = {
    # what is not a number is above the threshold
    aten.threshold_backward.default: ByMask(
        lambda result, threshold: result <= threshold,
        lambda mask, gradient, _: torch.where(mask, 0, gradient),
    ),
}


def written_out(node: fx.Node) -> fx.GraphModule:
    """The operators that stand in the place of such a gradient: inputs are what arrives and what is
    compared, the result is the gradient."""
    by, (arriving, compared) = BY_MASKS[node.target], (a.meta["val"] for a in node.args[:2])  # type: ignore[union-attr]
    further = node.args[2:]

    def of(gradient: Tensor, result: Tensor) -> Tensor:
        return by.gradient(by.mask(result, *further), gradient, *further)

    with arriving.fake_mode, torch.no_grad():
        return make_fx(of)(arriving, compared)
