"""What the tuner measures: tiles that hardly spill, and tiles near the fastest."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from ecornn.kernels.jit import Variant
from ecornn.kernels.jit.resources import Resources
from ecornn.kernels.persistent import choose, tables, tune
from ecornn.kernels.persistent.choose import Request, known_requests, measured, ranked
from ecornn.kernels.persistent.model import estimate, explain, terms
from ecornn.kernels.persistent.tile import CELLS, POLLING, Geometry, Tile
from ecornn.kernels.persistent.tune import finalists
from support.chips import CHIPS, HOPPER, KERNELS


def _as_if_compiled(monkeypatch: pytest.MonkeyPatch, frame: Callable[[Variant], int]) -> None:
    monkeypatch.setattr(tune, "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(tune, "compiled", lambda variant: variant)
    monkeypatch.setattr(tune, "resources", lambda variant: Resources(255, frame(variant)))


@pytest.mark.parametrize(("frame_bytes", "measured_too"), [(0, True), (40, True), (200, False)])
def test_tiles_that_hardly_spill_are_measured_too(
    frame_bytes: int, measured_too: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = Request("backward", "lstm", "tf32", 1024, 64)
    more_under_way = ranked(ask, HOPPER)[0]
    assert (more_under_way.tile.at_once, more_under_way.tile.abreast) == (4, 2)
    monkeypatch.setattr(tune, "chip", lambda device: HOPPER)
    spills = more_under_way.tile.variant("sm_90a")
    _as_if_compiled(monkeypatch, lambda v: frame_bytes if v == spills else 0)
    assert (more_under_way in finalists(ask, 0, 4)) is measured_too


def _in_registers(variant: Variant) -> int:
    found = dict(variant.constants)
    return int(found["REGISTER_TILES"] * found["CHUNKS"] + found["REGISTER_CHUNKS"])


def test_more_weights_in_registers_are_measured_as_far_as_they_hardly_spill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many as leave no frame, and as many as leave a small one."""
    frames = {21: 0, 22: 24, 23: 56, 24: 88}
    _as_if_compiled(monkeypatch, lambda v: frames.get(_in_registers(v), 0))
    known = measured(Request("forward", "lstm", "tf32", 1024, 4))
    assert known is not None
    tile = known.tile
    assert (tile.in_registers, tile.row_tiles * tile.chunks) == (16, 32)
    found = tune.register_ways(known, "sm_90a")
    assert [g.tile.in_registers for g in found] == [21, 23]
    assert [(g.tile.register_tiles, g.tile.register_chunks) for g in found] == [(2, 5), (2, 7)]
    for more in found:
        assert more.covers(1024, 4)
        spared = (more.tile.in_registers - 16) * 2 * tile.threads * 16
        assert more.tile.shared_bytes == tile.shared_bytes - spared
        assert (
            terms(more, 1024)["weights in shared memory"]
            < terms(known, 1024)["weights in shared memory"]
        )
        assert f"{more.tile.in_registers} of 32 in registers" in explain(more, 1024)
    whole = replace(known, tile=replace(tile, register_tiles=4))
    assert tune.register_ways(whole, "sm_90a") == []
    assert set(found) < set(tune.near(known, "sm_90a"))


@pytest.mark.parametrize("kernel", ["forward", "backward"])
def test_ways_to_ask_for_marks_are_measured_where_there_are_marks(kernel: str) -> None:
    through_l2 = measured(Request(kernel, "lstm", "bf16", 1024, 16))
    within = measured(Request(kernel, "lstm", "bf16", 256, 16))
    assert through_l2 is not None
    assert within is not None
    ways = tune.marks_ways(through_l2)
    own = through_l2.tile.marks_ahead
    assert {way.tile.marks_ahead for way in ways} == set(choose.MARKS_AHEAD[kernel]) - {own}
    assert {replace(way, tile=replace(way.tile, marks_ahead=own)) for way in ways} == {through_l2}
    assert tune.marks_ways(within) == []


