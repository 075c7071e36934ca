"""`Graph`: a traced program as plain values: what each operation uses, and which memory it holds.

Memory is followed by storage, not by tensor: a view holds its base's storage, and an operation of
several results holds all of theirs until the last of them was taken out.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from ecornn.echo.work import NOTHING, Work, touched_bytes, work_of
from ecornn.errors import EcornnError


class NotUnderstood(EcornnError, RuntimeError):
    """A graph that the analysis cannot follow; says why."""


#: What an analysis raises on a graph that it was not made for. The model runs without it.
FAILURES = (
    *(RuntimeError, NotImplementedError, TypeError, AssertionError),
    *(KeyError, IndexError, ValueError),
)

#: What can be said of an operation without knowing its numbers:
#: "input"    given to the graph
#: "constant" belongs to the graph
#: "view"     makes no memory of its own
#: "product"  does far more arithmetic than it reads and writes
#: "random"   gives something else when it is run again
#: "opaque"   not known to give the same when it is run again
#: "number"   a size or another number, not a tensor: passed on as it is
#: "cheap"    everything else: elementwise operators, reductions, copies
KINDS = ("input", "constant", "view", "product", "random", "opaque", "number", "cheap")

_ATTENTION = (
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
    *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu"),
)
#: Operators that are never run again, by the name of their packet. Those of the backward pass are
#: kernels of their own too: what they read is in memory.
PRODUCTS = frozenset(
    {
        *("mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot"),
        *("_scaled_mm", "_grouped_mm", "linear", "matmul", "einsum"),
        *("convolution", "convolution_backward"),
        *_ATTENTION,
        *(f"{name}_backward" for name in _ATTENTION),
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

#: Kinds that may be run again.
RERUN = ("cheap", "view")


@dataclass(frozen=True)
class Operation:
    """One node. `uses` are places of earlier operations, in the order of the arguments."""

    name: str
    target: str  # such as "aten.mm.default"
    kind: str  # one of `KINDS`
    uses: tuple[int, ...]
    holds: tuple[int, ...]  # storages that its result refers to
    several: bool = False  # its result is a tuple
    work: Work = NOTHING
    #: Bytes of its result itself; None: those of its storages. A view may show a part of them.
    shows: int | None = None


@dataclass(frozen=True)
class Graph:
    operations: tuple[Operation, ...]
    storages: tuple[int, ...]  # bytes of each
    #: Operations whose results leave the graph, in order; None where something else does.
    outputs: tuple[int | None, ...]

    def shown_bytes(self, i: int) -> int:
        """What reading all of an operation's result reads."""
        shows = self.operations[i].shows
        return sum(self.storages[s] for s in self.operations[i].holds) if shows is None else shows

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        return tuple(i for i, op in enumerate(self.operations) if op.kind == "input")

    @cached_property
    def constants(self) -> tuple[int, ...]:
        return tuple(i for i, op in enumerate(self.operations) if op.kind == "constant")


def read_graph(module: fx.GraphModule) -> Graph:
    """The graph of a module whose placeholders know their values (`meta["val"]`), as those that
    AOTAutograd traces do. It is run once on fake tensors, which shows what shares memory. Sizes
    that are symbols are taken to be those of the call that the graph was traced for."""
    given = [node.meta.get("val") for node in module.graph.nodes if node.op == "placeholder"]
    if any(value is None for value in given):
        raise NotUnderstood("an input of the graph does not say what it is")
    fakes = [value for value in given if isinstance(value, FakeTensor)]
    if any(_symbolic(value) for value in given):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            given = [_with_sizes_of_the_call(value) for value in given]
    else:
        mode = fakes[0].fake_mode if fakes else FakeTensorMode()
    recorder = _Recorder(module, mode)
    with mode, torch.no_grad():
        recorder.run(*given)
    return recorder.finished()


NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _symbolic(value: Any) -> bool:
    if isinstance(value, FakeTensor):
        sizes = (*value.shape, *value.stride())
        return any(not isinstance(size, int) for size in sizes)
    return isinstance(value, SYMBOLS)


def _with_sizes_of_the_call(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        form = (value.shape, value.stride())
        size, stride = ([number_of_the_call(n) for n in numbers] for numbers in form)
        return torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)
    return number_of_the_call(value) if isinstance(value, SYMBOLS) else value


