"""Recurrent networks for PyTorch: drop-in layers with what torch.nn lacks."""

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
    "convert",
    "patch",
]