@pytest.mark.parametrize("kernel", ["forward", "backward"])
@pytest.mark.parametrize("hidden", [64, 1024])
def test_weights_that_are_staged_are_measured_too(kernel: str, hidden: int) -> None:
    found = measured(Request(kernel, "lstm", "bf16", hidden, 4))
    assert found is not None
    known = replace(found, tile=replace(found.tile, staged_bytes=0))
    (staged,) = tune.staging_ways(known)
    assert staged.tile.staged_bytes == 64 << 10
    assert tune.staging_ways(staged) == [known]
    assert staged.covers(hidden, 4)
    slot, tile = 2 * known.tile.threads * 16, known.tile
    passes = min(tile.in_registers, (64 << 10) // slot) * slot
    assert staged.tile.shared_bytes == max(tile.shared_bytes, passes + 16)
    assert "loaded through shared memory" in explain(staged, hidden)
    assert "loaded through shared memory" not in explain(known, hidden)


def test_marks_are_asked_for_ahead_where_there_are_many() -> None:
    def ahead(kernel: str, hidden: int, batch: int) -> set[int]:
        ask = Request(kernel, "lstm", "bf16", hidden, batch)
        return {g.tile.marks_ahead for g in choose.candidates(ask, HOPPER) if g.tile.grid}

    assert ahead("forward", 1024, 4) == {0}
    assert ahead("forward", 1024, 8) == {4}
    assert ahead("backward", 1024, 1) == {2}


@pytest.fixture
def unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables with tiles of the numbers that were asked for, without any of the changes."""
    changes = {"staged_bytes": 0, "register_chunks": 0}
    entries = {
        key: {**entry, "tile": {**entry["tile"], **changes, "marks_ahead": 2}}
        for key, entry in tables.table().items()
        if "numbers" not in entry["tile"]
    }
    monkeypatch.setattr(choose, "table", lambda: entries)


@pytest.mark.usefixtures("unchanged")
def test_every_known_size_is_measured_again_beside_tiles_near_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _as_if_compiled(monkeypatch, lambda v: 0)
    monkeypatch.setattr(tune, "chip", lambda device: HOPPER)
    monkeypatch.setattr(tune, "_Problem", lambda ask, device: ask)

    def took(ask: Request, geometry: Geometry, device: int) -> float | None:
        if ask.hidden == 64:
            return None  # its blocks do not run at once
        if geometry.tile.numbers != ask.numbers:
            return 3.0
        gains = (geometry.tile.marks_ahead == 4, geometry.tile.staged_bytes > 0)
        return 2.0 - geometry.tile.in_registers / 100 - 0.1 * sum(gains)

    monkeypatch.setattr(tune, "measure", took)
    every = list(tune.tuned_again(0))
    asks = [ask for ask in known_requests() if ask.hidden != 64]
    first, second = every[: len(asks)], every[len(asks) :]
    assert len(asks) == len(first) > 50
    assert len(second) == len(asks), "each has a tile that is better, and others near that"
    last = {str(again.entry["request"]): again.entry for again in second}
    for ask, (entry_, before, _) in zip(asks, first, strict=True):
        known = measured(ask)
        assert known is not None
        assert before == took(ask, known, 0)
        assert entry_["microseconds"] < before
        # the two changes that gain the most
        registers = _spared(known.tile) / 100
        gains = sorted([0.1, registers, 0.1 * known.tile.grid])[-2:]
        found = last[str(entry_["request"])]
        assert found["microseconds"] == pytest.approx(before - sum(gains), abs=1e-3)
    assert [again.left for again in first] == sorted((a.left for a in first), reverse=True)
    assert second[-1].left == 0


def _spared(tile: Tile) -> int:
    """Tiles of a warp's that are in shared memory and would have room in registers."""
    return tile.row_tiles * tile.chunks - tile.in_registers


def test_what_no_change_makes_better_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _as_if_compiled(monkeypatch, lambda v: 0)
    monkeypatch.setattr(tune, "chip", lambda device: HOPPER)
    monkeypatch.setattr(tune, "_Problem", lambda ask, device: ask)
    own = {measured(ask) for ask in known_requests()}
    monkeypatch.setattr(tune, "measure", lambda ask, g, device: 1.0 if g in own else 2.0)
    found = list(tune.tuned_again(0))
    assert len(found) == len(known_requests())
    assert found[-1].left == 0


def test_sizes_in_some_numbers_alone_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    _as_if_compiled(monkeypatch, lambda v: 0)
    monkeypatch.setattr(tune, "chip", lambda device: HOPPER)
    monkeypatch.setattr(tune, "_Problem", lambda ask, device: ask)
    monkeypatch.setattr(tune, "measure", lambda ask, g, device: 1.0)
    every = known_requests()
    for numbers, own in (("tf32", "tf32"), ("bf16", "bf16"), ("fp16", "bf16"), ("ieee", "ieee")):
        wanted = [ask for ask in every if ask.numbers == own]
        assert known_requests(numbers) == wanted
        found = [again.entry["request"]["numbers"] for again in tune.tuned_again(0, numbers)]
        assert found == [own] * len(wanted)
    assert 0 < len(known_requests("tf32")) < len(every)


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(("gain", "taken"), [(0.005, False), (0.015, True)])
def test_a_change_that_gains_hardly_anything_is_not_made(
    gain: float, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _as_if_compiled(monkeypatch, lambda v: 0)
    monkeypatch.setattr(tune, "chip", lambda device: HOPPER)
    monkeypatch.setattr(tune, "_Problem", lambda ask, device: ask)
    monkeypatch.setattr(
        tune, "measure", lambda ask, g, device: 2.0 - 2.0 * gain * (g.tile.staged_bytes > 0)
    )
    first = list(tune.tuned_again(0))[: len(known_requests())]
    assert {again.before for again in first} == {2.0}
    assert {again.entry["tile"]["staged_bytes"] > 0 for again in first} == {taken}
    assert {again.entry["microseconds"] for again in first} == {2.0 - 2.0 * gain * taken}


def test_what_the_gpu_at_hand_has_no_room_for_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU without clusters would not even compile some."""
    _as_if_compiled(monkeypatch, lambda v: 0)
    monkeypatch.setattr(tune, "architecture", lambda device: "sm_89")
    monkeypatch.setattr(tune, "chip", lambda device: CHIPS["sm_89"])
    monkeypatch.setattr(tune, "_Problem", lambda ask, device: ask)
    measured_: list[Geometry] = []
    monkeypatch.setattr(
        tune, "measure", lambda ask, g, device: measured_.append(g) or float(len(measured_))
    )
    found = list(tune.tuned_again(0))
    assert 0 < len(found) < len(known_requests())
    assert {g.tile.cluster for g in measured_} == {1}
    assert all(g.tile.shared_bytes <= CHIPS["sm_89"].shared_bytes for g in measured_)


@pytest.mark.parametrize(
    ("numbers", "serving"),
    [("tf32", {"ieee", "scaled"}), ("tf32x3", {"ieee"}), ("ieee", set()), ("bf16", set())],
)
@pytest.mark.parametrize("batch", [1, 64])
def test_other_numbers_may_serve_float32(
    numbers: str, serving: set[str], batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ordinary units a few sequences."""
    _as_if_compiled(monkeypatch, lambda v: 0)
    monkeypatch.setattr(tune, "chip", lambda device: HOPPER)
    ask = Request("forward", "lstm", numbers, 64, batch)
    found = tune.others(ask, 0)
    assert {g.tile.numbers for g in found} == serving
    assert all(g.covers(64, batch) for g in found)
    assert all(g.group_batch <= 2 for g in found if g.tile.numbers == "ieee")
    assert set(found) <= set(finalists(ask, 0, 3))
    large = Request("forward", "lstm", numbers, 2048, 64)
    assert tune.others(large, 0) == [], "the chip has no room for so many groups"


def test_what_is_the_fastest_in_half_precision_is_tried_for_scaled_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """First, unless it spills or its cell has no bound."""
    _as_if_compiled(monkeypatch, lambda v: 0)
    monkeypatch.setattr(tune, "chip", lambda device: HOPPER)
    ask = Request("forward", "lstm", "tf32", 1024, 16)
    half = measured(replace(ask, numbers="bf16"))
    assert half is not None
    want = replace(half, tile=replace(half.tile, numbers="scaled", staged_bytes=0))
    found = [g for g in tune.others(ask, 0) if g.tile.numbers == "scaled"]
    assert found[0] == want
    assert len(found) == len(set(found)) <= tune.OTHERS * len(POLLING)
    spills = dict(want.tile.variant("sm_90a").constants)
    _as_if_compiled(monkeypatch, lambda v: 200 * (dict(v.constants) == spills))
    assert want not in tune.others(ask, 0)


def test_only_states_that_have_a_bound_are_scaled() -> None:
    for kernel, cell in product(KERNELS, CELLS):
        ask = Request(kernel, cell, "tf32", 256, 16)
        bounded = kernel == "forward" and cell != "rnn_relu"
        assert ("scaled" in choose.as_precise(ask)) is bounded
        found = list(choose.candidates(replace(ask, numbers="scaled"), HOPPER))
        assert bool(found) is bounded
        assert all(g.covers(256, 16) for g in found)
        # blocks that share the inner dimension do not see all of a GRU's initial states
        shared = any(g.tile.owners > 1 for g in found)
        assert shared is (bounded and cell != "gru")


def test_scaled_weights_do_not_pass_through_shared_memory() -> None:
    ask = Request("forward", "lstm", "scaled", 256, 16)
    assert tune.staging_ways(ranked(ask, HOPPER)[0]) == []


def test_a_tile_of_another_version_s_kernels_is_not_taken_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECORNN_CACHE", str(tmp_path / "cache"))
    tables.table.cache_clear()
    try:
        ask, other = (Request("forward", "lstm", "bf16", hidden, 4) for hidden in (256, 300))
        twice = Request("backward", "gru", "tf32", 304, 2, directions=2)
        known, found = measured(ask), ranked(other, HOPPER)[0]
        assert known is not None
        older = [tune.entry(ask, known, 0.1), tune.entry(twice, ranked(twice, HOPPER)[0], 0.3)]
        for each in older:
            each["tile"]["fetched"] = 2
        path = tables.remember([*older, tune.entry(other, found, 0.2)])
        with pytest.warns(UserWarning, match="another version's kernels") as told:
            assert measured(ask) == known, "the package's own"
        commands = (
            "ecornn tune --hidden 256 --batch 4 --cell lstm --numbers bf16; "
            "ecornn tune --hidden 304 --batch 2 --cell gru --numbers tf32 --bidirectional"
        )
        (message,) = (str(one.message) for one in told)
        assert str(path) in message
        assert message.endswith(f"measure these sizes anew: {commands}")
        assert choose.step_microseconds(known, ask) != 0.1
        assert measured(twice) is None
        assert measured(other) == found
        assert choose.step_microseconds(found, other) == 0.2
        # once they are measured, nothing is left to say
        tables.remember([tune.entry(one, ranked(one, HOPPER)[0], 0.4) for one in (ask, twice)])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert measured(twice) == ranked(twice, HOPPER)[0]
    finally:
        tables.table.cache_clear()


def test_a_tile_of_other_numbers_is_remembered_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECORNN_CACHE", str(tmp_path / "cache"))
    tables.table.cache_clear()
    try:
        ask = Request("forward", "lstm", "tf32", 256, 16)
        own, other = measured(ask), ranked(replace(ask, numbers="ieee"), HOPPER)[0]
        assert own is not None
        assert own.tile.numbers == "tf32"
        assert "numbers" not in tune.entry(ask, own, 0.5)["tile"]
        more_precise = [replace(ask, numbers=numbers) for numbers in ("tf32x3", "ieee")]
        assert [measured(each) for each in more_precise] == [None, None], "that was not measured"
        tables.remember([tune.entry(ask, other, 0.25)])
        assert measured(ask) == other
        assert ranked(ask, HOPPER)[0] == other
        assert "forward lstm ieee" in explain(other, 256)
        with_lengths = measured(replace(ask, features=True))
        assert with_lengths is not None
        assert (with_lengths.tile.numbers, with_lengths.tile.features) == ("ieee", True)
        assert [measured(each) for each in more_precise] == [other, other]
        assert [choose.step_microseconds(other, each) for each in more_precise] == [0.25, 0.25]
        # what is known of one unit's products says nothing of the other's
        assert choose.step_microseconds(own, ask) == max(0.25, estimate(own, 256))
        # what takes its place and is no more precise than was asked for is not taken for them
        scaled = ranked(replace(ask, numbers="scaled"), HOPPER)[0]
        tables.remember([tune.entry(ask, scaled, 0.125)])
        assert measured(ask) == scaled
        assert "forward lstm scaled" in explain(scaled, 256)
        assert [measured(each) for each in more_precise] == [other, other]
        assert [choose.step_microseconds(other, each) for each in more_precise] == [0.25, 0.25]
        tables.remember([tune.entry(ask, own, 0.0625)])
        assert measured(ask) == own
        assert [measured(each) for each in more_precise] == [other, other]
    finally:
        tables.table.cache_clear()
