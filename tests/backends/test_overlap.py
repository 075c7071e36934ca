"""The order in which two layers run at once, and whether they do: plain data, checked as such."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from ecornn.backends.overlap import (
    KERNEL,
    MAIN,
    MOST_PIECES,
    PRODUCT,
    SIDE,
    WAIT,
    Op,
    Timing,
    backward_schedule,
    cut,
    decide,
    forward_schedule,
    one_by_one,
    overlapped,
)
from ecornn.kernels.persistent import streams
from ecornn.kernels.persistent.choose import Request, blocks_needed, ranked, step_microseconds
from support.machine import HOPPER

Place = tuple[str, int, int]  # what, of which layer, of which piece


def forward_effects(op: Op, pieces: int) -> tuple[set[Place], set[Place]]:
    """(reads, writes). The second layer's shares stand where the first's stood."""
    every = range(pieces)
    if op.kind == PRODUCT and op.layer == 0:
        return set(), {("shares", 0, k) for k in every}
    k = op.piece
    if op.kind == PRODUCT:
        return {("output", 0, k)}, {("shares", 0, k)}
    # h is read from the output of the piece before, and the last h_n stays
    before = {("output", op.layer, k - 1), ("c", op.layer, k - 1)} if k > 0 else set()
    wrote = {("output", op.layer, k), ("c", op.layer, k), ("h_n", op.layer, 0)}
    return {("shares", 0, k), *before}, wrote


def backward_effects(op: Op, pieces: int) -> tuple[set[Place], set[Place]]:
    if op.kind == PRODUCT:
        return {("d_gates", 1, op.piece)}, {("d_between", 0, op.piece)}
    if op.kind == KERNEL:
        k = op.piece
        before = {("d_states", op.layer, k - 1)} if k > 0 else set()
        arriving = {("d_between", 0, k)} if op.layer == 0 else set()
        return before | arriving, {("d_gates", op.layer, k), ("d_states", op.layer, k)}
    return {("d_gates", op.layer, k) for k in range(pieces)}, {("d_weights", op.layer, 0)}


def in_turns(pieces: int) -> list[Op]:
    return forward_schedule(pieces, in_turns=True)


def in_turns_effects(op: Op, pieces: int) -> tuple[set[Place], set[Place]]:
    """Each piece's shares stand where those of the one before the last stood."""
    if op.kind == PRODUCT and op.layer == 0:
        return set(), {("shares", 0, op.piece % 2)}
    reads, writes = forward_effects(op, pieces)

    def placed(places: set[Place]) -> set[Place]:
        return {(what, of, k % 2 if what == "shares" else k) for what, of, k in places}

    return placed(reads), placed(writes)


EFFECTS = {
    forward_schedule: forward_effects,
    in_turns: in_turns_effects,
    backward_schedule: backward_effects,
}
NAMES = ["forward", "in turns", "backward"]


@dataclass
class Order:
    """Which of the operations given so far are over when a stream goes on."""

    over: dict[str, set[int]] = field(default_factory=lambda: {MAIN: set(), SIDE: set()})
    writers: dict[Place, int] = field(default_factory=dict)
    readers: dict[Place, set[int]] = field(default_factory=dict)

    def wrongs(self, schedule: list[Op], effects: object, pieces: int) -> list[str]:
        found = []
        for at, op in enumerate(schedule):
            other = SIDE if op.stream == MAIN else MAIN
            if op.kind == WAIT:
                self.over[op.stream] |= self.over[other]
                continue
            before, (reads, writes) = self.over[op.stream], effects(op, pieces)  # type: ignore[operator]
            for place in reads:
                if self.writers.get(place, -1) not in before:
                    found.append(f"{op} reads {place} before it is there")
            for place in writes:
                last = self.readers.get(place, set()) | {self.writers.get(place, at)}
                if not last - {at} <= before:
                    found.append(f"{op} overwrites {place} that is still read")
                self.writers[place], self.readers[place] = at, set()
            for place in reads - writes:
                self.readers.setdefault(place, set()).add(at)
            self.over[op.stream].add(at)
        if self.over[MAIN] != {i for i, op in enumerate(schedule) if op.kind != WAIT}:
            found.append("something may still run at the end")
        return found


@pytest.mark.parametrize("pieces", [1, 2, 3, 6])
@pytest.mark.parametrize("schedule", EFFECTS, ids=NAMES)
def test_every_read_comes_after_its_write_and_no_wait_is_idle(
    schedule: object, pieces: int
) -> None:
    given: list[Op] = schedule(pieces)  # type: ignore[operator]
    effects = EFFECTS[schedule]  # type: ignore[index]
    assert Order().wrongs(given, effects, pieces) == []
    for at, op in enumerate(given):
        if op.kind == WAIT:
            without = [*given[:at], *given[at + 1 :]]
            assert Order().wrongs(without, effects, pieces), f"wait {at} is for nothing"


@pytest.mark.parametrize("schedule", EFFECTS, ids=NAMES)
def test_products_are_on_one_stream_and_kernels_on_both(schedule: object) -> None:
    given: list[Op] = schedule(3)  # type: ignore[operator]
    assert {op.stream for op in given if op.kind not in (KERNEL, WAIT)} == {MAIN}
    kernels = [op for op in given if op.kind == KERNEL]
    assert sorted((op.layer, op.piece) for op in kernels) == [
        (layer, piece) for layer in range(2) for piece in range(3)
    ]
    # a stream has one layer alone, so that the next of the one runs beside this of the other
    assert len({(op.stream, op.layer) for op in kernels}) == 2


@pytest.mark.parametrize("steps", [1, 2, 5, 64, 300])
@pytest.mark.parametrize("count", [1, 2, 4, 6])
def test_pieces_are_all_of_time(steps: int, count: int) -> None:
    found = cut(steps, count)
    assert [t for p in found for t in range(*p.times(descending=False))] == list(range(steps))
    assert len(found) <= count
    assert found[-1].last


