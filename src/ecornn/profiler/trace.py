"""The forward pass of a step as one of Echo's graphs, written down while it runs.

Storages stand for tensors: whoever reads a view of a storage uses whatever made it. Where a storage
is written to again, nothing that reads it may be run again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ecornn.echo.graph import Graph, Operation, kind_of_call
from ecornn.echo.passes import Passes
from ecornn.echo.work import NOTHING, Work, work_of
from ecornn.profiler.storages import Ledger, Record

#: Whole layers in one operator: as dear as the products in them.
LAYERS = frozenset({"_cudnn_rnn", "mkldnn_rnn_layer", "miopen_rnn", "_ctc_loss", "_cudnn_ctc_loss"})


@dataclass(frozen=True)
class Call:
    target: str
    kind: str
    work: Work
    module: str
    reads: tuple[Record, ...]
    makes: tuple[Record, ...]
    #: Of what it reads, what it writes to.
    writes: tuple[Record, ...]


class Trace:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.calls: list[Call] = []

    def saw(
        self, func: Any, args: Sequence[Any], kwargs: Any, result: Any, module: str, time: int
    ) -> None:
        """An operator of the forward pass has run, at `time`."""
        kwargs = kwargs or {}
        reads = self._records((args, kwargs))
        results = self._records(result)
        makes = [one for one in results if one.born == time]
        mutable = getattr(getattr(func, "_schema", None), "is_mutable", False)
        writes = [one for one in results if one.born != time] if mutable else []
        kind = _kind(func, makes_memory=bool(makes))
        try:
            work = work_of(func, tuple(args), kwargs, result)
        except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError):
            # torch's count of its operations does not know the arguments: no matter of the step's
            kind, work = "opaque", NOTHING
        self.calls.append(
            Call(
                str(func),
                kind,
                work,
                module,
                tuple(reads),
                tuple(makes),
                tuple(writes),
            )
        )

    def _records(self, values: Any) -> list[Record]:
        tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
        return [record for tensor in tensors for record in self._ledger.records_of(tensor)]


def _kind(func: Any, *, makes_memory: bool) -> str:
    packet = getattr(func, "overloadpacket", func)
    kind = kind_of_call(func, makes_memory=makes_memory)
    dear = packet in flop_registry or getattr(packet, "__name__", "") in LAYERS
    return "product" if kind == "cheap" and dear else kind


@dataclass(frozen=True)
class Observed:
    """Two passes whose backward pass is one operation that reads all that is kept."""

    passes: Passes
    #: Of each operation: the module that ran it.
    modules: tuple[str, ...]
    #: Records and the operations whose results they are, by the record's place.
    makers: dict[int, int]


def observed(calls: Iterable[Call], records: Sequence[Record]) -> Observed:
    builder = _Builder(records)
    for call in calls:
        builder.add(call)
    return builder.finished()


class _Builder:
    def __init__(self, records: Sequence[Record]) -> None:
        self._records = records
        self._number = {id(record): i for i, record in enumerate(records)}
        self._operations: list[Operation] = []
        self._modules: list[str] = []
        self._makers: dict[int, int] = {}
        self._written: set[int] = set()

    def _append(self, operation: Operation, module: str = "") -> int:
        self._operations.append(operation)
        self._modules.append(module)
        return len(self._operations) - 1

    def _made_by(self, record: Record) -> int:
        """What it is the result of; what no call made is an input."""
        number = self._number[id(record)]
        if number not in self._makers:
            given = Operation(f"given_{number}", "", "input", (), (number,))
            self._makers[number] = self._append(given)
        return self._makers[number]

    def add(self, call: Call) -> None:
        uses = tuple(dict.fromkeys(self._made_by(record) for record in call.reads))
        makes, writes = (
            [self._number[id(record)] for record in those] for those in (call.makes, call.writes)
        )
        name = f"call_{len(self._operations)}"
        several = len(makes) > 1
        place = self._append(
            Operation(*(name, call.target, call.kind, uses, (*makes, *writes), several, call.work)),
            call.module,
        )
        for part, number in enumerate(makes):
            self._makers[number] = place
            if several:
                taken = Operation(f"{name}_{part}", "getitem", "view", (place,), (number,))
                self._makers[number] = self._append(taken, call.module)
        for number in writes:
            self._written.add(number)
            self._makers[number] = place

    def finished(self) -> Observed:
        kept = [
            self._makers[number]
            for number, record in enumerate(self._records)
            if record.kept_by and not record.role and number in self._makers
        ]
        arrives = self._append(Operation("tangents", "", "input", (), ()))
        last = self._append(Operation("backward", "", "opaque", (arrives, *kept), ()))
        steady = tuple(
            replace(operation, kind="opaque") if self._reads_written(operation) else operation
            for operation in self._operations
        )
        graph = Graph(steady, tuple(record.bytes for record in self._records), (last,))
        return Observed(Passes(graph, 0), tuple(self._modules), self._makers)

    def _reads_written(self, operation: Operation) -> bool:
        if operation.kind not in ("cheap", "view", "product"):
            return False
        read = (number for used in operation.uses for number in self._operations[used].holds)
        return not self._written.isdisjoint((*read, *operation.holds))
