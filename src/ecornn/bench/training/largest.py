"""The largest batch that fits, in few tries.

Memory grows linearly with the batch once it is large, so that two tries that fit say where the
limit is. The rest is bisection between what fits and what does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

#: The peak in bytes of a step with so many samples; None if it did not fit.
Attempt = Callable[[int], int | None]

#: A guess stays below the limit by this much: fragments of the allocator take some memory too.
MARGIN = 0.98
#: At most so many times the batch that is known to fit.
LEAP = 4
#: The same after the first that fits: some memory does not grow, so that what is in proportion to
#: its peak fits too.
FIRST_LEAP = 32


@dataclass(frozen=True)
class Found:
    """`refused` is the smallest batch seen not to fit; None if none was tried."""

    batch: int
    refused: int | None
    tries: int


def largest(
    attempt: Attempt, start: int, limit: int, tries: int, grain: int = 1, enough: float = 1.0
) -> Found | None:
    """Batches are multiples of `grain`, or 1. One that takes more than such a part of the limit is
    `enough`. None if not even a single sample fits, or none of the batches tried."""
    peaks: dict[int, int] = {}
    refused: int | None = None
    batch = start
    for used in range(1, tries + 1):
        peak = attempt(batch)
        if peak is None:
            refused = batch if refused is None else min(refused, batch)
        else:
            peaks[batch] = peak
            if peak > enough * limit:
                return Found(batch, refused, used)
        following = _following(peaks, refused, limit, grain, start)
        if following is None or used == tries:
            return Found(max(peaks), refused, used) if peaks else None
        batch = following
    return None


def _following(
    peaks: dict[int, int], refused: int | None, limit: int, grain: int, start: int
) -> int | None:
    """What to try next; None if nothing between what fits and what does not is left."""
    fits = max(peaks, default=0)
    if len(peaks) > 1:
        guess = _extrapolated(peaks, limit)
    elif peaks:
        guess = min(
            FIRST_LEAP * fits, max(fits + grain, int(fits * MARGIN * limit / max(peaks[fits], 1)))
        )
    else:
        guess = (refused or start) // LEAP
    guess = max(guess // grain * grain, min(grain, start), 1)
    if refused is None:
        return guess if guess > fits else fits + grain
    if fits < guess < refused:
        return guess
    middle = (fits + refused) // 2
    middle = middle // grain * grain or middle
    return middle if fits < middle < refused else None


def _extrapolated(peaks: dict[int, int], limit: int) -> int:
    (small, at_small), (large, at_large) = sorted(peaks.items())[-2:]
    slope = (at_large - at_small) / (large - small)
    if slope <= 0:
        return LEAP * large
    return min(LEAP * large, large + int((MARGIN * limit - at_large) / slope))