def timing(step: float = 1.0, launch: float = 10.0, shared: float = 1.0) -> Timing:
    return Timing(step, launch, shared * step, launch)


def test_two_at_once_where_it_is_worth_it() -> None:
    found = decide([timing()], 256, called=False)
    assert found.pays
    # one count is better than its neighbours
    times = [overlapped(timing(), 256, n) for n in range(1, MOST_PIECES + 2)]
    assert found.microseconds == min(times[1:MOST_PIECES])
    assert found.one_by_one == one_by_one(timing(), 256) == 2 * (256 + 10)
    assert overlapped(timing(), 256, 2) == 3 * (128 + 10)


@pytest.mark.parametrize(
    "slow", [timing(launch=100.0), timing(shared=1.6)], ids=["launches", "half a chip"]
)
def test_one_after_the_other_where_it_is_not(slow: Timing) -> None:
    found = decide([slow], 64 if slow.launch == 100 else 256, called=False)
    assert not found.pays
    assert found.pieces == (1,)
    assert found.microseconds == found.one_by_one
    assert "one after the other" in str(found)


def test_each_pass_is_decided_by_itself() -> None:
    found = decide([timing(), timing(shared=3.0)], 256, called=False)
    assert found.pieces[0] > 1
    assert found.pieces[1] == 1
    assert "forwards and not backwards" in str(found)


def test_a_call_takes_fewer_pieces_than_a_graph_where_the_host_is_behind() -> None:
    quick = timing(step=0.6, launch=2.0)
    assert decide([quick], 256, called=True).pieces < decide([quick], 256, called=False).pieces
    # a training step of small layers is the host's; one of large layers is not
    assert decide([quick, quick], 256, called=True).pieces == (1, 1)
    slow = timing(step=3.0)
    assert min(decide([slow, slow], 256, called=True).pieces) > 1


def test_more_is_asked_of_a_tile_that_was_not_measured() -> None:
    known = timing(shared=1.25)
    other = known._replace(same_tile=False)
    assert decide([known], 256, called=False).pays
    assert not decide([other], 256, called=False).pays
    assert decide([timing()._replace(same_tile=False)], 256, called=False).pays


def test_in_turns_two_pieces_are_half_of_time_or_less() -> None:
    long = timing(launch=50.0)
    assert decide([long, long], 256, called=False).pieces == (2, 2)
    found = decide([long, long], 512, called=False, in_turns=True)
    assert found.pieces[0] >= 4
    assert found.pieces[1] >= 2
    # one after the other both ways, where the first is not worth it
    assert decide([long, long], 256, called=False, in_turns=True).pieces == (1, 1)


def test_one_step_is_not_cut() -> None:
    assert decide([timing()], 1, called=False).pieces == (1,)


@pytest.mark.parametrize("kernel", ["forward", "backward"])
@pytest.mark.parametrize("hidden", [128, 512, 1024])
@pytest.mark.parametrize("batch", [1, 16])
def test_what_shares_the_chip_leaves_half_of_it(kernel: str, hidden: int, batch: int) -> None:
    ask = Request(kernel, "lstm", "bf16", hidden, batch, share=2)
    for geometry in ranked(ask, HOPPER)[:8]:
        cluster = geometry.tile.cluster
        room = dict(((1, HOPPER.multiprocessors), *HOPPER.clusters))[cluster] * cluster
        assert 2 * blocks_needed(geometry, 2) <= room
        assert blocks_needed(geometry, 2) == geometry.all_blocks
        alone = Request(kernel, "lstm", "bf16", hidden, batch)
        whole = ranked(alone, HOPPER)[0]
        assert step_microseconds(geometry, ask) >= step_microseconds(whole, alone)


class FakeStream:
    def __init__(self, log: list[tuple[str, ...]], name: str) -> None:
        self.log, self.name, self.cuda_stream = log, name, hash(name)

    def wait_event(self, event: object) -> None:
        self.log.append((self.name, "waits"))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What two streams are asked, in order."""
    found: list[tuple[str, ...]] = []

    class FakeEvent:
        def record(self, stream: FakeStream) -> None:
            found.append((stream.name, "recorded"))

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream(found, MAIN))
    monkeypatch.setattr(streams, "_SIDES", {})
    monkeypatch.setattr(streams, "_SPARE", {0: []})
    monkeypatch.setattr(streams, "_new_stream", lambda device: FakeStream(found, SIDE))
    return found


def test_a_wait_is_for_what_the_other_stream_was_given(log: list[tuple[str, ...]]) -> None:
    fork = streams.Fork(0)
    assert fork.stream == hash(SIDE)
    fork.side_waits()
    fork.main_waits()
    fork.close()  # nothing is left to wait for
    assert log == [(MAIN, "recorded"), (SIDE, "waits"), (SIDE, "recorded"), (MAIN, "waits")]
    again = streams.Fork(0)
    again.close()
    assert len(log) == 4, "a stream that was given nothing is not waited for"
    again.side_waits()
    again.close()  # as after an error
    assert log[-1] == (MAIN, "waits")


def test_a_stream_has_one_beside_it_made_ahead(log: list[tuple[str, ...]]) -> None:
    streams.prepare_sides(0)
    ready = list(streams._SPARE[0])
    assert len(ready) == streams.SPARE
    first, second = FakeStream(log, "first"), FakeStream(log, "second")
    side = streams.side_of(first, 0)
    assert side in ready
    assert streams.side_of(first, 0) is side
    assert streams.side_of(second, 0) is not side
    streams.prepare_sides(0)
    assert len(streams._SPARE[0]) == streams.SPARE
