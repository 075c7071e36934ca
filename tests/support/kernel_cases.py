"""Layers of all kinds for the persistent kernels to run on a CPU (`support/on_cpu`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from ecornn.backends import persistent_calls, persistent_gradients
from ecornn.backends.protocol import (
    BackwardRequest,
    CallGrads,
    LayerCall,
    LayerResult,
    ResultGrads,
)
from ecornn.backends.registry import by_name
from ecornn.kernels.persistent.choose import Request, as_precise, candidates
from ecornn.kernels.persistent.tile import Geometry
from support.machine import HOPPER, make_call

BF16, FP32 = torch.bfloat16, torch.float32
#: Relative error of a product's factor, ten bits after the first; two of them make a product.
TF32_ERROR = 2**-11
STEPS = 5
#: More would have the machine do little but change between them.
MOST_THREADS = 1100


class Case(NamedTuple):
    cell: str
    dtype: torch.dtype
    hidden: int
    batch: int
    regime: str = "L2"  # or "L2 and clusters", "cluster", "one block"
    directions: int = 1
    features: bool = False
    pieces: bool = False
    #: How float32 is multiplied: three products are exact enough to be compared closely. "scaled"
    #: serves requests for TF32 forwards.
    numbers: str = "tf32x3"
    #: How many vectors are loaded together, if not as few as there is a tile for.
    at_once: int = 0
    #: Of partial sums; one where shared memory is short.
    buffers: int = 2
    #: Sequences of a tile; fewer than 8 are repeated.
    width: int = 8
    #: As in `Tile`.
    polling: str = "first"
    rounded: bool = True
    #: Of a warp's tiles, counted chunk by chunk, in registers; all that fit if None.
    in_registers: int | None = None
    #: As in `Tile`; its own if 0.
    marks_ahead: int = 0
    #: Whether weights pass through shared memory: two fifths of a warp's tiles at once, so that the
    #: last ones are fewer.
    staged: bool = False

    def __str__(self) -> str:
        named = ("features", "pieces")
        more = [name for name in named if getattr(self, name)]
        more += [self.numbers] if self.numbers != "tf32x3" else []
        more += [f"{self.at_once} at once"] if self.at_once else []
        more += [f"{self.width} repeated"] if self.width < 8 else []
        more += [self.polling] if self.polling != "first" else []
        more += [] if self.rounded else ["rounded by readers"]
        more += [] if self.in_registers is None else [f"{self.in_registers} in registers"]
        more += [f"{self.marks_ahead} ahead"] if self.marks_ahead else []
        more += ["staged"] if self.staged else []
        size = f"{self.hidden}x{self.batch}x{self.directions}"
        dtype = str(self.dtype).removeprefix("torch.")
        return "-".join([self.cell, dtype, size, self.regime, *more])

    def fits(self, geometry: Geometry) -> bool:
        tile = geometry.tile
        regime = (
            ("L2" if tile.cluster == 1 else "L2 and clusters")
            if tile.grid
            else ("one block" if tile.cluster == 1 else "cluster")
        )
        return (
            regime == self.regime
            and tile.width == self.width
            and geometry.all_blocks * tile.threads <= MOST_THREADS
        )

    def geometry(self, ask: Request, _device: Any) -> Geometry | None:
        """One that waits for several loads in turn, where there is one; of those, one that
        multiplies the most sequences abreast."""
        if self.numbers in as_precise(ask):
            ask = replace(ask, numbers=self.numbers)
        found = [g for g in candidates(ask, HOPPER) if self.fits(g)]
        found = [g for g in found if self.at_once in (0, g.tile.at_once)]
        waits = [g for g in found if g.tile.chunks * g.tile.batch_tiles > g.tile.at_once] or found
        abreast = max((g.tile.abreast for g in waits), default=1)
        widest = [g for g in waits if g.tile.abreast == abreast]
        least = min(widest, key=lambda g: g.all_blocks * g.tile.threads, default=None)
        if least is None:
            return None
        tile = replace(
            least.tile,
            partial_buffers=self.buffers,
            polling=self.polling,
            rounded=self.rounded,
            marks_ahead=self.marks_ahead or least.tile.marks_ahead,
        )
        if self.in_registers is not None:
            assert self.in_registers < tile.row_tiles * tile.chunks, tile
            rows, chunks = divmod(self.in_registers, tile.chunks)
            tile = replace(tile, register_tiles=rows, register_chunks=chunks)
        if self.staged:
            slots = -(-tile.in_registers * 2 // 5)
            assert slots < tile.in_registers, tile
            tile = replace(tile, staged_bytes=slots * tile.slot_bytes)
        return replace(least, tile=tile)

    def call(self) -> LayerCall:
        generator = torch.Generator().manual_seed(3)
        more: dict[str, Any] = {}
        if self.features:
            more["lengths_B"] = torch.randint(0, STEPS + 1, (self.batch,), generator=generator)
            more["resets_TB"] = torch.rand(STEPS, self.batch, generator=generator) < 0.3
            more["reset_to"] = "initial" if self.batch % 2 else "zero"
        sizes = {"directions": self.directions, "steps": STEPS, "batch": self.batch}
        return converted(make_call(self.cell, self.hidden, **sizes, **more), self.dtype)


def converted(call: LayerCall, dtype: torch.dtype) -> LayerCall:
    c0 = None if call.c0_DBH is None else call.c0_DBH.to(dtype)
    return replace(
        call,
        input_TBI=call.input_TBI.to(dtype),
        h0_DBR=call.h0_DBR.to(dtype),
        c0_DBH=c0,
        weights=tuple(w.to(dtype) for w in call.weights),
    )


def run(name: str, call: LayerCall, grads: ResultGrads) -> tuple[LayerResult, CallGrads]:
    result = by_name(name).forward(call)
    return result, by_name(name).backward(call, result, grads, BackwardRequest())


def multiplied_as(monkeypatch: pytest.MonkeyPatch, wide: str) -> None:
    wide = "tf32" if wide == "scaled" else wide
    for module in (persistent_calls, persistent_gradients):
        numbers = lambda dtype: wide if dtype == FP32 else "bf16"  # noqa: E731
        monkeypatch.setattr(module, "numbers_of", numbers)
