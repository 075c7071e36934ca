"""Second derivatives of kernels that autograd records once: what hooks on their nodes give back."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import ecornn
from ecornn.ops.native import _differentiated


def test_a_frozen_weight_gets_no_gradient() -> None:
    """cuDNN's node has gradients for all weights, also where only some of them want one."""
    x, w, frozen = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True), None
    frozen = torch.randn(3)
    outputs = (x * w * frozen, x + w)
    d_outputs = (torch.ones(3), None, None)
    d_inputs = (torch.empty(3), torch.empty(3), torch.empty(3), None)
    found = _differentiated(outputs, d_outputs, (x, w, frozen, None), d_inputs)
    assert found[2:] == (None, None)
    assert found[0] is not None
    assert torch.equal(found[0], w * frozen)
    assert found[0].requires_grad


@pytest.mark.parametrize("frozen", ["bias_ih_l0", "weight_hh_l0"])
def test_second_derivatives_of_a_layer_with_a_frozen_weight(frozen: str) -> None:
    ours, x = ecornn.LSTM(3, 4), torch.randn(5, 2, 3, requires_grad=True)
    wide = torch.nn.LSTM(3, 4).double()
    wide.load_state_dict(ours.state_dict())
    for layer in (ours, wide):
        getattr(layer, frozen).requires_grad_(False)
    found = []
    for layer, leaf in ((ours, x), (wide, x.detach().double().requires_grad_())):
        (first,) = torch.autograd.grad(layer(leaf)[0].sin().sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), leaf)[0])
    torch.testing.assert_close(found[0].double(), found[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
@pytest.mark.parametrize(
    "options", [{}, {"lengths": [5, 3]}, {"resets": torch.zeros(5, 2, dtype=torch.bool)}], ids=str
)
def test_a_layer_s_input_does_not_outlive_its_backward_pass(
    cell: str, options: dict[str, Any]
) -> None:
    layer, leaf = getattr(ecornn, cell)(3, 4), torch.randn(5, 2, 3, requires_grad=True)
    x = leaf * 1
    output = layer(x, **options)[0]
    gone = weakref.ref(x)
    del x
    output.sum().backward()
    gc.collect()
    assert gone() is None
