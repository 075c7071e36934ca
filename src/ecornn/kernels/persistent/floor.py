"""The floor under a persistent forward pass: its exchange of h between blocks, and nothing else."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch

from ecornn.kernels.persistent.choose import Request
from ecornn.kernels.persistent.device import failure_flag, geometry, numbers_of
from ecornn.kernels.persistent.launch import launcher
from ecornn.kernels.persistent.model import describe
from ecornn.kernels.persistent.tile import round_up


class FloorArguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("exchange", "seen", "failed")),
        *((name, ctypes.c_int) for name in ("steps", "batch", "hidden", "group_batch")),
    )


class Floor:
    """The exchange with the same blocks, tiles and bytes as the forward pass of this size."""

    def __init__(
        self,
        cell: str,
        dtype: torch.dtype,
        hidden: int,
        batch: int,
        steps: int,
        device: torch.device,
    ) -> None:
        index = torch.empty(0, device=device).device.index  # "cuda" alone has none
        numbers = numbers_of(dtype)
        if numbers is None:
            raise ValueError(f"persistent kernels do not multiply {dtype}")
        found = geometry(Request("forward", cell, numbers, hidden, batch), index)
        if found is None:
            raise ValueError(f"no persistent kernel holds {hidden} units with {batch} sequences")
        own = replace(found, tile=replace(found.tile, kernel="exchange_floor"))
        self.description = describe(found)
        width, narrow = round_up(hidden, found.tile.vector), found.tile.exchanged_bytes == 2
        self._marks = torch.int16 if narrow else torch.int32
        through_l2 = found.tile.grid
        shape = (steps if through_l2 else 1, batch, width)
        self._exchange = torch.empty(shape, dtype=self._marks, device=device)
        self._seen = torch.empty(found.all_blocks, dtype=torch.int32, device=device)
        self._through_l2 = through_l2
        self._launch = launcher(own, index)
        a = self._arguments = FloorArguments()
        a.exchange, a.seen = self._exchange.data_ptr(), self._seen.data_ptr()
        a.failed = failure_flag().address
        a.steps, a.batch, a.hidden = steps, batch, hidden
        a.group_batch = found.group_batch

    def run(self) -> None:
        """One launch on the current stream."""
        failure_flag().check()
        if self._through_l2:
            self._exchange.fill_(-1)
        self._launch(self._arguments)
