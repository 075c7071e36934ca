"""What autograd keeps for the backward pass, read from its graph.

The graph is only read: no hook packs or unpacks what is saved, so values, lifetimes and autograd's
own check of tensors that were overwritten stay as they are.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from operator import itemgetter
from threading import RLock
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ecornn.profiler.storages import PLAIN, within_reach

if TYPE_CHECKING:
    from ecornn.profiler.threads import Makers

_RAW = "_raw_saved_"
_SEVERAL = frozenset((tuple, list))
_ENTRY = "_engine_run_backward"


#: The node of the backward pass that runs on this thread, or None.
running_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)
#: The number the next node will get; during an operator's forward pass its own has one less.
next_number: Callable[[], int] = getattr(torch._C._autograd, "_get_sequence_nr", lambda: 0)


def missing() -> str | None:
    """Which of torch's private functions is not there, if any."""
    for owner, name in (
        (torch._C, "_current_autograd_node"),
        (torch._C._autograd, "_get_sequence_nr"),
        (torch.autograd, _ENTRY),
        (torch._C._autograd.SavedTensor, "data"),
        (torch._C._FunctionBase, "metadata"),
    ):
        if not hasattr(owner, name):
            return f"torch {torch.__version__} has no {name}"
    return None


class Starts:
    """Tells from which results a backward pass starts, just before it does.

    Some nodes (those of compiled code) give up what they saved before their first operator runs,
    and autograd has no hook for its own start. So the function through which `Tensor.backward` and
    `torch.autograd` call the engine is replaced while anybody wants to be told: once for all, since
    several threads may begin and end in any order.
    """

    _open: ClassVar[list[Starts]] = []
    _changing: ClassVar[RLock] = RLock()
    _engine: ClassVar[Callable[..., Any]]

    def __init__(
        self, tell: Callable[[list[Any]], None], ended: Callable[[], None] = lambda: None
    ) -> None:
        """`ended` is called when it has, also if it raised."""
        self._tell, self._ended = tell, ended
        with Starts._changing:
            if not Starts._open:
                Starts._engine = getattr(torch.autograd, _ENTRY)
                setattr(torch.autograd, _ENTRY, Starts._run)
            Starts._open.append(self)

    @staticmethod
    def _run(outputs: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        # A root is a tensor, or an edge: a node and the number of its result.
        roots = [getattr(one, "grad_fn", None) or getattr(one, "node", None) for one in outputs]
        with ExitStack() as stack:
            for one in tuple(Starts._open):
                one._tell(roots)
                stack.callback(one._end)
            return Starts._engine(outputs, *args, **kwargs)

    def _end(self) -> None:
        if self in Starts._open:
            self._ended()

    def close(self) -> None:
        with Starts._changing:
            if self in Starts._open:
                Starts._open.remove(self)
                if not Starts._open:
                    setattr(torch.autograd, _ENTRY, Starts._engine)


class Kind(NamedTuple):
    """What is known of all nodes of a class."""

    name: str
    #: AccumulateGrad: keeps nothing, and all of them share one number.
    gathers: bool
    #: Attributes with what it keeps; and whether it may have others of its own, as functions of the
    #: program do.
    saved: tuple[str, ...]
    has_others: bool
    #: Neither of both.
    keeps_nothing: bool


class Node(NamedTuple):
    #: Which thread made it; numbers are its own.
    maker: int
    number: int
    name: str
    node: Any


#: What is known of the classes of autograd's own nodes, which are there for good. Those of the
#: program's functions are each graph's, and go with it.
_OWN_KINDS: dict[type, Kind] = {}


#: A node that is visited for the first time: its number, itself, and its kind. Plain, since a step
#: has thousands.
Met = tuple[int, Any, Kind]


class Graph:
    """Visits each node once, however often it is met."""

    def __init__(self) -> None:
        #: In the metadata of each node that was visited: numbers are each thread's own, and nothing
        #: here may hold on to a node.
        self._visited = object()
        self._kinds = dict(_OWN_KINDS)
        self._gathering = {one for one, kind in _OWN_KINDS.items() if kind.gathers}
        #: Saved tensors that a hook of the program has packed into something else.
        self.packed = 0

    def visit(self, roots: Iterable[Any], maker: int) -> Iterator[tuple[Node, list[Tensor]]]:
        """Of everything that `roots` lead to, all made by one thread, and that was not visited: the
        nodes that keep tensors, and these."""
        for number, node, kind in self.unvisited(roots):
            tensors = self.saved(node, kind)
            if tensors:
                yield Node(maker, number, kind.name or name_of(node), node), tensors

    def unvisited(self, roots: Iterable[Any]) -> list[Met]:
        """All of them, in the order of the forward pass; now they are visited."""
        waiting = [node for node in roots if node is not None]
        found: list[Met] = []
        visited, kinds, gathering = self._visited, self._kinds, self._gathering
        pop, push = waiting.pop, waiting.append
        while waiting:  # thousands: a fifth of them gathers, and is better not met at all
            node = pop()
            kind = kinds.get(type(node)) or self._learn(node)
            metadata = node.metadata
            if kind.gathers or visited in metadata:
                continue
            metadata[visited] = True
            found.append((node._sequence_nr(), node, kind))
            for one, _ in node.next_functions:
                if one is not None and type(one) not in gathering:
                    push(one)
        found.sort(key=itemgetter(0))
        return found

    def _learn(self, node: Any) -> Kind:
        saved = tuple(name for name in dir(node) if name.startswith(_RAW))
        name = name_of(node)
        # Nodes that torch has not made a class for share one.
        shared = type(node).__name__ == "CppFunction"
        has_others = hasattr(node, "__dict__")
        kind = Kind(
            "" if shared else name,
            not shared and name.endswith("AccumulateGrad"),
            saved,
            has_others,
            not saved and not has_others,
        )
        self._kinds[type(node)] = kind
        if kind.gathers:
            self._gathering.add(type(node))
        if not kind.has_others:
            _OWN_KINDS[type(node)] = kind
        return kind

    def visited(self, node: Any) -> bool:
        return self._visited in node.metadata

    def alive(self, makers: Makers, maker: int) -> list[Any]:
        """From every result that a node of the step made: where no backward pass has shown the
        graph's end."""
        roots = [one.grad_fn for one in tensors_alive() if one.grad_fn is not None]
        return [one for one in roots if makers.of_this_step(maker, one._sequence_nr())]

    def saved(self, node: Any, kind: Kind) -> list[Tensor]:
        """What it keeps, without the program's own unpacking, which may run a forward pass."""
        found: list[Tensor] = []
        for name in kind.saved:
            try:
                saved = getattr(node, name)
            except RuntimeError:
                continue  # given up already
            if saved is None:
                continue
            for one in saved if type(saved) in _SEVERAL else (saved,):
                if one is None:
                    continue
                tensor = one.data
                if type(tensor) in PLAIN or isinstance(tensor, Tensor):
                    found.append(tensor)
                elif getattr(one, "unpack_hook", None) is not None:
                    self.packed += 1
        if kind.has_others:
            # Functions of the program may also keep tensors as attributes of their context.
            for value in vars(node).values():
                several = value if type(value) in _SEVERAL else (value,)
                found += [one for one in several if isinstance(one, Tensor)]
        return found


def name_of(node: Any) -> str:
    return str(node.name())


def tensors_alive() -> list[Tensor]:
    """All that Python knows of."""
    # Not by isinstance, which asks proxies and lazy objects for their class.
    found = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
    return [one for one in found if within_reach(one)]
