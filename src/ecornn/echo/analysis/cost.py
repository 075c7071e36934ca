"""How long an operation takes: measured where that was asked for, otherwise by a roofline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from ecornn.echo.analysis.machine import Machine, machine_of
from ecornn.echo.analysis.measured import Measured
from ecornn.echo.graph import Graph, Operation
from ecornn.settings import settings


@dataclass(frozen=True)
class Figure:
    """A time, and where it comes from: "free", "measured" or "roofline"."""

    seconds: float
    source: str
    why: str = ""


@dataclass
class CostModel:
    """Times of operations. Equal calls are looked up once."""

    measured: Measured | None = None
    _found: dict[tuple[str, str], Figure] = field(default_factory=dict)
    _machines: dict[torch.device | None, Machine] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph, *, measure: bool = False) -> CostModel:
        """A model with a figure for every operation of a graph. With `measure`, each unique
        operator that may be run again is run on its device, unless that was done before."""
        model = cls(Measured(settings().cache / "echo-costs") if measure else None)
        for operation in graph.operations:
            model.figure(operation)
        if model.measured is not None:
            model.measured.save()
        return model

    def seconds(self, operation: Operation) -> float:
        return self.figure(operation).seconds

    def figure(self, operation: Operation) -> Figure:
        call = operation.work.call
        if operation.kind in ("input", "view") or call is None:
            return Figure(0.0, "free", "makes nothing")
        key = (operation.kind, call.key)
        if key not in self._found:
            self._found[key] = self._look_up(operation)
        return self._found[key]

    def _look_up(self, operation: Operation) -> Figure:
        reason = "not asked to measure"
        if self.measured is not None:
            found = self.measured.look_up(operation)
            if not isinstance(found, str):
                return Figure(found, "measured")
            reason = found
        machine = self._machine(operation.work.device)
        product = operation.kind == "product" or operation.work.declared
        seconds = machine.seconds(operation.work, product=product)
        return Figure(seconds, "roofline", f"{machine.name}, {machine.source}; {reason}")

    def _machine(self, device: torch.device | None) -> Machine:
        if device not in self._machines:
            self._machines[device] = machine_of(device)
        return self._machines[device]

    def told(self) -> str:
        """In a sentence: how many of the calls that were looked up are measured, and of the others
        why not."""
        why = Counter(one.why for one in self._found.values() if one.source == "roofline")
        count = len(self._found) - why.total()
        others = "".join(f"; {n} by a roofline ({reason})" for reason, n in why.most_common())
        trouble = "".join(f"; {one}" for one in (self.measured.trouble if self.measured else ()))
        return f"times of operators: {count} measured{others}{trouble}"

    def explain(self, operations: Iterable[Operation]) -> str:
        """A line for each operator and source, the slowest first."""
        total: Counter[tuple[str, str, str]] = Counter()
        times: Counter[tuple[str, str, str]] = Counter()
        for operation in operations:
            figure = self.figure(operation)
            if figure.source != "free":
                row = (operation.target, figure.source, figure.why)
                total[row] += figure.seconds  # type: ignore[assignment]
                times[row] += 1
        trouble = self.measured.trouble if self.measured is not None else []
        lines = [*trouble, f"{sum(total.values()) * 1e6:12.1f} µs in all"]
        for row, seconds in total.most_common():
            target, source, why = row
            told = f" ({why})" if why else ""
            lines.append(f"{seconds * 1e6:12.1f} µs  {times[row]} × {target}: {source}{told}")
        return "\n".join(lines)
