"""Batches foretold from every allocation of smaller ones."""

from __future__ import annotations

import gc
import gzip
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ecornn.bench.models.step import make_step
from ecornn.profiler import fit
from ecornn.profiler.alignment import Key, aligned, key_of
from ecornn.profiler.assemble import assemble
from ecornn.profiler.blocks import STEPS
from ecornn.profiler.curve import curve_of, largest_running, run_of
from ecornn.profiler.history import History
from ecornn.profiler.lives import Lives, Mark, Marks
from ecornn.profiler.observation import Observation
from ecornn.profiler.recorded import HistoryCounts
from ecornn.profiler.rehearsal import Rehearsal, Rehearsed, rehearse
from ecornn.profiler.steps import Made, read_step
from support.recorded_steps import CPU, Emulated, recorded

MIB = 1 << 20


@pytest.mark.parametrize("name", ["gpt2", "resnet50"])
def test_an_unseen_batch_is_predicted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(batch: int) -> Any:
        return make_step(name, size="tiny", device="cpu", batch=batch)

    with recorded(monkeypatch):
        found = fit(of, sizes=(4, 8))
        gc.collect()
        real = read_step(of(40)).observed().peak_bytes
    assert found.curve.runs[-1].exact
    assert found.curve.same_storages
    assert found.peak(40) == pytest.approx(real, rel=0.01)


Taken = tuple[str, int, bool]


def report_of(step: Sequence[Taken]) -> Any:
    """Of a step that takes (operator, bytes, whether it is kept to the end) one after the other;
    what is not kept is given up once the next is there."""
    marks, events, in_use = Marks(lambda _: None), [], {}
    now = most = 0
    scratch: tuple[int, int] | None = None
    for place, (operator, size, kept) in enumerate(step):
        marks.set(Mark("backward", "layer", operator))
        number, address = marks.last, place << 40
        told = {"addr": address, "size": size, "user_metadata": str(number), "frames": ()}
        events.append({"action": "alloc", **told})
        now += size
        most = max(most, now)
        if scratch is not None:
            events.append({"action": "free_requested", "addr": scratch[0], "size": scratch[1]})
            now -= scratch[1]
        scratch = None if kept else (address, size)
        if kept:
            in_use[address] = size
    if scratch is not None:
        events.append({"action": "free_requested", "addr": scratch[0], "size": scratch[1]})
    history = History(events, in_use, 0, 0, most)
    lives = Lives(history, marks.said, [])
    count = HistoryCounts(history, lives.reserved_at, 0)
    device = torch.device("meta")
    return assemble(
        Observation(device, lives.records, lives.times, count, [], unit="allocation"), None
    )


def layers(batch: int, *, first: bool) -> list[Taken]:
    """As cuDNN's recurrent layers do: a workspace that is given up, and a reserve that stays."""
    workspace, reserve = ("workspace", 6 * batch * MIB, False), ("reserve", 5 * batch * MIB, True)
    output = ("output", batch * MIB, True)
    return [workspace, reserve, output] * 4 if first else [reserve, workspace, output] * 4


def test_the_order_of_scratch_decides_what_runs() -> None:
    """By the blocks that it leaves behind, not by the peak alone."""
    largest = {}
    for first in (True, False):
        runs = [run_of(batch, report_of(layers(batch, first=first))) for batch in (4, 8)]
        curve = curve_of(runs)
        assert curve.same_operators
        assert curve.same_storages
        assert curve(100) == report_of(layers(100, first=first)).peak_bytes
        largest[first] = largest_running(partial(curve.runs_within, 3200 * MIB), 110)
    assert largest[True] is not None
    assert largest[False] is not None
    assert largest[True] != largest[False]


