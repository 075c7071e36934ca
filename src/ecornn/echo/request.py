"""What is asked for a graph, as one value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ecornn.echo.joint import Pricing
from ecornn.echo.options import AUTO, Memory
from ecornn.echo.plan.estimate import Estimate


@dataclass(frozen=True)
class Request:
    """What is asked for a graph. `calls`: how often its forward pass runs before its backward
    passes do. `settings` go to torch's partitioners as they come. `beside_s`: seconds that a step
    takes outside the graph, for each of these calls. `among_others`: other parts of a model run
    between its passes. `of_torch`: the one of its ways that alone is asked for. `or_least`: where
    no estimate fits a budget, the plan that holds least is taken, and is not refused. `masks` and
    `measure`: as in `Options`. `written_later`: the graph's inputs are written to between its
    passes."""

    memory: Memory = AUTO
    calls: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    beside_s: float = 0.0
    among_others: bool = False
    of_torch: str | None = None
    or_least: bool = False
    masks: str = "bytes"
    measure: bool = False
    written_later: bool = False

    @property
    def fuses(self) -> bool:
        """What runs is compiled by inductor."""
        return bool(self.settings.get("compiler") == "inductor")

    @property
    def pricing(self) -> Pricing:
        return Pricing(self.fuses, self.measure)

    def weight(self, estimate: Estimate) -> int:
        return estimate.weight(self.calls, among_others=self.among_others)
