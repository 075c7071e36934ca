"""`GRU`: torch.nn.GRU with what it lacks."""

from __future__ import annotations

import torch

from ecornn.nn.base import RecurrentLayer


class GRU(RecurrentLayer, torch.nn.GRU):
    """A drop-in replacement for `torch.nn.GRU`; options and call as of `ecornn.LSTM`."""
