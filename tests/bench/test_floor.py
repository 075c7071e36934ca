"""How the exchange floor is measured, with a made-up one: the real one needs a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ecornn.bench import floor, runners
from ecornn.bench.cases import Case
from ecornn.bench.contenders import EXCHANGE_FLOOR, PLAIN
from ecornn.bench.timing import Effort

CPU = torch.device("cpu")
CASE = Case("lstm", 6, 2, 4)
TINY = Effort(1e-5, rounds=2, fewest_rounds=2, budget_s=0.01, warm_up_s=0.0, checks=2)
MODULE = "ecornn.kernels.persistent.floor"


class ImaginaryFloor:
    asked: tuple[Any, ...] = ()
    launches = 0
    description = "2 blocks that only talk"

    def __init__(self, *arguments: Any) -> None:
        type(self).asked = arguments

    def run(self) -> None:
        type(self).launches += 1


class RefusingFloor:
    def __init__(self, *_: Any) -> None:
        raise ValueError("no persistent kernel holds 6 units\nand a second line")


def pretend(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    """Let the kernels' module hold `kind`, and a graph call what it captured."""

    def capture(function: Callable[[], None]) -> tuple[Any, None]:
        return SimpleNamespace(replay=function), None

    module = ModuleType(MODULE)
    module.Floor = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setattr(floor, "capture", capture)


def run() -> dict[str, dict[str, Any]]:
    rows = runners.run_case(CASE, (*PLAIN, EXCHANGE_FLOOR), CPU, TINY, torch.Generator())
    return {row.contender: dict(row.metrics) for row in rows}


def test_the_floor_has_a_forward_time_and_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, ImaginaryFloor)
    found = run()
    assert ImaginaryFloor.asked == ("lstm", torch.float32, 6, 2, 4, CPU)
    assert ImaginaryFloor.launches > 0
    mine = found["exchange floor+graph"]
    assert set(mine) == {"plan", "forward_us", "forward_us_spread"}
    assert mine["plan"] == ImaginaryFloor.description
    assert mine["forward_us"] > 0
    assert {"error", "forward_us", "train_us"} <= set(found["ecornn"])


def test_a_floor_that_refuses_says_why_and_disturbs_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, RefusingFloor)
    found = run()
    reason = "ValueError: no persistent kernel holds 6 units"
    assert found["exchange floor+graph"] == {"not_measured": reason}
    assert "train_us" in found["torch.nn"]


def test_measuring_without_the_floor_does_not_import_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, None)
    rows = runners.run_case(CASE, PLAIN, CPU, TINY, torch.Generator())
    assert all("train_us" in row.metrics for row in rows)