def number_of_the_call(value: Any) -> Any:
    """What a symbol stood for when the graph was traced."""
    if not isinstance(value, SYMBOLS):
        return value
    hint = getattr(value.node, "hint", None)  # a length of a jagged tensor has none
    if hint is None or isinstance(hint, SYMBOLS):
        raise NotUnderstood("the graph has a size that depends on data")
    return hint


def mutated_inputs(module: fx.GraphModule) -> frozenset[str]:
    """Inputs that the caller finds changed, as AOTAutograd says: it writes them after the graph."""
    changed: set[Any] = set()
    for node in module.graph.nodes:
        if node.op == "output":
            for said in node.meta.get("desc", None) or ():
                if (one := getattr(said, "mutated_input", None)) is not None:
                    changed.add(one)
    nodes = module.graph.find_nodes(op="placeholder")
    return frozenset(node.name for node in nodes if node.meta.get("desc") in changed)


def _kind(node: fx.Node, *, makes_memory: bool) -> str:
    if node.op in ("placeholder", "get_attr"):
        return "input" if node.op == "placeholder" else "constant"
    return kind_of_call(node.target, makes_memory=makes_memory)


def kind_of_call(target: Any, *, makes_memory: bool) -> str:
    """Of the call of an operator, one of `KINDS`."""
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


def writes_to(node: fx.Node) -> list[fx.Node]:
    """Arguments that an operator changes in place."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return []
    found: list[Any] = []
    for k, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[k] if k < len(node.args) else node.kwargs.get(argument.name)
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, fx.Node)]
    return found


class _Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._mode = mode
        self._mutated = mutated_inputs(module)
        self._written: set[int] = set()  # storages that do not keep what they hold
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
        # As in the class above, without what it notes of the node for tracing: a graph has
        # thousands, and nothing is traced here.
        result = getattr(self, n.op)(n.target, *self.fetch_args_kwargs_from_env(n))
        if n.op == "output":
            leaving = tree_leaves(n.args[0], is_leaf=lambda leaf: leaf is None)
            self._outputs = tuple(self._place.get(node) for node in leaving)
            return result
        uses = tuple(dict.fromkeys(self._place[used] for used in n.all_input_nodes))
        leaves = (result,) if isinstance(result, Tensor) else tree_leaves(result)
        holds = {self._storage_of(t) for t in leaves if isinstance(t, Tensor)}
        before = {storage for used in uses for storage in self._operations[used].holds}
        number = isinstance(result, NUMBERS) and n.op != "placeholder"
        kind = "number" if number else _kind(n, makes_memory=not holds <= before)
        if n.name in self._mutated:
            self._written |= holds
        for changed in writes_to(n):
            self._written |= set(self._operations[self._place[changed]].holds)
        self._place[n] = len(self._operations)
        several = isinstance(result, tuple | list)
        form = (n.name, str(n.target), kind, uses, tuple(sorted(holds)), several)
        called = self._work is not NOTHING
        shows = self._work.written_bytes if called else touched_bytes(result)
        self._operations.append(Operation(*form, self._work, shows))
        return result

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
            # not among the inputs: its sizes are no symbols, even where theirs are
            return self._mode.from_tensor(value, static_shapes=True)
        return value

    def _storage_of(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        if not isinstance(storage.nbytes(), int):
            raise NotUnderstood("the graph has a result whose size depends on data")
        key = StorageWeakRef(storage)
        if key not in self._known:
            self._known[key] = len(self._storages)
            self._storages.append(storage.nbytes())
            self._alive.append(tensor)
        return self._known[key]

    def finished(self) -> Graph:
        """What reads memory that is written to would read something else when it is run again."""
        steady = tuple(
            replace(operation, kind="opaque")
            if operation.kind in ("cheap", "view", "product") and self._reads_written(operation)
            else operation
            for operation in self._operations
        )
        return Graph(steady, tuple(self._storages), self._outputs)

    def _reads_written(self, operation: Operation) -> bool:
        read = (s for used in operation.uses for s in self._operations[used].holds)
        return not self._written.isdisjoint(read)
