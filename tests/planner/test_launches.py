"""Of persistent kernels, how many launches a batch takes, and which of them a capture finds loaded:
what is asked of `geometry`, without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ecornn.backends import persistent
from ecornn.backends.persistent_calls import sizes_at_once
from ecornn.backends.registry import by_name
from ecornn.spec import RnnSpec
from support.machine import HOPPER

BACKEND = by_name("persistent")


def asked(**changes: Any) -> RnnSpec:
    return RnnSpec("lstm", 4, device="cuda", **changes)


@pytest.fixture(autouse=True)
def _a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent, "too_old", lambda: None)
    monkeypatch.setattr(persistent, "build_side_by_side", lambda asks, device: None)
    monkeypatch.setattr(persistent, "chip", lambda device: HOPPER)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.mark.parametrize(("batch", "served"), [(40, True), (79, True), (80, True), (81, False)])
def test_more_sequences_than_fit_run_in_two_launches(
    batch: int, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def geometry(ask: Any, device: int) -> object | None:
        return object() if ask.batch <= 40 else None

    monkeypatch.setattr(persistent, "geometry", geometry)
    monkeypatch.setattr(persistent, "too_few_at_once", lambda ask, device: None)
    spec = asked(hidden=1024, batch=batch, needs_grad=True)
    refusal = BACKEND.refuse(spec)
    assert refusal is None if served else f"a batch of {batch}, do not fit" in str(refusal)
    monkeypatch.setattr(persistent, "explain", lambda found, hidden: "a geometry\n  its model")
    several = {40: "", 81: "in 3"}.get(batch, "in 2")
    several += " launches, one after the other: " if several else ""
    assert BACKEND.details(spec) == [several + "a geometry", "  its model"] * 2
    # by the definition otherwise
    only_ours = replace(spec, keep="states")
    assert BACKEND.refuse(only_ours) is None


def test_halves_do_not_serve_where_the_whole_s_kernel_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A launch asks for the whole first, and would raise."""

    def geometry(ask: Any, device: int) -> object:
        if ask.batch == 80:
            raise OSError("no room for it")
        return object()

    monkeypatch.setattr(persistent, "geometry", geometry)
    spec = asked(hidden=1024, batch=80)
    assert BACKEND.refuse(spec) == "its kernel could not be made: no room for it"


def test_a_capture_finds_its_kernel_loaded_or_goes_to_torchs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded: set[Any] = set()

    def geometry(ask: Any, device: int) -> object:
        loaded.add(ask)
        return object()

    monkeypatch.setattr(persistent, "geometry", geometry)
    monkeypatch.setattr(persistent, "is_loaded", lambda ask, device: ask in loaded)
    for hidden, then in ((128, None), (64, "quicker")):
        eager = asked(hidden=hidden, dtype=torch.float32, batch=64, needs_grad=True)
        captured = replace(eager, captured=True)
        assert "being captured" in (BACKEND.refuse(captured) or "")
        # where it is cuDNN's, too, the kernel is loaded by now
        for called in (eager, captured):
            assert (then or "None") in str(BACKEND.refuse(called))


def test_a_capture_of_two_launches_needs_all_that_is_asked_for_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A launch asks for all sequences at once before it asks for half of them."""
    loaded: set[int] = set()

    def geometry(ask: Any, device: int) -> object | None:
        loaded.add(ask.batch)
        return object() if ask.batch <= 40 else None

    monkeypatch.setattr(persistent, "geometry", geometry)
    monkeypatch.setattr(persistent, "is_loaded", lambda ask, device: ask.batch in loaded)
    eager = asked(hidden=1024, needs_grad=True)
    captured = replace(eager, captured=True, batch=80)
    assert BACKEND.refuse(replace(eager, batch=40)) is None
    assert "being captured" in str(BACKEND.refuse(captured))
    loaded = {80}
    assert "being captured" in str(BACKEND.refuse(captured))
    assert BACKEND.refuse(replace(eager, batch=80)) is None
    assert BACKEND.refuse(captured) is None


def test_a_capture_of_both_directions_needs_the_kernel_for_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A launch asks for that first. One direction of the same size was called before."""
    loaded: set[tuple[str, int]] = {("forward", 1), ("backward", 1)}
    monkeypatch.setattr(persistent, "geometry", lambda ask, device: object())
    monkeypatch.setattr(
        persistent, "is_loaded", lambda ask, device: (ask.kernel, ask.directions) in loaded
    )
    captured = asked(hidden=256, needs_grad=True, captured=True, batch=4)
    assert BACKEND.refuse(captured) is None
    both = replace(captured, bidirectional=True)
    for kernel in ("forward", "backward"):
        assert "being captured" in str(BACKEND.refuse(both))
        loaded.add((kernel, 2))
    assert BACKEND.refuse(both) is None


@pytest.mark.parametrize(("fits", "asked_for"), [(0, [64, 1]), (20, [64, 1, 32, 22, 16])])
def test_not_all_sizes_are_tried_where_the_driver_runs_too_few_blocks(
    fits: int, asked_for: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may be kernels to compile."""
    sizes: list[int] = []

    def geometry(ask: Any, device: int) -> object | None:
        sizes.append(ask.batch)
        return object() if ask.batch <= fits else None

    monkeypatch.setattr(persistent, "geometry", geometry)
    monkeypatch.setattr(persistent, "too_few_at_once", lambda ask, device: "too few blocks")
    refusal = BACKEND.refuse(asked(hidden=512, batch=64, keep="states"))
    assert sizes == asked_for
    told = "too few blocks (forward pass of 512 units, batch of 64)"
    assert refusal == (None if fits else told)


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 64, 81, 140, 856])
def test_sizes_of_launches_are_near_the_largest_that_fits(batch: int) -> None:
    sizes = list(sizes_at_once(batch))
    assert sizes[0] == batch
    assert sizes[-1] == 1
    assert sizes == sorted(set(sizes), reverse=True)
    assert len(sizes) <= 2 * batch.bit_length()
    for most in range(1, batch + 1):
        size = next(size for size in sizes if size <= most)
        launches, fewest = -(-batch // size), -(-batch // most)
        assert launches <= 1.5 * fewest
