"""`Graph`: a traced program as plain values: what each operation uses, and which memory it holds.

Memory is followed by storage, not by tensor: a view holds its base's storage, and an operation of
several results holds all of theirs until the last of them was taken out.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from ecornn.echo.work import NOTHING, Work, work_of
from ecornn.errors import EcornnError


class NotUnderstood(EcornnError, RuntimeError):
    """A graph that the analysis cannot follow; says why."""


#: What can be said of an operation without knowing its numbers:
#: "input"    given to the graph
#: "view"     makes no memory of its own
#: "product"  does far more arithmetic than it reads and writes
#: "random"   gives something else when it is run again
#: "opaque"   not known to give the same when it is run again
#: "cheap"    everything else: elementwise operators, reductions, copies
KINDS = ("input", "view", "product", "random", "opaque", "cheap")

#: Operators that are never run again, by the name of their packet.
PRODUCTS = frozenset(
    {
        *("mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "convolution"),
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
        *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        *("_scaled_mm", "_grouped_mm", "linear", "matmul", "einsum"),
    }
)


#: Operators that read statistics which the forward pass moves: run again, they would read others.
STATEFUL = frozenset(
    {
        *("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional"),
        *("cudnn_batch_norm", "miopen_batch_norm", "batch_norm_update_stats"),
        *("_batch_norm_with_update", "_batch_norm_with_update_functional"),
    }
)


@dataclass(frozen=True)
class Operation:
    """One node. `uses` are places of earlier operations in the graph."""

    name: str
    target: str  # such as "aten.mm.default"
    kind: str  # one of `KINDS`
    uses: tuple[int, ...]
    holds: tuple[int, ...]  # storages that its result refers to
    several: bool = False  # its result is a tuple
    work: Work = NOTHING


@dataclass(frozen=True)
class Graph:
    operations: tuple[Operation, ...]
    storages: tuple[int, ...]  # bytes of each
    #: Operations whose results leave the graph, in order; None where something else does.
    outputs: tuple[int | None, ...]

    @property
    def inputs(self) -> tuple[int, ...]:
        return tuple(i for i, op in enumerate(self.operations) if op.kind == "input")


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


def _kind(node: fx.Node, *, makes_memory: bool) -> str:
    if node.op in ("placeholder", "get_attr"):
        return "input"
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        if torch.Tag.nondeterministic_seeded in target.tags:
            return "random"
        name = target.overloadpacket.__name__
        ours_to_run = target.namespace in ("aten", "prims") and not target._schema.is_mutable
        if not ours_to_run or name in STATEFUL:
            return "opaque"
        if name in PRODUCTS:
            return "product"
    elif target is not operator.getitem:
        return "opaque"
    return "cheap" if makes_memory else "view"


class _Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._operations: list[Operation] = []
        self._place: dict[fx.Node, int] = {}
        self._storages: list[int] = []
        self._known: dict[StorageWeakRef, int] = {}
        self._alive: list[Tensor] = []  # so that no storage's identity is used again
        self._outputs: tuple[int | None, ...] = ()
        self._work = NOTHING  # of the call that was just made

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = super().call_function(target, args, kwargs)
        self._work = work_of(target, args, kwargs, result)
        return result

    def run_node(self, n: fx.Node) -> Any:
        self._work = NOTHING
        result = super().run_node(n)
        if n.op == "output":
            leaving = tree_leaves(n.args[0], is_leaf=lambda leaf: leaf is None)
            self._outputs = tuple(self._place.get(node) for node in leaving)
            return result
        uses = tuple(sorted({self._place[used] for used in n.all_input_nodes}))
        holds = {self._storage_of(t) for t in tree_leaves(result) if isinstance(t, Tensor)}
        before = {storage for used in uses for storage in self._operations[used].holds}
        kind = _kind(n, makes_memory=not holds <= before)
        self._place[n] = len(self._operations)
        several = isinstance(result, tuple | list)
        self._operations.append(
            Operation(n.name, str(n.target), kind, uses, tuple(sorted(holds)), several, self._work)
        )
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
