"""Whether masks are kept as bits: plans that can, beside those that cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from ecornn.echo.graph import FAILURES
from ecornn.echo.joint import Joint, Pricing, in_bits
from ecornn.echo.mask_bits import bytes_of_booleans
from ecornn.echo.plan.budget import ALIKE, Limits

Planned = TypeVar("Planned")
#: Our plans for a joint graph within limits, each with the seconds that it adds; and the limits,
#: the graph's own where none are given.
Plans = Callable[[Joint, Limits | None], tuple[list[tuple[float, Planned]], Limits]]


def plans_in_bits(
    masks: str,
    kind: str,
    limits: Limits,
    first: Joint,
    refused: list[tuple[str, str]],
    plans: Plans[Planned],
    pricing: Pricing,
    least: int,
) -> tuple[list[Planned], Limits]:
    """Plans for a graph in which masks have bits, if it has masks, and the limits. `masks`: as in
    `Options`; `kind`: of what is asked of memory. Where nothing is said of masks, "auto" takes bits
    only if they are free: if a plan takes no longer than the quickest one that is known. Operators
    that run one by one always take longer. `least`: of the peaks that are known, the lowest: "auto"
    does not plan anew for masks that are hardly anything of it."""
    asked, auto = masks == "bits", kind == "auto"
    if masks == "bytes" or first.large or (auto and not asked and not pricing.fuses):
        return [], limits
    if auto and not asked and _saved_by_bits(first.as_written) < ALIKE * least:
        return [], limits
    try:
        joint = in_bits(first, pricing)
    except FAILURES as error:
        refused.append(("masks as bits", str(error)))
        return [], limits
    if joint is None:
        return [], limits
    if asked:  # what bits take beside the quickest plan is no reason against them then
        found, own = plans(joint, None)
        return [one for _, one in found], own.moved(joint.added_s)
    within = limits
    if auto and limits.quickest is not None:
        within = replace(limits, seconds=limits.quickest.seconds_added, quickest=None)
    found, _ = plans(joint, within)
    return [one for seconds, one in found if seconds <= within.seconds], limits


def _saved_by_bits(joint: Joint) -> float:
    return bytes_of_booleans(joint.module, joint.passes) * (1 - 1 / 8)
