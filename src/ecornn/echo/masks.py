"""Masks as bits, where asked for: what was decided is encoded, verified again, or left as it is."""

from __future__ import annotations

from torch import fx

from ecornn.echo.encode import masks_as_bits
from ecornn.echo.pipeline import Decision
from ecornn.echo.report import GraphReport
from ecornn.echo.rewrite import Modules, duplicate
from ecornn.echo.verify import differences

STEP = "masks as bits"


def in_bits(joint: fx.GraphModule, decision: Decision, told: GraphReport) -> Modules:
    """The two passes, or those without bits and the reason in the report."""
    passes, (forward, backward) = decision.passes, decision.modules
    why = None
    if told.codegen != "eager":
        why = f"not with code generation {told.codegen}, which would run them as kernels more"
    elif passes is None:
        why = "the graph was left to torch"
    else:
        before = differences(joint, passes, decision.modules)
        encoded = masks_as_bits((duplicate(forward), duplicate(backward)), passes.forward_outputs)
        wrong = [one for one in differences(joint, passes, encoded) if one not in before]
        if not wrong:
            return encoded
        why = f"not the same computation: {wrong[0]}"
    told.refused.append((STEP, why))
    return decision.modules
