"""Switching: `convert` a model one has, or `patch` the code that makes it."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch.nn.utils import parametrize

from ecornn.errors import InvalidInput
from ecornn.nn.base import RecurrentLayer
from ecornn.nn.cells import GRUCell, LSTMCell, RNNCell
from ecornn.nn.gru import GRU
from ecornn.nn.lstm import LSTM
from ecornn.nn.rnn import RNN
from ecornn.ops import conversion

#: torch's class and ours.
REPLACEMENTS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    torch.nn.LSTM: LSTM,
    torch.nn.GRU: GRU,
    torch.nn.RNN: RNN,
    torch.nn.LSTMCell: LSTMCell,
    torch.nn.GRUCell: GRUCell,
    torch.nn.RNNCell: RNNCell,
}

#: Of these, the layers: whoever compiles a model may run them on our kernels. Cells have none.
LAYERS = (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN)

ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)


def convert(model: ModuleT) -> ModuleT:
    """Make every torch.nn recurrent layer and cell of `model` ours, in place; returns `model`.

    The layers stay the same objects with the same parameters, so optimizers, hooks, tied weights
    and references from elsewhere hold. Subclasses of torch's layers with a forward pass of their
    own are left alone.
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidInput(
            "model", f"a {type(model).__name__}", "a torch.nn.Module", "pass the model itself"
        )
    for module in model.modules():
        _convert_one(module)
    return model


def _convert_one(module: torch.nn.Module) -> None:
    kind = type(module)
    if kind in REPLACEMENTS:
        ours = REPLACEMENTS[kind]
    elif parametrize.is_parametrized(module) and kind.__bases__[0] in REPLACEMENTS:
        # parametrize made a class for this module, which its copies share: a new one for this one
        own = {k: v for k, v in vars(kind).items() if k not in ("__dict__", "__weakref__")}
        ours = type(kind.__name__, (REPLACEMENTS[kind.__bases__[0]],), own)
    else:
        return
    if issubclass(ours, RecurrentLayer):
        # before it is ours: another thread may call it meanwhile
        RecurrentLayer._fill_options(module)  # type: ignore[arg-type]
    module.__class__ = ours


for _kind in LAYERS:
    conversion.tell(_kind, _convert_one)


class patch:
    """While it lasts, `torch.nn.LSTM(…)` and its kin make our layers, wherever they are called.

    `ecornn.patch()` lasts until `undo()`; `with ecornn.patch():` until the block's end. It works
    for code that imported the classes before, because it is the classes' own construction that
    changes and not a name; subclasses are left alone.
    """

    _depth = 0
    _installed = False

    def __init__(self) -> None:
        self._active = False
        self._activate()

    def _activate(self) -> None:
        if self._active:
            return
        self._active = True
        if not patch._installed:
            # Once, and it stays: a class whose __new__ was deleted again does not get object's
            # back and refuses all arguments. While nothing is patched it does what object's does.
            patch._installed = True
            for theirs, ours in REPLACEMENTS.items():
                theirs.__new__ = staticmethod(_constructor(theirs, ours))  # type: ignore[method-assign]
        patch._depth += 1

    def undo(self) -> None:
        """From here on torch's classes make torch's layers. Layers made meanwhile stay ours."""
        if not self._active:
            return
        self._active = False
        patch._depth -= 1

    def __enter__(self) -> patch:
        self._activate()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.undo()


def _constructor(theirs: type[torch.nn.Module], ours: type[torch.nn.Module]) -> Callable[..., Any]:
    def __new__(cls: type[torch.nn.Module], *args: Any, **kwargs: Any) -> Any:
        return object.__new__(ours if patch._depth > 0 and cls is theirs else cls)

    return __new__
