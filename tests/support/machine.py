"""A GPU that is not there: layers run on the CPU by the contract of the persistent kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ecornn.backends import (
    pair_choice,
    pair_kernels,
    persistent,
    persistent_calls,
    persistent_gradients,
    persistent_pair,
    persistent_plain,
    persistent_products,
)
from ecornn.backends.protocol import LayerCall
from ecornn.kernels.persistent.choose import Request, as_precise, ranked
from ecornn.kernels.persistent.gradients import GradientTile
from ecornn.kernels.persistent.shares import ShareTile
from ecornn.kernels.persistent.tile import Geometry
from ecornn.kernels.persistent.transposed import TransposeTile
from ecornn.kernels.reference import DirectionWeights
from ecornn.ops.direct import PlainRoute, plain_route, run_plain_route
from ecornn.spec import GATES, weight_layout
from support.chips import HOPPER
from support.emulated import EmulatedLauncher

STEPS, BATCH, INPUT = 11, 4, 5
#: How blocks exchange; scaled is something narrower than the output.
REGIMES = ("cluster", "L2", "L2, scaled")


class LateFork:
    """Stands in for `Fork`: the stream beside the current one does nothing before it is waited for,
    as late as a GPU may."""

    def __init__(self, device: int | None) -> None:
        self.stream: list[Callable[[], None]] = []

    def side_waits(self) -> None: ...

    def main_waits(self) -> None:
        for launch in self.stream:
            launch()
        self.stream.clear()

    def close(self) -> None:
        self.main_waits()


class Machine:
    """Which requests fit, and what was launched."""

    def __init__(self) -> None:
        self.launchers: list[EmulatedLauncher] = []
        self.gradients: list[EmulatedLauncher] = []
        self.shares: list[EmulatedLauncher] = []
        self.transposed = EmulatedLauncher(Geometry(TransposeTile(), 1, 1, 1, 0))  # type: ignore[arg-type]
        self.most_batch, self.most_directions = 99, 2
        self.through_l2 = self.scaled = False

    def run_as(self, regime: str) -> None:
        """One of `REGIMES`."""
        self.through_l2, self.scaled = regime != "cluster", regime == "L2, scaled"

    def geometry(self, ask: Request, device: int | None) -> Any:
        if ask.batch > self.most_batch or ask.directions > self.most_directions:
            return None
        ask = replace(ask, numbers="tf32")
        if self.scaled and "scaled" in as_precise(ask):
            ask = replace(ask, numbers="scaled")
        found = ranked(ask, HOPPER)
        return next(g for g in found if g.tile.grid == self.through_l2)

    def launcher(self, geometry: Any, device: int | None) -> EmulatedLauncher:
        self.launchers.append(EmulatedLauncher(geometry))
        return self.launchers[-1]

    def gradient_launcher(self, cell: str, numbers: str, device: int | None) -> EmulatedLauncher:
        self.gradients.append(
            EmulatedLauncher(Geometry(GradientTile(cell, numbers, 8), 8, 1, 1, 0))
        )
        return self.gradients[-1]

    def share_launcher(self, numbers: str, device: int | None) -> EmulatedLauncher:
        self.shares.append(EmulatedLauncher(Geometry(ShareTile(numbers), 1, 1, 1, 0)))
        return self.shares[-1]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """In the place of the driver."""

        class NoFailure:
            address = 0

            def check(self) -> None: ...

        @contextmanager
        def prepared(call: LayerCall) -> Iterator[None]:
            with torch.autocast("cpu", enabled=False):  # as the true one does on a GPU
                yield

        monkeypatch.setattr(persistent_calls, "geometry", self.geometry)
        monkeypatch.setattr(persistent_calls, "launcher", self.launcher)
        monkeypatch.setattr(persistent_calls, "failure_flag", NoFailure)
        monkeypatch.setattr(persistent_calls, "_LAUNCHES", {})
        monkeypatch.setattr(persistent, "_prepared", prepared)
        monkeypatch.setattr(persistent_gradients, "gradient_launcher", self.gradient_launcher)
        monkeypatch.setattr(persistent_plain, "failure_flag", NoFailure)
        monkeypatch.setattr(persistent_plain, "share_launcher", self.share_launcher)
        monkeypatch.setattr(persistent_pair, "failure_flag", NoFailure)
        monkeypatch.setattr(persistent_pair, "Fork", LateFork)
        monkeypatch.setattr(pair_kernels, "share_launcher", self.share_launcher)
        monkeypatch.setattr(persistent_products, "transpose_launcher", lambda _: self.transposed)
        for name in ("geometry", "launcher"):
            monkeypatch.setattr(pair_choice, name, getattr(self, name))
        monkeypatch.setattr(pair_choice, "chip", lambda device: HOPPER)
        monkeypatch.setattr(pair_choice, "prepare_sides", lambda device: None)
        pair_choice._shared.cache_clear()


def transpose_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that gains by it, where nothing is too small."""
    monkeypatch.setattr(persistent_products, "LEAST_WORK", 0.0)
    monkeypatch.setattr(persistent_products, "MANY", 0)
    monkeypatch.setattr(persistent_products, "reads_along_the_inner", lambda device: True)
    monkeypatch.setattr(persistent_products, "products_precision", lambda: "tf32")


def make_call(
    cell: str,
    hidden: int = 24,
    *,
    directions: int = 1,
    steps: int = STEPS,
    batch: int = BATCH,
    inputs: int = INPUT,
    bias: bool = True,
    **more: Any,
) -> LayerCall:
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    rows = GATES[cell] * hidden
    weights = tuple(
        DirectionWeights(
            draw(rows, inputs),
            draw(rows, hidden, scale=hidden**-0.5),
            *((draw(rows), draw(rows)) if bias else ()),
        )
        for _ in range(directions)
    )
    state = (directions, batch, hidden)
    c0 = draw(*state) if cell == "lstm" else None
    x = draw(steps, batch, inputs)
    return LayerCall(cell, x, draw(*state), c0, weights, **{"keep": "states", **more})


def routed(call: LayerCall) -> tuple[PlainRoute, list[Tensor]]:
    """A call's short way, and its tensors as leaves of autograd."""
    tensors = [t for t in (call.input_TBI, call.h0_DBR, call.c0_DBH) if t is not None]
    leaves = [t.clone().requires_grad_() for t in (*tensors, *call.flat_weights())]
    bias = call.weights[0].b_ih is not None
    layout = weight_layout(call.cell, bias=bias, projection=False, layer_norm=False)
    x, h0, *rest = leaves
    c0 = rest.pop(0) if call.c0_DBH is not None else None
    constants = (call.cell, layout, "zero", "zeros", False, "persistent", call.keep)
    route = plain_route((x, h0, c0, rest, None, None, None, None, *constants))
    assert route is not None
    return route, leaves


def run_route(route: PlainRoute, leaves: list[Tensor]) -> list[Tensor]:
    x, h0, *rest = leaves
    c0 = rest.pop(0) if route.layer.lstm else None
    found = run_plain_route(route, x, h0, c0, rest, needs_grad=True)
    return [result for result in found if result is not None]
