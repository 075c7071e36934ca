"""What was decided of a graph's recurrent layers, as plain values that outlive it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from ecornn.echo.keep_modes import RecurrentCall
from ecornn.echo.origins import module_path
from ecornn.echo.pipeline import Decision
from ecornn.ops.keeping import FEW_BYTES
from ecornn.sizes import size_text


@dataclass(frozen=True)
class RecurrentLayer:
    """A layer of this package in a graph: whether it keeps its gates ("gates") or makes them again
    from the states ("states"); their bytes, and the seconds that making them again takes."""

    module: str
    cell: str
    keeps: str
    free: bool  # the user has asked for nothing
    gates_bytes: int
    again_seconds: float
    why: str

    def told(self) -> str:
        size, time = size_text(self.gates_bytes), f"{self.again_seconds * 1e6:.1f} µs"
        if self.keeps == "gates":
            what = f"keeps its gates, {size}, which would take {time} to make again"
        else:
            what = f"keeps its states alone: {size} of gates less, {time} to make them again"
        return f"{self.module or '(the model)'}, {self.cell}, {what}; {self.why}"


def layers_of(joint: fx.GraphModule, decision: Decision) -> list[RecurrentLayer]:
    """In the order in which they run backwards."""
    nodes = {node.name: node for node in joint.graph.nodes}
    chosen = decision.chosen.joint
    gates = frozenset[str]() if chosen is None else chosen.gates
    found = []
    for call in decision.recurrent:
        keeps = call.asked if not call.free else "gates" if call.name in gates else "states"
        found.append(
            RecurrentLayer(
                *(module_path(nodes[call.name]), call.cell, keeps, call.free),
                *(call.bytes, call.seconds, _why(call, keeps, decision)),
            )
        )
    return found


def _why(call: RecurrentCall, keeps: str, decision: Decision) -> str:
    if not call.free:
        return "as it was asked for, or all that its kernels do"
    kind = decision.request.memory.kind
    if keeps == "gates":
        return "the peak is elsewhere" if kind == "auto" else "the graph fits with them"
    why = {
        "auto": "with its gates the peak would be higher, as far as they were looked at",
        "min": "as little memory as can be was asked for",
    }
    if kind == "auto" and not call.few:
        return f"gates of more than {size_text(FEW_BYTES)} a direction are not kept unasked"
    return why.get(kind, "with its gates the graph does not fit, or takes longer")
