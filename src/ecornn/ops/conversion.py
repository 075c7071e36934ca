"""How recurrent layers of torch.nn become this package's. `nn` knows it, which stands above whoever
plans a model, and tells it here."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

#: By torch's class, what makes one of its layers ours, in place: the same object, with the same
#: parameters.
_WAYS: dict[type[nn.Module], Callable[[nn.Module], None]] = {}


def tell(kind: type[nn.Module], way: Callable[[nn.Module], None]) -> None:
    _WAYS[kind] = way


def can_become_ours(layer: nn.Module) -> bool:
    """Subclasses may have a forward pass of their own."""
    return type(layer) in _WAYS


def become_ours(layer: nn.Module) -> None:
    """Where it still can: another thread may have been quicker."""
    way = _WAYS.get(type(layer))
    if way is not None:
        way(layer)
