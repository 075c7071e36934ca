"""Whether masks are kept as bits: plans that can, beside those that cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ecornn.echo.graph import FAILURES
from ecornn.echo.joint import Joint, in_bits
from ecornn.echo.plan.budget import Limits
from ecornn.echo.request import Request

Planned = TypeVar("Planned")
#: Our plans for a joint graph within limits, each with the seconds that it adds; and the limits,
#: the graph's own where none are given.
Plans = Callable[[Joint, Limits | None], tuple[list[tuple[float, Planned]], Limits]]


def plans_in_bits(
    request: Request,
    limits: Limits,
    first: Joint,
    refused: list[tuple[str, str]],
    plans: Plans[Planned],
) -> tuple[list[Planned], Limits]:
    """Plans for a graph in which masks have bits, if it has masks, and the limits. Where nothing is
    said of masks, they are looked at for less memory of operators that run one by one alone. Of
    generated code they are foretold less well: with "min" an H200 held 1,675 MiB of a speech model
    whose masks were bits, of 1,431 foretold, and 1,366 where they were not."""
    asked = request.masks == "bits"
    if request.masks == "bytes" or request.of_torch is not None or first.large:
        return [], limits
    if not asked and (request.memory.kind == "auto" or request.fuses):
        return [], limits
    try:
        joint = in_bits(first, request.pricing)
    except FAILURES as error:
        refused.append(("masks as bits", str(error)))
        return [], limits
    if joint is None:
        return [], limits
    # what bits take beside the quickest plan is no reason against them where they are asked for
    found, own = plans(joint, None if asked else limits)
    if asked:
        return [one for _, one in found], own.moved(joint.added_s)
    return [one for seconds, one in found if seconds <= limits.seconds], limits
