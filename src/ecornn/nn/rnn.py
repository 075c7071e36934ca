"""`RNN`: torch.nn.RNN with what it lacks."""

from __future__ import annotations

import torch

from ecornn.nn.base import RecurrentLayer


class RNN(RecurrentLayer, torch.nn.RNN):
    """A drop-in replacement for `torch.nn.RNN` (tanh or ReLU); options and call as of
    `ecornn.LSTM`."""
