"""The exchange floor: what a step takes where its states are handed on and nothing is computed."""

from __future__ import annotations

import torch

from ecornn.bench.calls import capture
from ecornn.bench.cases import Case


class ReplayedFloor:
    """One launch of all the case's steps, replayed from a CUDA graph. It gives no results, so
    there is nothing to check, and it has no backward pass."""

    def __init__(self, case: Case, device: torch.device) -> None:
        # Here, so that measuring on a CPU never asks for what launches kernels.
        from ecornn.kernels.persistent.floor import Floor

        # Kept: the graph writes into its buffers.
        self._floor = Floor(
            case.cell, case.torch_dtype, case.hidden, case.batch, case.steps, device
        )
        self._graph, _ = capture(self._floor.run)

    def forward(self) -> None:
        self._graph.replay()

    def plan(self) -> str:
        return self._floor.description