def test_scratch_that_only_some_sizes_have() -> None:
    """Is taken as it is; the rest is on its line."""
    small, large = layers(4, first=True), layers(8, first=True)
    large.insert(2, ("convert", MIB // 2, False))
    curve = curve_of([run_of(4, report_of(small)), run_of(8, report_of(large))])
    assert not curve.same_operators
    assert curve.same_storages
    assert curve.unknown_share == 0, "of what is alive at the peak"
    assert curve(100) == 29 * 100 * MIB
    assert curve.runs_within(10**12, 100)
    large.insert(2, ("convert", 200 * MIB, True))
    curve = curve_of([run_of(4, report_of(small)), run_of(8, report_of(large))])
    assert not curve.same_storages, "too much of it is not known"


def rehearsed(batch: int) -> Rehearsal:
    def make() -> Made:
        return read_step(make_step("transformer", size="tiny", device="cpu", batch=batch))

    return rehearse(batch, make, Emulated(), CPU)


def test_a_rehearsal_has_all_that_a_batch_allocates() -> None:
    """From the making of the model on; and with it the sizes of another batch."""
    small, large, real = (rehearsed(batch) for batch in (3, 5, 11))
    both = Rehearsed(small, large)
    assert both.unknown_share == 0
    assert both.are_alike
    made = [i for i, born in enumerate(large.born) if born]
    assert [both.sizes(11)[i] for i in made] == [
        int(size) for size, born in zip(real.sizes, real.born, strict=True) if born
    ]
    operators = [operator for operator, _, _ in large.keys]
    assert any(operator.startswith("transformer_layers.") for operator in operators)
    phases = [phase for _, _, phase in large.keys]
    starts = [i for i in made if phases[i] == "optimizer" != phases[i - 1]]
    assert len(starts) == STEPS


def test_a_step_that_is_a_generator_is_run_to_its_end() -> None:
    """In a rehearsal and in a warm-up too."""
    ends: list[int] = []

    def make(*, pieces: bool) -> Made:
        model, x = nn.Sequential(nn.Linear(8, 32), nn.Tanh()), torch.randn(4, 8)

        def step() -> None:
            model(x).sum().backward()
            model.zero_grad()

        def step_in_pieces() -> Iterator[None]:
            loss = model(x).sum()
            yield
            loss.backward()
            model.zero_grad()
            ends.append(1)

        return read_step((step_in_pieces if pieces else step, model))

    gc.collect()
    whole, pieces = (
        rehearse(4, partial(make, pieces=pieces), Emulated(), CPU) for pieces in (False, True)
    )
    assert len(ends) == STEPS
    made = [
        [size for size, born in zip(r.sizes, r.born, strict=True) if born] for r in (whole, pieces)
    ]
    assert made[0] == made[1]
    make(pieces=True).observed(warm_up=2)
    assert len(ends) == STEPS + 3


def test_state_that_is_made_in_the_first_step_lies_in_the_way() -> None:
    """What a step leaves in the middle of a block is not there for the next one's."""
    keys = (("make", "", ""), ("run", "a", "forward"), ("state", "", "optimizer"), ("run",) * 3)
    born, freed = (1, 2, 3, 4), (None, 3, None, 5)
    found = [
        Rehearsal(batch, born, freed, np.asarray([MIB, batch * MIB, 2 * MIB, batch * MIB]), keys)
        for batch in (20, 40)
    ]
    both = Rehearsed(*found)
    assert both.sizes(100) == [MIB, 100 * MIB, 2 * MIB, 100 * MIB]
    assert both.runs_within(202 * MIB, 100), "small ones have a block of their own"
    assert not both.runs_within(201 * MIB, 100), "two of 100, though one is alive at a time"
    assert largest_running(partial(both.runs_within, 202 * MIB), 1000) == 100


@pytest.fixture(scope="module")
def speech() -> dict[int, Rehearsal]:
    """All that three steps of a speech model allocated on an H200 limited to 16 GiB, by batch. A
    batch of 83 did not run: its last allocation was asked for in vain."""
    path = Path(__file__).parent / "data" / "speech-h200.json.gz"
    told = json.loads(gzip.decompress(path.read_bytes()))["batches"]
    return {
        int(batch): Rehearsal(
            int(batch),
            tuple(one["born"]),
            tuple(one["freed"]),
            np.asarray(one["sizes"], float),
            tuple(tuple(one["names"][key]) for key in one["keys"]),
        )
        for batch, one in told.items()
    }


def test_the_events_of_a_gpu_run_out_of_blocks_where_it_did(speech: dict[int, Rehearsal]) -> None:
    for batch, ran in ((82, True), (83, False)):
        itself = replace(speech[batch], batch=batch - 1)
        assert Rehearsed(itself, speech[batch]).runs_within(16 << 30, batch) == ran


def test_the_largest_batch_of_a_gpu_is_foretold_from_small_ones(
    speech: dict[int, Rehearsal],
) -> None:
    both = Rehearsed(speech[8], speech[16])
    assert both.are_alike
    found = largest_running(partial(both.runs_within, 16 << 30), 94)
    assert found == pytest.approx(82, rel=0.02)


def test_keys_are_aligned_in_order() -> None:
    a, b, c = (("aten", name, "forward") for name in "abc")
    assert aligned([a, b, a, c], [a, b, a, c]).tolist() == [0, 1, 2, 3]
    assert aligned([a, b, a, c], [a, a, c, b]).tolist() == [0, 2, 3, -1]
    assert aligned([], [a]).tolist() == [-1]


def test_as_much_as_possible_is_aligned() -> None:
    """Beside the longest common subsequence by its definition."""
    draw = random.Random(0)
    for _ in range(300):
        below, above = ([_key(draw) for _ in range(draw.randrange(9))] for _ in range(2))
        places = aligned(below, above).tolist()
        pairs = [(place, i) for i, place in enumerate(places) if place >= 0]
        assert all(below[place] == above[i] for place, i in pairs)
        assert all(a < b for (a, _), (b, _) in pairwise(pairs))
        assert len(pairs) == _longest(below, above)


def test_scratch_is_told_apart_from_results() -> None:
    """Where one size has scratch and the other has none, results are aligned with results."""
    at = ("conv.forward", "stem", "forward")
    small = [key_of(at, 1, None), key_of(at, 2, None)]
    large = [key_of(at, 1, None), key_of(at, 2, 3), key_of(at, 3, None)]
    assert aligned(small, large).tolist() == [0, -1, 1]


def _key(draw: random.Random) -> Key:
    return draw.choice("abc"), "", "forward"


def _longest(below: list[Key], above: list[Key]) -> int:
    if not below or not above:
        return 0
    if below[0] == above[0]:
        return 1 + _longest(below[1:], above[1:])
    return max(_longest(below[1:], above), _longest(below, above[1:]))
