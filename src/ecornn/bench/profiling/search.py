"""The largest batch that fits, by bisection between one seen to fit and one seen not to."""

from __future__ import annotations

from collections.abc import Callable

#: First steps away from the guess, as a share of it; then twice as far each time.
STEP = 0.02


def search(fits: Callable[[int], bool], guess: int, grain: int = 1) -> tuple[int, int]:
    """The largest batch, to within `grain`, and how many were tried; 0 if not even one fits. Both
    ends are tried, however good the guess."""
    low, high, tries = 0, 0, 0
    reach = max(grain, int(STEP * guess))
    batch = guess
    while not low or not high:
        tries += 1
        if fits(batch):
            low = max(low, batch)
            batch = low + reach
        else:
            high = batch if not high else min(high, batch)
            if high == 1:
                return 0, tries
            batch = max(1, high - reach)
        reach *= 2
    while high - low > grain:
        middle = (low + high) // 2
        tries += 1
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low, tries
