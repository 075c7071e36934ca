"""`Graph`: a traced program as plain values: what each operation uses, and which memory it holds.

Memory is followed by storage, not by tensor: a view holds its base's storage, and an operation of
several results holds all of theirs until the last of them was taken out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from ecornn.errors import EcornnError


class NotUnderstood(EcornnError, RuntimeError):
    """A graph that the analysis cannot follow; says why."""


@dataclass(frozen=True)
class Operation:
    """One node. `uses` are places of earlier operations in the graph."""

    name: str
    target: str  # such as "aten.mm.default"; "input" for what the graph is given
    uses: tuple[int, ...]
    holds: tuple[int, ...]  # storages that its result refers to


@dataclass(frozen=True)
class Graph:
    operations: tuple[Operation, ...]
    storages: tuple[int, ...]  # bytes of each
    outputs: tuple[int, ...]  # operations whose results leave the graph

    @property
    def inputs(self) -> tuple[int, ...]:
        return tuple(i for i, op in enumerate(self.operations) if op.target == "input")


def read_graph(module: fx.GraphModule) -> Graph:
    """The graph of a module whose placeholders know their values (`meta["val"]`), as those that
    AOTAutograd traces do. It is run once on fake tensors, which shows what shares memory."""
    given = [node.meta.get("val") for node in module.graph.nodes if node.op == "placeholder"]
    fakes = [value for value in given if isinstance(value, FakeTensor)]
    if any(value is None for value in given):
        raise NotUnderstood("an input of the graph does not say what it is")
    mode = fakes[0].fake_mode if fakes else FakeTensorMode()
    recorder = _Recorder(module)
    with mode, torch.no_grad():
        recorder.run(*(_checked(value) for value in given))
    return recorder.finished()


def _checked(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        sizes = (*value.shape, *value.stride())
        if any(not isinstance(size, int) for size in sizes):
            raise NotUnderstood("the graph has sizes that are not known")
    return value


class _Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._operations: list[Operation] = []
        self._place: dict[fx.Node, int] = {}
        self._storages: list[int] = []
        self._known: dict[StorageWeakRef, int] = {}
        self._alive: list[Tensor] = []  # so that no storage's identity is used again
        self._outputs: tuple[int, ...] = ()

    def run_node(self, n: fx.Node) -> Any:
        uses = tuple(sorted({self._place[user] for user in n.all_input_nodes}))
        result = super().run_node(n)
        if n.op == "output":
            self._outputs = uses
            return result
        self._place[n] = len(self._operations)
        holds = {self._storage_of(t) for t in tree_leaves(result) if isinstance(t, Tensor)}
        target = "input" if n.op in ("placeholder", "get_attr") else str(n.target)
        self._operations.append(Operation(n.name, target, uses, tuple(sorted(holds))))
        return result

    def _storage_of(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        key = StorageWeakRef(storage)
        if key not in self._known:
            self._known[key] = len(self._storages)
            self._storages.append(storage.nbytes())
            self._alive.append(tensor)
        return self._known[key]

    def finished(self) -> Graph:
        return Graph(tuple(self._operations), tuple(self._storages), self._outputs)
