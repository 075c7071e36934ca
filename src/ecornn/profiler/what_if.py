"""What if a module's feature maps were made again in the backward pass instead of being kept.

Two answers for each module. `cheap`: by Echo's analysis of the observed step, which runs no product
again and repeats no draw. `whole`: the module wrapped in a checkpoint, which keeps what goes in and
runs all of it again. Times are Echo's estimates for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ecornn.echo.analysis.cost import CostModel
from ecornn.echo.plan.bidirectional import bidirectional
from ecornn.profiler.model import WhatIf
from ecornn.profiler.storages import Record
from ecornn.profiler.trace import Call, Observed, observed


def what_if(calls: Sequence[Call], records: Sequence[Record], time: int) -> tuple[WhatIf, ...]:
    """For each module with feature maps at `time`, those that free most first."""
    step = observed(calls, records)
    costs = CostModel()
    seconds = [costs.seconds(operation) for operation in step.passes.graph.operations]
    alive = [_kept(record) and _alive(record, time) for record in records]
    paths = _paths(records[i].module for i, there in enumerate(alive) if there)
    cheap = _Cheap(step, records, alive)
    whole = _Whole(calls, records, alive, step, seconds)
    found = []
    for path in paths:
        inside = [i for i, there in enumerate(alive) if there and within(records[i].module, path)]
        found.append(
            WhatIf(
                path,
                sum(records[i].bytes for i in inside),
                cheap.frees(path),
                cheap.seconds(path, seconds),
                whole.frees(path),
                whole.seconds(path),
            )
        )
    return tuple(sorted(found, key=lambda one: (-one.kept_bytes, one.module)))


def within(module: str, path: str) -> bool:
    return not path or module == path or module.startswith(f"{path}.")


def _kept(record: Record) -> bool:
    return bool(record.kept_by) and not record.role


def _alive(record: Record, time: int) -> bool:
    return record.born <= time and (record.freed is None or time < record.freed)


def _paths(modules: Iterator[str]) -> list[str]:
    """With all that they are in; "" is the model."""
    found = {""}
    for module in modules:
        names = module.split(".")
        found |= {".".join(names[:depth]) for depth in range(1, len(names) + 1)}
    return sorted(found)


class _Cheap:
    """Echo's choice for the whole step, told by module."""

    def __init__(self, step: Observed, records: Sequence[Record], alive: Sequence[bool]) -> None:
        self._records, self._step = records, step
        operations = step.passes.graph.operations
        kept = bidirectional(step.passes)
        held = {number for i in kept for number in operations[i].holds}
        needed = {i for i, there in enumerate(alive) if there and i in step.makers}
        self._freed = needed - held
        self._again = self._run_again([step.makers[i] for i in self._freed], held)
        # kept in their stead, to start from
        read = {
            n for i in self._again for used in operations[i].uses for n in operations[used].holds
        }
        self._added = {n for n in held & read if not _kept(records[n])} - step.passes.held_anyway

    def _run_again(self, wanted: list[int], held: set[int]) -> set[int]:
        operations = self._step.passes.graph.operations
        found: set[int] = set()
        while wanted:
            i = wanted.pop()
            there = operations[i].kind in ("input", "constant") or held & set(operations[i].holds)
            if i not in found and not there:
                found.add(i)
                wanted += operations[i].uses
        return found

    def frees(self, path: str) -> int:
        """Less what is kept in their stead."""
        records = self._records
        freed = sum(records[i].bytes for i in self._freed if within(records[i].module, path))
        return freed - sum(records[i].bytes for i in self._added if within(records[i].module, path))

    def seconds(self, path: str, seconds: Sequence[float]) -> float:
        modules = self._step.modules
        return sum(seconds[i] for i in self._again if within(modules[i], path))


class _Whole:
    def __init__(
        self,
        calls: Sequence[Call],
        records: Sequence[Record],
        alive: Sequence[bool],
        step: Observed,
        seconds: Sequence[float],
    ) -> None:
        self._calls, self._records, self._alive = calls, records, alive
        self._step, self._seconds = step, seconds
        self._number = {id(record): i for i, record in enumerate(records)}

    def frees(self, path: str) -> int:
        """What only the module itself keeps, less what goes in and was not kept."""
        records = self._records
        freed = sum(
            record.bytes
            for record, there in zip(records, self._alive, strict=True)
            if there and within(record.module, path) and self._keepers_within(record, path)
        )
        calls = [call for call in self._calls if within(call.module, path)]
        made = {self._number[id(one)] for call in calls for one in call.makes}
        read = {self._number[id(one)] for call in calls for one in call.reads}
        added = [
            records[i]
            for i in read - made
            if not records[i].kept_by and not records[i].role and records[i].born
        ]
        return freed - sum(record.bytes for record in added)

    def _keepers_within(self, record: Record, path: str) -> bool:
        """`kept_by` are texts such as "encoder.0: aten.mm"."""
        keepers = (text.rpartition(": ")[0] for text in record.kept_by)
        return all(within(keeper, path) for keeper in keepers)

    def seconds(self, path: str) -> float:
        modules = self._step.modules
        return sum(
            cost
            for cost, module in zip(self._seconds, modules, strict=True)
            if within(module, path)
        )
