"""Recurrent networks for PyTorch: drop-in layers with what torch.nn lacks."""

from typing import TYPE_CHECKING, Any

from ecornn._version import __version__
from ecornn.errors import (
    EcornnError,
    InvalidInput,
    KernelGaveUp,
    NoBackend,
    NotDifferentiableTwice,
)
from ecornn.nn import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell, convert, patch
from ecornn.planner import ExecutionPlan

if TYPE_CHECKING:
    from ecornn.echo.compiled import compile

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "EcornnError",
    "ExecutionPlan",
    "GRUCell",
    "InvalidInput",
    "KernelGaveUp",
    "LSTMCell",
    "NoBackend",
    "NotDifferentiableTwice",
    "RNNCell",
    "__version__",
    "compile",
    "convert",
    "patch",
]


def __getattr__(name: str) -> Any:
    """`compile` brings torch's compiler with it, and is imported by who uses it."""
    if name != "compile":
        raise AttributeError(f"module 'ecornn' has no attribute {name!r}")
    from ecornn.echo.compiled import compile

    return compile
