"""From a joint graph to its two passes: several ways to split it, simulated, the best one taken.

torch's own ways are always among them, so that the outcome is never worse than they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

from ecornn.echo.analysis.liveness import simulate
from ecornn.echo.graph import NotUnderstood, read_graph
from ecornn.echo.passes import Passes
from ecornn.echo.plan.bidirectional import bidirectional
from ecornn.echo.rewrite import split
from ecornn.echo.schedule import as_late_as_possible

Modules = tuple[fx.GraphModule, fx.GraphModule]
Strategy = Callable[[fx.GraphModule, Sequence[Any], int], Modules]


def _stock(module: fx.GraphModule, inputs: Sequence[Any], outputs: int) -> Modules:
    found: Modules = default_partition(module, inputs, num_fwd_outputs=outputs)
    return found


def _min_cut(module: fx.GraphModule, inputs: Sequence[Any], outputs: int) -> Modules:
    found: Modules = min_cut_rematerialization_partition(module, inputs, num_fwd_outputs=outputs)
    return found


def _echo(module: fx.GraphModule, inputs: Sequence[Any], outputs: int) -> Modules:
    passes = Passes(read_graph(module), outputs)
    forward, backward = split(module, passes, bidirectional(passes))
    return forward, as_late_as_possible(backward)


#: In the order in which a tie is decided: whoever recomputes less comes first.
STRATEGIES: dict[str, Strategy] = {
    "keep all": _stock,
    "torch's min-cut": _min_cut,
    "bidirectional": _echo,
}


@dataclass(frozen=True)
class Candidate:
    """One way to split a graph, and what it would hold."""

    strategy: str
    modules: Modules
    forward_peak: int
    backward_peak: int

    @property
    def peak(self) -> int:
        return max(self.forward_peak, self.backward_peak)


@dataclass(frozen=True)
class Decision:
    chosen: Candidate
    candidates: tuple[Candidate, ...]
    #: Strategies that could not serve, with the reason.
    refused: tuple[tuple[str, str], ...]

    def explain(self) -> str:
        lines = ["simulated peak of the forward / backward pass, bytes"]
        for candidate in self.candidates:
            mark = "→" if candidate is self.chosen else " "
            figures = f"{candidate.forward_peak:,} / {candidate.backward_peak:,}"
            lines.append(f"{mark} {candidate.strategy}: {figures}")
        lines += [f"  {name}: refused, {why}" for name, why in self.refused]
        return "\n".join(lines)


def decide(module: fx.GraphModule, inputs: Sequence[Any], forward_outputs: int) -> Decision:
    """The split with the lowest simulated peak."""
    found: list[Candidate] = []
    refused: list[tuple[str, str]] = []
    for name, strategy in STRATEGIES.items():
        try:
            # a strategy may change the graph it is given
            modules = strategy(copy.deepcopy(module), inputs, forward_outputs)
            found.append(_simulated(name, modules))
        except (NotUnderstood, AssertionError, RuntimeError) as error:
            refused.append((name, str(error).splitlines()[0] if str(error) else repr(error)))
    if not found:
        raise NotUnderstood("; ".join(f"{name}: {why}" for name, why in refused))
    return Decision(min(found, key=lambda c: c.peak), tuple(found), tuple(refused))


def _simulated(name: str, modules: Modules) -> Candidate:
    forward, backward = (read_graph(module) for module in modules)
    # what the model is called with, weights among it, is held by the caller in both passes
    own = {forward.operations[i].name for i in forward.inputs}
    held = [i for i in backward.inputs if backward.operations[i].name in own]
    return Candidate(
        name,
        modules,
        simulate(forward, forward.inputs).peak_bytes,
        simulate(backward, held).peak_bytes,
    )
