"""`fit`: the peak of batch sizes that were never run, and the largest that fits.

Meta tensors have sizes and no memory: a step on them is observed at any batch size, exactly on what
is tracked. On a real device a few small batches are observed and their lines drawn on; each is run
only where its predicted peak is far below the budget.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch

from ecornn.errors import InvalidInput
from ecornn.profiler.curve import Curve, curve_of, largest_running, run_of
from ecornn.profiler.history import Recorder
from ecornn.profiler.inventory import contents_of
from ecornn.profiler.light import LightCollector
from ecornn.profiler.rehearsal import Rehearsal, Rehearsed, rehearse
from ecornn.profiler.session import device_of
from ecornn.profiler.steps import Made, read_step
from ecornn.sizes import read_size, size_text

#: Not 1, at which operators take other ways; the second tells the slope, more confirm it.
SMALL = (2, 4, 8)
#: Larger ones follow by doubling while the next is predicted to take at most this of the budget.
SHARE = 0.25
MOST_RUNS = 7
MOST = 1 << 20


@dataclass(frozen=True)
class Fit:
    """The answer for one sequence length."""

    device: str
    #: "simulated": the answer was observed without memory. "drawn on": from smaller batches.
    method: str
    curve: Curve
    memory: int | None
    #: The largest batch whose peak is within `memory`; None if none is, or no budget was given.
    largest: int | None
    length: int | None
    notes: tuple[str, ...]
    #: On CUDA: the largest for which torch's allocator, limited to `memory`, finds its blocks.
    largest_running: int | None = None

    def peak(self, batch: int) -> int:
        """Predicted bytes, as the allocator counts them."""
        return self.curve(batch)

    @property
    def observed(self) -> dict[int, int]:
        """Peak bytes by batch size, of the steps that were observed."""
        return {run.batch: run.peak_bytes for run in self.curve.runs}

    def __str__(self) -> str:
        length = "" if self.length is None else f", length {self.length}"
        lines = [f"on {self.device}{length}, {self.method}"]
        lines += [f"  batch {batch}: {size_text(peak)}" for batch, peak in self.observed.items()]
        if self.memory is not None and self.largest is None:
            lines.append(f"not even a batch of 1 fits {size_text(self.memory)}")
        elif self.memory is not None and self.largest is not None:
            peak = size_text(self.peak(self.largest))
            lines.append(
                f"the largest batch within {size_text(self.memory)}: {self.largest}, {peak}"
            )
        if self.largest_running is not None:
            lines.append(f"the largest for which the allocator finds room: {self.largest_running}")
        return "\n".join([*lines, *self.notes])


def fit(
    make_step: Callable[..., Any],
    memory: str | int | None = None,
    *,
    length: int | None = None,
    sizes: Sequence[int] | None = None,
    most: int = MOST,
) -> Fit:
    """How the peak grows with the batch, and the largest batch within `memory` ("24GiB" or bytes).

    `make_step(batch)`, or `make_step(batch, length)` where `length` is given, makes a training step
    anew: `(step, model)`, `(step, model, optimizer)`, or a callable with these attributes. `sizes`:
    the batches to observe, at least two; by default some small ones. `most` bounds the answer.
    """
    budget = _read_memory(memory)
    _check_takes(make_step, length)
    if sizes is not None and (len(set(sizes)) < 2 or min(sizes) < 1):
        raise InvalidInput("sizes", repr(sizes), "two different batch sizes or more", "give them")
    observer = _Observer(make_step, length)
    for batch in sorted(set(sizes or SMALL)):
        observer.observe(batch)
    if sizes is None and budget is not None and not observer.simulated:
        observer.grow(budget)
    largest = None if budget is None else observer.curve.largest_within(budget, most)
    if budget is not None and observer.simulated:
        largest = observer.confirmed(largest or 1, budget, most)
    return observer.answer(budget, largest)


class _Observer:
    def __init__(self, make_step: Callable[..., Any], length: int | None) -> None:
        self._make_step, self._length = make_step, length
        self.runs: dict[int, Any] = {}
        self.device, self.simulated = "", False
        self._notes: dict[str, None] = {}

    @property
    def curve(self) -> Curve:
        return curve_of(list(self.runs.values()))

    def _make(self, batch: int) -> Made:
        given = (batch,) if self._length is None else (batch, self._length)
        return read_step(self._make_step(*given))

    def observe(self, batch: int) -> int:
        """The peak at `batch`, whose step is made, run and given up again."""
        if batch not in self.runs:
            # Steps often refer to themselves, and an allocator counts what stays: what was given up
            # before the first one is observed must not look as if the batch had needed it.
            gc.collect()
            made = self._make(batch)
            contents = contents_of(made.model)
            device = device_of(contents)
            self.device = str(device)
            self.simulated = device.type == "meta" or contents.are_fake
            del contents  # a step may replace its weights: nobody else may hold on to the old ones
            report = made.observed()
            self._notes |= dict.fromkeys(report.notes)
            self.runs[batch] = run_of(batch, report)
            del made, report
        return int(self.runs[batch].peak_bytes)

    def grow(self, budget: int) -> None:
        """Larger batches, as long as they stay far below the budget and the device's memory."""
        free = budget
        if torch.device(self.device).type == "cuda":
            free = min(budget, torch.cuda.mem_get_info(self.device)[0])
        batch = 2 * max(self.runs)
        while len(self.runs) < MOST_RUNS and self.curve(batch) <= SHARE * free:
            self.observe(batch)
            batch *= 2

    def confirmed(self, guess: int, budget: int, most: int) -> int | None:
        """The largest that fits, seen to fit, the next one seen not to."""
        fits, fails = 0, most + 1
        while fails - fits > 1:
            if self.observe(guess) <= budget:
                fits = guess
            else:
                fails = guess
            # Beside the guess first: lines are mostly exact. Then by halves.
            beside = fits + 1 if fits == guess else fails - 1
            guess = beside if beside not in self.runs else (fits + fails) // 2
            guess = min(max(guess, fits + 1), fails - 1)
        return fits or None

    def answer(self, budget: int | None, largest: int | None) -> Fit:
        curve = self.curve
        notes = list(self._notes)
        if not curve.same_operators and not curve.same_storages:
            notes.append(
                "the operators differ between the two largest batches observed, so the prediction"
                " is a line through their peaks alone"
            )
        if self.simulated:
            notes.append("scratch inside operators is not seen without memory")
        method = "simulated" if self.simulated else "drawn on from smaller batches"
        running = None
        if budget is not None and largest is not None and self._has_blocks:
            runs = self._runs_within(budget, notes)
            running = None if runs is None else largest_running(runs, largest)
        told = (self.device, method, curve, budget, largest, self._length, tuple(notes), running)
        return Fit(*told)

    def _runs_within(self, budget: int, notes: list[str]) -> Callable[[int], bool] | None:
        """Tells of a batch whether the allocator finds its blocks; None, and a note, if unknown."""
        curve, device = self.curve, torch.device(self.device)
        reason = "the model's tensors are only simulated" if self.simulated else None
        reason = reason or LightCollector.missing()
        if reason is None:
            rehearsed = Rehearsed(*(self._rehearse(run.batch, device) for run in curve.runs[-2:]))
            if rehearsed.are_alike:
                return lambda batch: rehearsed.runs_within(budget, batch)
            reason = "what two batches allocate differs too much"
        if curve.same_storages:
            notes.append(f"whether the allocator finds its blocks is told by one step: {reason}")
            return lambda batch: curve.runs_within(budget, batch)
        notes.append(
            "the storages differ between the two largest batches observed: whether the allocator"
            " finds its blocks is not known"
        )
        return None

    def _rehearse(self, batch: int, device: torch.device) -> Rehearsal:
        return rehearse(batch, lambda: self._make(batch), Recorder(device), device)

    @property
    def _has_blocks(self) -> bool:
        return torch.device(self.device).type == "cuda"


def _check_takes(make_step: Any, length: int | None) -> None:
    """A step itself, which has no arguments, is easily given in the place of what makes it."""
    if not callable(make_step):
        told, remedy = f"{type(make_step).__name__}", "pass a function that makes the step"
    else:
        given = ("batch",) if length is None else ("batch", "length")
        try:
            told = str(signature(make_step))
            signature(make_step).bind(*given)
            return
        except ValueError:  # built in: it has no signature
            return
        except TypeError:
            told = f"{getattr(make_step, '__name__', type(make_step).__name__)}{told}"
            remedy = f"let it take ({', '.join(given)}), and make the step anew for each"
            remedy += "" if length is not None else "; if it takes a length too, pass length="
    expected = "make_step(batch)" if length is None else "make_step(batch, length)"
    raise InvalidInput("make_step", told, f"a function that is called as {expected}", remedy)


def _read_memory(memory: str | int | None) -> int | None:
    expected = 'a size such as "24GiB", or bytes as an integer'
    if memory is None:
        return None
    found = read_size("memory", memory, expected) if isinstance(memory, str) else memory
    if type(found) is not int or found <= 0:
        raise InvalidInput("memory", repr(memory), expected, "give one above 0")
    return found
