"""How many bytes the results of operators take while a program runs, seen from outside."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ecornn.bench.models.step import Step


class Alive(TorchDispatchMode):
    """`bytes_at`: after each operator, of all storages seen so far that still exist."""

    def __init__(self, given: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._seen: dict[StorageWeakRef, int] = {}
        self.bytes_at: list[int] = []
        for tensor in given:
            self._see(tensor)

    @property
    def peak_bytes(self) -> int:
        return max(self.bytes_at)

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._seen[StorageWeakRef(storage)] = storage.nbytes()

    def bytes_now(self) -> int:
        self._seen = {ref: n for ref, n in self._seen.items() if not ref.expired()}
        return sum(self._seen.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        self.bytes_at.append(self.bytes_now())
        return result


def held_by(step: Step) -> list[Tensor]:
    """What a step holds before it begins."""
    states = [value for state in step.optimizer.state.values() for value in state.values()]
    gradients = [p.grad for p in step.model.parameters() if p.grad is not None]
    tensors = [*step.model.parameters(), *step.model.buffers(), *states, *step.batch, *gradients]
    return [one for one in tensors if isinstance(one, Tensor) and one.device == step.device]
