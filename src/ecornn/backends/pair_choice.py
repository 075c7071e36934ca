"""Whether two layers of a stack run at the same time, and by which kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

from ecornn.backends.overlap import Decision, Timing, backward_schedule, decide, forward_schedule
from ecornn.backends.pair_kernels import Pass
from ecornn.errors import EcornnError
from ecornn.kernels.persistent.choose import Request, ranked, step_microseconds
from ecornn.kernels.persistent.device import chip, geometry, is_loaded
from ecornn.kernels.persistent.launch import launcher
from ecornn.kernels.persistent.model import launch_estimate
from ecornn.kernels.persistent.streams import prepare_sides
from ecornn.kernels.persistent.tile import Geometry


class PairAsk(NamedTuple):
    """Two layers alike: their input need not be."""

    cell: str
    numbers: str
    hidden: int
    batch: int
    steps: int
    device: int
    needs_grad: bool
    captured: bool
    #: Whether the shares of the gates are too large to be there for all of time.
    in_turns: bool = False

    def requests(self) -> list[Request]:
        """Of each pass, with the chip to itself."""
        kernels = ("forward", "backward") if self.needs_grad else ("forward",)
        sizes = (self.cell, self.numbers, self.hidden, self.batch)
        return [Request(kernel, *sizes) for kernel in kernels]


def choose(ask: PairAsk) -> Decision | str:
    """How many pieces each pass has, its kernels loaded; or why two layers cannot run at once."""
    try:
        return _choose(ask)
    except (EcornnError, OSError) as error:
        # one after the other they still can: a cache that cannot be written, say
        return f"the kernel for two at once could not be made: {error}"


def _choose(ask: PairAsk) -> Decision | str:
    timings, places = [], []
    for alone in ask.requests():
        whole, half = geometry(alone, ask.device), _shared(alone, ask.device)
        if whole is None or half is None:
            return f"the weights of two do not fit on the chip at once ({alone.kernel} pass)"
        timings.append(_timing(whole, half, alone))
        places.append(alone)
    # as a captured graph would run, so that what it may want is loaded before
    decision = decide(timings, ask.steps, called=False, in_turns=ask.in_turns)
    for at, (alone, count) in enumerate(zip(places, decision.pieces, strict=True)):
        shared = replace(alone, share=2)
        if count == 1:
            continue
        if ask.captured and not is_loaded(shared, ask.device):
            return (
                "a CUDA graph is being captured, and the kernels for two at once were not loaded "
                "before"
            )
        whole, half = geometry(alone, ask.device), geometry(shared, ask.device)
        if whole is None or half is None:
            return f"the blocks of two do not run at once on this GPU ({alone.kernel} pass)"
        timings[at] = _timing(whole, half, alone)
    if decision.pays and not ask.captured:
        prepare_sides(ask.device)
    return decide(timings, ask.steps, called=not ask.captured, in_turns=ask.in_turns)


def passes(ask: PairAsk, decision: Decision) -> list[Pass]:
    """Forwards, and backwards where a gradient is wanted. A pass in one piece has the chip to
    itself."""
    found = []
    for alone, count in zip(ask.requests(), decision.pieces, strict=True):
        place = geometry(replace(alone, share=2) if count > 1 else alone, ask.device)
        assert place is not None
        sizes = (ask.steps, ask.batch, ask.hidden)
        kernel = launcher(place, ask.device)
        if alone.kernel == "backward":
            found.append(Pass(kernel, backward_schedule, sizes, count))
        else:
            order = partial(forward_schedule, in_turns=ask.in_turns)
            found.append(Pass(kernel, order, sizes, count, in_turns=ask.in_turns))
    return found


@cache
def _shared(alone: Request, device: int) -> Geometry | None:
    """What would serve on half of the chip, before it is compiled."""
    return next(iter(ranked(replace(alone, share=2), chip(device))), None)


def _timing(whole: Geometry, half: Geometry, alone: Request) -> Timing:
    return Timing(
        step_microseconds(whole, alone),
        launch_estimate(whole),
        step_microseconds(half, alone),
        launch_estimate(half),
        same_tile=half.tile == whole.tile,
    )
