"""Two layers of a stack at the same time: in which order, in how many pieces, and whether at all.

Time is cut into pieces. While one layer works on a piece, the next layer, on a stream of its own
and on the other half of the chip, works on the piece before, of which it has the input by then.
Everything here is plain data: `persistent_pair` carries it out.
"""

from __future__ import annotations

from typing import NamedTuple

from ecornn.backends.persistent_calls import Piece

MAIN, SIDE = "main", "side"
PRODUCT, KERNEL, WEIGHTS, WAIT = "product", "kernel", "weights", "wait"
#: A product for all pieces at once.
ALL = -1


class Op(NamedTuple):
    """One thing that a stream is given. A wait is for all that the other was given so far."""

    kind: str
    stream: str
    layer: int = ALL
    piece: int = ALL


def forward_schedule(pieces: int, *, in_turns: bool = False) -> list[Op]:
    """Products stay on one stream, so that torch's library has one workspace, and all memory is
    that stream's. The first layer's product is one: it would be on the same stream in any case.
    `in_turns`: the shares of the gates have room for two pieces only."""
    found = [] if in_turns else [Op(PRODUCT, MAIN, 0, ALL)]
    for piece in range(pieces):
        found += [Op(PRODUCT, MAIN, 0, piece)] if in_turns else []
        found += [Op(KERNEL, MAIN, 0, piece), Op(PRODUCT, MAIN, 1, piece)]
        # for the second layer's piece before, whose place the next piece takes
        found += [Op(WAIT, MAIN)] if in_turns and 0 < piece < pieces - 1 else []
        found += [Op(WAIT, SIDE), Op(KERNEL, SIDE, 1, piece)]
    return [*found, Op(WAIT, MAIN)]


def backward_schedule(pieces: int) -> list[Op]:
    """Pieces are counted as they come, from the end of time. A product here is the gradient of what
    the first layer gave the second; the second's weights have time while the first's last piece is
    under way."""
    found = []
    for piece in range(pieces):
        found += [
            Op(KERNEL, MAIN, 1, piece),
            Op(PRODUCT, MAIN, 1, piece),
            Op(WAIT, SIDE),
            Op(KERNEL, SIDE, 0, piece),
        ]
    return [*found, Op(WEIGHTS, MAIN, 1, ALL), Op(WAIT, MAIN), Op(WEIGHTS, MAIN, 0, ALL)]


def cut(steps: int, count: int) -> list[Piece]:
    """Time in so many pieces of equal length, or in fewer where they would not be equal but for the
    last."""
    size = -(-steps // count)
    return [Piece(at, min(size, steps - at), steps) for at in range(0, steps, size)]


#: More are not tried: each takes three more launches of the host.
MOST_PIECES = 6
#: So many at least where two pieces' shares of the gates must take no more than half of all.
LEAST_IN_TURNS = 4
#: Of the time one after the other: what is not counted here must not make it the slower way.
WORTH = 0.9
#: Of that, where half of the chip needs another tile, whose time is only the model's: with 16
#: sequences of 256 units it was predicted to save a tenth on an H200, and took longer.
BY_MODEL = 0.92
#: What the host takes for a pass of two layers that is called, and for each piece of time more; in
#: training more is asked and kept. Of the order that was measured on an H200's machine: there
#: training of small layers in three pieces was slower when called, and quicker from a graph.
HOST_MICROSECONDS = {"inference": 150.0, "training": 450.0}
HOST_MICROSECONDS_A_PIECE = 60.0


class Timing(NamedTuple):
    """Microseconds of one layer's kernel in one pass."""

    step: float  # with the chip to itself
    launch: float  # beyond its steps
    shared_step: float  # on its half of the chip
    shared_launch: float
    same_tile: bool = True  # there

    @property
    def worth(self) -> float:
        return WORTH if self.same_tile else WORTH * BY_MODEL


class Decision(NamedTuple):
    """Pieces of time in each pass, forwards first; one where the layers run one after the other
    with the chip to themselves. Microseconds of all passes."""

    pieces: tuple[int, ...]
    microseconds: float
    one_by_one: float

    @property
    def pays(self) -> bool:
        return max(self.pieces) > 1

    def __str__(self) -> str:
        if not self.pays:
            return (
                f"layers run one after the other, in {self.one_by_one:.0f} us a pair by the model: "
                "two at once would not save enough"
            )
        told = [
            f"in {count} pieces of time {name}" if count > 1 else f"not {name}"
            for name, count in zip(("forwards", "backwards"), self.pieces, strict=False)
        ]
        return (
            f"two layers run at once, {' and '.join(told)}: {self.microseconds:.0f} us a pair "
            f"instead of {self.one_by_one:.0f} by the model"
        )


def one_by_one(timing: Timing, steps: int, host: float = 0.0) -> float:
    """Two kernels, and two products. `host`: its part of a pass that is called."""
    return max(2 * (steps * timing.step + timing.launch), host)


def overlapped(timing: Timing, steps: int, pieces: int, host: float = 0.0) -> float:
    """A piece more than there are: the last layer's last one has nothing beside it."""
    size = -(-steps // pieces)
    pieces = -(-steps // size)
    device = (pieces + 1) * (size * timing.shared_step + timing.shared_launch)
    return max(device, host + pieces * HOST_MICROSECONDS_A_PIECE) if host else device


def decide(timings: list[Timing], steps: int, *, called: bool, in_turns: bool = False) -> Decision:
    """The best number of pieces for each pass, one where no other is worth it."""
    counts, best, before = [], 0.0, 0.0
    host = HOST_MICROSECONDS["training" if len(timings) > 1 else "inference"] if called else 0.0
    for number, timing in enumerate(timings):
        least = LEAST_IN_TURNS if in_turns and number == 0 else 2
        alone = one_by_one(timing, steps, host)
        times = {
            pieces: overlapped(timing, steps, pieces, host)
            for pieces in range(least, min(MOST_PIECES, steps) + 1)
        }
        count = min(times, key=lambda pieces: times[pieces], default=1)
        if count not in times or times[count] > timing.worth * alone:
            count = 1
        counts.append(count)
        best, before = best + (times[count] if count > 1 else alone), before + alone
    if in_turns and counts[0] == 1:  # with the gates' shares of all of time at once
        return Decision((1,) * len(counts), before, before)
    return Decision(tuple(counts), best, before)
