"""A torch.nn module and ours with the same weights, run on the same arguments."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

import ecornn
from support.tolerances import assert_matches, tolerance

LAYERS = ("LSTM", "GRU", "RNN")
CELLS = ("LSTMCell", "GRUCell", "RNNCell")


def pair(name: str, *args: Any, **kwargs: Any) -> tuple[nn.Module, nn.Module]:
    """(ours, torch.nn's) of one class, constructed alike, ours with torch's weights."""
    theirs = getattr(nn, name)(*args, **kwargs)
    ours = getattr(ecornn, name)(*args, **kwargs)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def rebuild(value: Any, leaf: Any) -> Any:
    """The same structure of tuples, lists and packed sequences with `leaf` of every tensor."""
    if isinstance(value, PackedSequence):
        return PackedSequence(leaf(value.data), *value[1:])
    if isinstance(value, (tuple, list)):
        return type(value)(rebuild(v, leaf) for v in value)
    return leaf(value) if isinstance(value, Tensor) else value


def tensors(value: Any) -> list[Tensor]:
    """Every tensor in a nest of tuples, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in tensors(v)]
    return []


def measure(module: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
    """Results and gradients of one call, by name, from copies of its arguments.

    The loss weighs every element differently, so that a permuted gradient shows.
    """
    args, kwargs = rebuild(args, _leaf), {k: rebuild(v, _leaf) for k, v in kwargs.items()}
    module.zero_grad(set_to_none=True)
    results = tensors(module(*args, **kwargs))
    found = {f"result {i}": t.detach() for i, t in enumerate(results)}
    floating = [t for t in results if t.requires_grad]
    if floating:
        torch.autograd.backward(floating, [_weighing(t) for t in floating])
    given = [t for t in tensors((args, tuple(kwargs.values()))) if t.requires_grad]
    found |= {f"gradient of argument {i}": t.grad for i, t in enumerate(given)}
    found |= {
        f"gradient of {name}": p.grad for name, p in module.named_parameters() if p.grad is not None
    }
    return found


def _leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


def _weighing(x: Tensor) -> Tensor:
    return torch.cos(torch.arange(x.numel(), dtype=torch.float64)).view(x.shape).to(x)


def doubled(module: nn.Module, *args: Any) -> dict[str, Tensor]:
    """`measure` of a float64 copy: what rounding is judged against."""
    exact = copy.deepcopy(module).double()
    return measure(
        exact, *rebuild(args, lambda x: x.detach().double().requires_grad_(x.requires_grad))
    )


def assert_identical(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Bit by bit: both ran the same kernels of torch."""
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype, name
        assert ours[name].shape == value.shape, name
        assert torch.equal(ours[name], value), f"{name}: {(ours[name] - value).abs().max()}"


def assert_near(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], dtype: torch.dtype, steps: int
) -> None:
    """Within the rounding of `dtype`; `theirs` may be torch.nn's answer in float64."""
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if value.dtype.is_floating_point:
            assert ours[name].dtype == dtype, name
            assert_matches(ours[name], value, tolerance(dtype, steps), name)
        else:  # batch sizes and the order of a packed sequence
            assert torch.equal(ours[name], value), name
