"""How a model was divided, and what is done around its parts, in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ecornn.echo.lean.needs import missing
from ecornn.echo.lean.ours import told_of_own
from ecornn.echo.lean.worth import NEARLY_FREE
from ecornn.echo.parts import SELDOM

if TYPE_CHECKING:
    from ecornn.echo.regions import Regions


def told_of_regions(regions: Regions) -> list[str]:
    """How the model was divided, in sentences."""
    if regions.calls is None:
        if regions.why_wet is not None:
            return [f"nothing is compiled yet, the model runs as it is written: {regions.why_wet}"]
        return ["not called yet: nothing is compiled"]
    own = [] if regions.own is None else regions.own.told()
    if regions.why_not_own is not None:
        own.append(f"recurrent layers of torch.nn are left to torch: {regions.why_not_own}")
    if not regions.divided:
        why = "as asked for" if regions.given else SELDOM
        return [f"the whole model is compiled: {why}", *own]
    if regions.why_several is not None:
        step = [] if regions.step is None else [regions.step.told()]
        several = f"the whole model is compiled, in several graphs: {regions.why_several}"
        return [several, *own, *step]
    how = "named by the caller" if regions.given else "found at the first call"
    parts = "; ".join(f"{path}, {count} times" for path, count in regions.calls.items())
    found = [f"called in one forward pass, {how}, each compiled once: {parts or 'none'}", *own]
    if regions.untraced:
        found.append("torch's compiler does not take recurrent layers of torch.nn")
    if regions.why_wet is not None:
        found.append(f"the first call ran without Echo, to count those calls: {regions.why_wet}")
    if regions.why_twice is not None:
        found.append(f"a loop's first call may be compiled by itself: {regions.why_twice}")
    found += regions.checkpoints.told()
    unlean = f"no function of it is replaced: {missing() or 'as asked for'}"
    rest = regions.replaced.told() if regions.lean else [unlean]
    if regions.lean and regions.replaced.latest_able:
        rest.append(_told_of_layers(regions))
    rest += _told_of_own_layers(regions)
    budget = [] if regions.step is None else [regions.step.told()]
    return [*found, *budget, "the rest of the model runs as it is written", *rest]


def _told_of_own_layers(regions: Regions) -> list[str]:
    if regions.options.memory.kind == "min" and regions.lean:
        why = "as little memory as can be was asked for"
    elif regions.step is not None and regions.lean:
        why = "the step did not fit" if regions.states_alone else "the step fits with them"
    else:
        why = "as it does by itself"
    again = [f"{path} is run again in the backward pass" for path in regions.own_again]
    told_of = (*(regions.calls or ()), *regions.own_again)
    return [*again, *told_of_own(regions.shares.own, told_of, regions.states_alone, why)]


def _told_of_layers(regions: Regions) -> str:
    able, again = regions.replaced.latest_able, regions.replaced.latest_again
    if regions.lean == "layers":
        why = "as asked for"
    elif regions.options.memory.kind == "min":
        why = "as little memory as can be was asked for"
    elif regions.step is not None:
        why = "as few as were found to be enough" if again else "none need be"
    else:
        why = f"as many as are estimated to take {NEARLY_FREE:.0%} of a step or less"
    why += regions.shares.told(regions.again, regions.calls or ())
    return f"of {able} calls of recurrent layers in a forward pass {again} are run again: {why}"
