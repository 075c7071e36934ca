"""The largest batch that fits, in few tries.

Memory grows linearly with the batch once it is large, so that one try that fits, and what does not
grow, say where the limit is, and two tries say it better. The rest is bisection between what fits
and what does not: by factors as long as these are far apart, as they are where the peak of a plan
that recomputes less for a large batch than for a small one has misled the first guess.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

#: The peak in bytes of a step with so many samples; None if it did not fit.
Attempt = Callable[[int], int | None]

#: A guess stays below the limit by this much: fragments of the allocator take some memory too.
MARGIN = 0.98
#: A guess that does not fit is often little too large: so much of it is tried before the middle.
BACK = 0.94
#: At most so many times the batch that is known to fit.
LEAP = 4
#: The same after the first that fits.
FIRST_LEAP = 32
#: What does not fit is far from what does if it is so many times that, and so is a guess.
FAR = 2
#: A far guess takes this much of what is left at most, if it follows from one peak alone: plans and
#: fragments are others for many samples than for few, and a try may be minutes of compiling. Of 30
#: searches on an H200 that began at a known peak, 24 first guesses, reckoned again, were no smaller
#: than a batch that was refused, far ones up to three times as large.
CAREFUL = 0.75


@dataclass(frozen=True)
class Known:
    """What is known before the first try: what no batch takes less than, and the peaks of batches
    that somebody else has measured, where a search begins. None of these counts as tried."""

    fixed: int = 0
    peaks: Mapping[int, int] = field(default_factory=dict)


NOTHING = Known()


@dataclass(frozen=True)
class Found:
    """`refused` is the smallest batch seen not to fit; None if none was tried. `stopped`: there was
    one more to try that nobody wanted to."""

    batch: int
    refused: int | None
    tries: int
    stopped: bool = False


def largest(
    attempt: Attempt,
    start: int,
    limit: int,
    tries: int,
    grain: int = 1,
    enough: float = 1.0,
    known: Known = NOTHING,
    *,
    go_on: Callable[[], bool] = lambda: True,
) -> Found | None:
    """Batches are multiples of `grain`, or 1. One that takes more than such a part of the limit is
    `enough`; one that fits is, too, where nobody wants to `go_on`. None if not even a single sample
    fits, or none of the batches tried."""
    # what others measured beyond the limit leads to no batch that fits
    peaks = {batch: peak for batch, peak in known.peaks.items() if peak <= limit}
    fitting: list[int] = []
    refused: list[int] = []
    batch: int | None = start
    done = stopped = False
    for left in reversed(range(tries)):
        if peaks or refused:
            batch = _following(peaks, refused, limit, grain, known.fixed)
        done = batch is None
        if not fitting and (batch is None or not left):
            batch = max(peaks, default=batch)  # of others: rather tried than nothing found
        stopped = bool(fitting) and not done and not go_on()
        if batch is None or stopped:
            break
        peak = attempt(batch)
        if peak is None:
            refused.append(batch)
            peaks.pop(batch, None)
            continue
        fitting.append(batch)
        peaks[batch] = peak
        if peak > enough * limit:
            break
    if not fitting:
        return None
    tried = len(fitting) + len(refused)
    return Found(max(fitting), min(refused, default=None), tried, stopped)


def _following(
    peaks: Mapping[int, int],
    refused: Sequence[int],
    limit: int,
    grain: int,
    fixed: int,
) -> int | None:
    """What to try next; None if nothing between what fits and what does not is left."""
    below = min(refused, default=None)
    fits = max((batch for batch in peaks if below is None or batch < below), default=0)
    if fits:
        guess = _guess(peaks, fits, MARGIN * limit, fixed) // grain * grain
        if guess <= fits and below is None:
            guess = _guess(peaks, fits, limit, fixed) // grain * grain
        guess = max(guess, fits + grain)
    else:
        assert below is not None, "there is something to follow"
        guess = max(below // LEAP // grain * grain, min(grain, below), 1)
    if below is None or guess < below:
        return guess
    if len(refused) == 1 and below <= FAR * fits:
        guess = int(BACK * below) // grain * grain
        if fits < guess < below:
            return guess
    middle = math.isqrt(fits * below) if below > FAR * fits else (fits + below) // 2
    middle = middle // grain * grain or middle
    return middle if fits < middle < below else None


def _guess(peaks: Mapping[int, int], fits: int, room: float, fixed: int) -> int:
    """The batch that should take so much, which is not far beyond what fits."""
    if len(peaks) == 1:
        slope, leap = (peaks[fits] - fixed) / fits, FIRST_LEAP
        if (room - peaks[fits]) > (FAR - 1) * fits * slope:
            room = peaks[fits] + CAREFUL * (room - peaks[fits])
    else:
        (small, at_small), (large, at_large) = sorted(peaks.items())[-2:]
        slope, leap = (at_large - at_small) / (large - small), LEAP
    most = leap * fits
    return min(most, fits + int((room - peaks[fits]) / slope)) if slope > 0 else most
