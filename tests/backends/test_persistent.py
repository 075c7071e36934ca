"""What the persistent backend refuses and tells of a GPU whose driver is made up."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ecornn.backends import persistent
from ecornn.backends.registry import by_name
from ecornn.errors import NoBackend
from ecornn.kernels.persistent import device
from ecornn.kernels.persistent.choose import Request, blocks_needed, measured, ranked
from ecornn.kernels.persistent.model import explain
from ecornn.planner import plan
from ecornn.spec import RnnSpec
from support.machine import HOPPER

#: More blocks than half of the chip has room for, and weights that fit on it as a whole.
SPEC = RnnSpec(
    *("lstm", 1024, 1024), dtype=torch.bfloat16, device="cuda", needs_grad=True, brief=True, batch=4
)


class Driver:
    """Says how many blocks run at once, and which kernels it was asked about."""

    def __init__(self, at_once: int) -> None:
        self.at_once, self.asked = at_once, []

    def kernel(self, tile: Any, arch: str) -> Any:
        self.asked.append(tile)
        return SimpleNamespace(blocks_at_once=lambda: self.at_once)


def install(monkeypatch: pytest.MonkeyPatch, at_once: int) -> Driver:
    driver = Driver(at_once)
    monkeypatch.setattr(device, "kernel", driver.kernel)
    monkeypatch.setattr(device, "_FOUND", {})
    monkeypatch.setattr(device, "architecture", lambda index: "sm_90a")
    monkeypatch.setattr(device, "compiled", lambda variant: b"")
    beside = ("share_launcher", "gradient_launcher", "transpose_launcher")
    for name in ("make_context_current", "failure_flag", *beside):
        monkeypatch.setattr(device, name, lambda *_: None)
    for module in (device, persistent):
        monkeypatch.setattr(module, "chip", lambda index: HOPPER)
    monkeypatch.setattr(persistent, "unavailable", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    return driver


def needed(kernel: str, batch: int) -> int:
    """By the tile that comes first."""
    return blocks_needed(ranked(Request(kernel, "lstm", "bf16", 1024, batch), HOPPER)[0])


def test_all_blocks_at_once_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = install(monkeypatch, 132)
    assert plan(SPEC).backend == "persistent"
    assert {tile.kernel for tile in driver.asked} == {"forward", "backward"}


@pytest.mark.parametrize("at_once", [0, 7])
def test_blocks_that_do_not_all_run_at_once_are_a_rejection(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """They would wait for those that do not run. Nothing was launched by then: nothing can be."""
    driver = install(monkeypatch, at_once)
    found = plan(SPEC)
    assert found.backend == "aten"
    (refused,) = [r for r in found.rejections if r.backend == "persistent"]
    assert f"{needed('forward', 4)} blocks have to run at the same time" in refused.reason
    assert f"this GPU runs {at_once} of them" in refused.reason
    assert "another process" in refused.reason
    assert str(refused) in found.explain()
    assert 1 < len(driver.asked) <= 4 * device.TRIES, "others are tried, but not all of them"


def test_a_backend_named_raises_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, 7)
    named = RnnSpec(
        *("lstm", 1024, 1024), dtype=torch.bfloat16, device="cuda", backend="persistent"
    )
    with pytest.raises(NoBackend, match="blocks have to run at the same time"):
        plan(named)


def test_one_block_less_than_all_is_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tile is passed over for one that needs fewer, or the request refused: whatever is
    taken, all its blocks run at once."""
    for at_once in range(needed("forward", 4) - 1, 0, -24):
        install(monkeypatch, at_once)
        found = device.geometry(Request("forward", "lstm", "bf16", 1024, 4), 0)
        assert found is None or blocks_needed(found) <= at_once


def test_what_no_tile_holds_is_said_to_be_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, 132)
    large = RnnSpec(*("lstm", 8, 6000), dtype=torch.bfloat16, device="cuda", batch=4)
    (refused,) = [r for r in plan(large).rejections if r.backend == "persistent"]
    assert "do not fit on the chip's 132 multiprocessors (forward pass)" in refused.reason


def test_the_explanation_has_the_models_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, 132)
    told = plan(SPEC).explain()
    for kernel in ("forward", "backward"):
        found = measured(Request(kernel, "lstm", "bf16", 1024, 4))
        assert found is not None
        for line in explain(found, 1024).splitlines():
            assert f"\n  {line}\n" in told
    assert told.count("us a step by the model: ") == 2
    assert told.count("fastest of those that were measured for this size") == 2
    assert "as precise" not in told
    single = RnnSpec(*("lstm", 256, 256), dtype=torch.float32, device="cuda", batch=1)
    told = "\n".join(by_name("persistent").details(single))
    assert told.count("for this size; ieee is as precise as tf32 at least") == 1
    unknown = RnnSpec(*("lstm", 520, 520), dtype=torch.bfloat16, device="cuda", batch=5)
    told = "\n".join(by_name("persistent").details(unknown))
    assert told.count("us a step by the model: ") == 1
    assert "measured" not in told
