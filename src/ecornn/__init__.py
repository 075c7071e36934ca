"""Recurrent networks for PyTorch: drop-in layers with what torch.nn lacks."""

import importlib
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
    from ecornn import profiler
    from ecornn.echo.by_name import explain
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
    "explain",
    "patch",
    "profiler",
]


def __getattr__(name: str) -> Any:
    """Imported by who uses it: `compile` brings torch's compiler with it."""
    if name == "compile":
        from ecornn.echo.compiled import compile

        return compile
    if name == "explain":
        from ecornn.echo.by_name import explain

        return explain
    if name == "profiler":
        return importlib.import_module("ecornn.profiler")
    raise AttributeError(f"module 'ecornn' has no attribute {name!r}")
