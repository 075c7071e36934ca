"""What a step without numbers holds: `Counted`, its tensors' storages; `NotedFunctions`, whose they
are where it is a recurrent layer that has made them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_leaves

from ecornn.echo.fakes import CUDNN, WithoutNumbers
from ecornn.echo.lean.alone import Loan
from ecornn.echo.lean.layers import Arguments
from ecornn.echo.lean.mode import LeanFunctions, Replaced
from ecornn.echo.lean.worth import layer_seconds
from ecornn.echo.model_call import Form
from ecornn.echo.replay import Ledger


class Counted(WithoutNumbers):
    """Counts the storages of tensors without numbers. No mode beside it: torch's compiler leaves
    alone what runs under others."""

    def __init__(self, device: str) -> None:
        super().__init__(CUDNN)
        self.ledger = Ledger(device)

    def made(self, func: Any, args: Any, kwargs: Any, result: Any, scratch: int) -> None:
        for leaf in tree_leaves(result):
            if isinstance(leaf, FakeTensor):
                self.ledger.see(leaf)
        self.ledger.reach(self.ledger.now + scratch)

    def bytes_held(self, tensors: Iterable[Tensor]) -> int:
        """Of what is not counted, each storage once."""
        of_device = (t.untyped_storage() for t in tensors if t.device.type == self.ledger.device)
        storages = {storage._cdata: storage.nbytes() for storage in of_device}
        return sum(map(self.ledger.rounded, storages.values()))

    def held(self, value: Any) -> Any:
        """What the caller holds: it is not counted."""
        if isinstance(value, Form):
            with self:
                made = torch.empty_strided(
                    value.size, value.stride, dtype=value.dtype, device=value.device
                )
            value = made.requires_grad_(value.requires_grad)
        if isinstance(value, FakeTensor):
            self.ledger.ignore(value)
        return value


class NotedFunctions(LeanFunctions):
    """Those that are replaced in a rehearsal, which takes note of recurrent layers: how long one
    would take to be run again, and what it makes where it is not."""

    def __init__(
        self, ledger: Ledger, again: Container[int], lend: Callable[[Tensor], Loan]
    ) -> None:
        super().__init__(Replaced(), again=again, lend=lend)
        self._ledger = ledger
        self.seconds: dict[int, float] = {}

    def run_layer(self, place: int, layer: Any, call: Arguments, *, again: bool) -> Any:
        self.seconds[place] = layer_seconds(call)
        self._ledger.owner = None if again else place
        try:
            return super().run_layer(place, layer, call, again=again)
        finally:
            self._ledger.owner = None


#: Made for each call of the model.
Functions = Callable[[Ledger], NotedFunctions]
