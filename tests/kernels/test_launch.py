"""How persistent kernels are launched, as far as that shows without a GPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ecornn.kernels.persistent.choose import Request, candidates
from ecornn.kernels.persistent.launch import Kernel, bytes_apart
from ecornn.kernels.persistent.tile import Geometry
from support.chips import HOPPER

#: A multiprocessor's of an H200, of which a block can have all but 1 KiB, which each takes besides.
WHOLE, RESERVED = 228 * 1024, 1024


@pytest.fixture(autouse=True)
def _an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    chip = SimpleNamespace(multi_processor_count=132, shared_memory_per_multiprocessor=WHOLE)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)


def alone(sequences: int) -> Geometry:
    """One block for each sequence."""
    ask = Request("forward", "lstm", "tf32", 64, sequences)
    found = (g for g in candidates(ask, HOPPER) if not g.tile.grid and g.tile.cluster == 1)
    return replace(next(g for g in found if g.groups == sequences), directions=1)


def test_blocks_that_begin_early_have_a_multiprocessor_each() -> None:
    for sequences in (1, 64, 132):
        asked = bytes_apart(alone(sequences), 0)
        assert 2 * (asked + RESERVED) > WHOLE
        assert asked + RESERVED <= WHOLE


def test_more_blocks_than_multiprocessors_share_them() -> None:
    geometry = alone(64)
    both = replace(geometry, directions=3)
    assert both.all_blocks > 132
    assert bytes_apart(both, 0) == both.tile.shared_bytes


@pytest.mark.parametrize(
    "change", [{"cluster": 2}, {"grid": True}, {"kernel": "backward"}], ids=str
)
def test_others_take_what_they_need(change: dict[str, object]) -> None:
    geometry = alone(4)
    tile = replace(geometry.tile, **change)  # type: ignore[arg-type]
    assert bytes_apart(replace(geometry, tile=tile), 0) == tile.shared_bytes


def test_only_an_early_launch_asks_for_it() -> None:
    geometry = alone(4)
    kernel = object.__new__(Kernel)
    kernel.tile = geometry.tile
    plain = kernel.config(geometry, cooperative=False)
    early = kernel.config(geometry, cooperative=False, early=True, shared_bytes=120_000)
    assert (plain.sharedMemBytes, plain.numAttrs) == (geometry.tile.shared_bytes, 0)
    assert (early.sharedMemBytes, early.numAttrs) == (120_000, 1)
