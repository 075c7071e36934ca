"""`ExecutionPlan`: which backend runs, what it keeps, who refused and why."""

from __future__ import annotations

from dataclasses import dataclass

from ecornn.backends.protocol import Rejection
from ecornn.backends.registry import by_name
from ecornn.spec import RnnSpec


@dataclass(frozen=True)
class ExecutionPlan:
    spec: RnnSpec
    backend: str
    #: What the operator keeps for the backward pass: "none", "states" or "gates"; or "auto", of a
    #: traced call for which nothing was asked: whoever compiles it chooses.
    keep: str
    #: "network": the whole stack in one call that autograd sees through; "layer": one call a
    #: layer; "direct": the same, by a backend with a backward pass of its own; "operator": one
    #: opaque operator a layer; "inline": the definition itself.
    scope: str
    reason: str
    rejections: tuple[Rejection, ...] = ()
    #: What else is to be said of one call.
    notes: tuple[str, ...] = ()

    def explain(self) -> str:
        spec = self.spec
        kept = {
            "none": "nothing is kept by the operator",
            "states": "the states are kept, the gates recomputed",
            "gates": "the gates are kept",
            "auto": "the states are kept, the gates too if the compiler chooses so",
        }[self.keep]
        if self.backend == "aten" and spec.needs_grad:
            kept = "what torch's kernels need is kept"
            if self.scope == "operator":
                kept = "nothing is kept: the backward pass runs the layer again"
        elif not spec.needs_grad:
            kept = "no gradient is needed, nothing is kept"
        lines = [
            f"{_describe(spec)}",
            f"  runs on {self.backend}, {_SCOPES[self.scope]}: {self.reason}",
            f"  for the backward pass: {kept}",
        ]
        lines += [f"  {detail}" for detail in by_name(self.backend).details(spec)]
        lines += [f"  {note}" for note in self.notes]
        lines += [f"  refused: {rejection}" for rejection in self.rejections]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.explain()


_SCOPES = {
    "network": "the whole stack in one call",
    "layer": "layer by layer",
    "direct": "layer by layer",
    "operator": "one operator a layer",
    "inline": "as plain torch code",
}


def _describe(spec: RnnSpec) -> str:
    parts = [
        f"{spec.cell} {spec.input_size}→{spec.hidden}",
        f"{spec.layers} layer{'s' if spec.layers > 1 else ''}",
    ]
    flags = (
        (spec.bidirectional, "bidirectional"),
        (spec.projection > 0, f"projected to {spec.projection}"),
        (not spec.bias, "no bias"),
        (spec.dropout > 0, f"dropout {spec.dropout:g}"),
        (spec.layer_norm, "layer norm"),
        (spec.zoneout, "zoneout"),
        (spec.lengths, "lengths"),
        (spec.resets, "resets"),
        (spec.cell_states, "all cell states"),
        (spec.needs_grad, "with gradients"),
        (spec.traced, "traced"),
        (spec.transformed, "inside torch.func"),
    )
    parts += [text for holds, text in flags if holds]
    return f"{', '.join(parts)}; {str(spec.dtype).removeprefix('torch.')} on {spec.device}"
