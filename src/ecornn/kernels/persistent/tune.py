"""Measure tiles on the GPU at hand and write down the fastest: where `tuned.json` comes from."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import cached_property
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ecornn.kernels.jit import compiled
from ecornn.kernels.jit.resources import resources
from ecornn.kernels.persistent.arguments import BackwardArguments, ForwardArguments
from ecornn.kernels.persistent.choose import (
    MARKS_AHEAD,
    STAGED_BYTES,
    Request,
    as_precise,
    known_requests,
    measured,
    ranked,
    serves,
)
from ecornn.kernels.persistent.device import chip, failure_flag
from ecornn.kernels.persistent.launch import architecture, kernel, launcher
from ecornn.kernels.persistent.shares import (
    ShareArguments,
    is_small_product,
    share_blocks,
    share_launcher,
)
from ecornn.kernels.persistent.tile import POLLING, Geometry, Tile
from ecornn.spec import GATES

STEPS = 256
ROUNDS = 5
CALLS = 4  # of one round
#: A frame that a tile may have and still be measured. Of a kernel that spills for want of registers
#: it is hundreds of bytes, in and out of its products. What was found in frames as small as this is
#: what does not change from step to step, biases above all: a dozen loads before a product of a
#: thousand instructions, beside which a tile that has more vectors under way may yet be the faster.
SMALL_FRAME = 64
#: Sequences of a group with which the ordinary units take no longer than tensor cores: these
#: multiply 1,024 numbers in two cycles of a multiprocessor, for eight columns, those 128 in one.
MOST_COLUMNS = 2
#: Of tiles with other numbers, so many are measured.
OTHERS = 4
#: Changes of a tile, one after the other: the second is looked for beside the first.
CHANGES = 2
#: A change is made where a step takes so much less: medians of one tile differ by up to half of it.
LEAST_GAIN = 0.01
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def finalists(ask: Request, device: int, count: int) -> list[Geometry]:
    """The model's best that hardly spill, and what was measured the best before, each with every
    way to wait that it has: the model knows of none. And those of numbers that may serve."""
    best = islice(_hardly_spilling(ranked(ask, chip(device)), architecture(device)), count)
    return [way for geometry in best for way in waiting_ways(geometry)] + others(ask, device)


def others(ask: Request, device: int) -> list[Geometry]:
    """Tiles of other numbers that may serve the request, and may be the quicker ones."""
    found: list[Geometry] = []
    for numbers in as_precise(ask):
        every = ranked(replace(ask, numbers=numbers), chip(device))
        most = MOST_COLUMNS if numbers == "ieee" else ask.batch
        few: Iterable[Geometry] = (g for g in every if g.group_batch <= most)
        if numbers == "scaled":
            few = chain(_as_in_half(ask, device), few)
        found += islice(_hardly_spilling(few, architecture(device)), OTHERS)
    return [way for geometry in dict.fromkeys(found) for way in waiting_ways(geometry)]


def _as_in_half(ask: Request, device: int) -> list[Geometry]:
    """What was measured the fastest in half precision, which multiplies and exchanges the same."""
    half = measured(replace(ask, numbers="bf16"))
    if half is None:
        return []
    found = replace(half, tile=replace(half.tile, numbers="scaled", staged_bytes=0))
    return [found] if serves(found, ask, chip(device)) else []


def _hardly_spilling(tried: Iterable[Geometry], arch: str) -> Iterator[Geometry]:
    return (geometry for geometry in tried if _frame(geometry.tile, arch) <= SMALL_FRAME)


def waiting_ways(geometry: Geometry) -> list[Geometry]:
    """The same with each way to wait for values that come through L2; itself first."""
    tile = geometry.tile
    ways = dict.fromkeys((tile.polling, *POLLING)) if tile.grid else (tile.polling,)
    return [replace(geometry, tile=replace(tile, polling=way)) for way in ways]


def register_ways(geometry: Geometry, arch: str) -> list[Geometry]:
    """The same with more of its weights in registers: as many as leave no frame, and as many as
    leave a small one, with lengths and resets too. What is in shared memory is read from there at
    every step, 128 bytes in a cycle; the model counts registers by rows of tiles, and is too
    careful by some."""
    tile = geometry.tile
    found: dict[bool, Geometry] = {}
    for count in range(tile.in_registers + 1, tile.row_tiles * tile.chunks + 1):
        rows, chunks = divmod(count, tile.chunks)
        more = replace(tile, register_tiles=rows, register_chunks=chunks)
        frame = max(_frame(replace(more, features=features), arch) for features in (False, True))
        if frame > SMALL_FRAME:
            break
        found[frame > 0] = replace(geometry, tile=more)
    return list(found.values())


def _frame(tile: Tile, arch: str) -> int:
    return resources(compiled(tile.variant(arch))).frame_bytes


def marks_ways(geometry: Geometry) -> list[Geometry]:
    """The same with other ways to ask for marks ahead."""
    tile = geometry.tile
    ways = MARKS_AHEAD[tile.kernel] if tile.grid else ()
    return [
        replace(geometry, tile=replace(tile, marks_ahead=way))
        for way in ways
        if way != tile.marks_ahead
    ]


def staging_ways(geometry: Geometry) -> list[Geometry]:
    """The same with weights that pass through shared memory, or not."""
    tile = geometry.tile
    return [
        replace(geometry, tile=replace(tile, staged_bytes=way))
        for way in STAGED_BYTES
        if way != tile.staged_bytes and tile.numbers != "scaled"  # converted on their way
    ]


def near(geometry: Geometry, arch: str) -> list[Geometry]:
    """The same with one change: more of its weights in registers, marks that are asked for ahead
    or not, another way to load weights."""
    changed = [*marks_ways(geometry), *staging_ways(geometry)]
    return [*register_ways(geometry, arch), *_hardly_spilling(changed, arch)]


class _Problem:
    """Random tensors of a request's sizes; only the time matters here."""

    def __init__(self, ask: Request, device: int) -> None:
        self.ask = ask
        self.dtype = _DTYPES.get(ask.numbers, torch.float32)
        self.device = torch.device("cuda", device)
        rows = GATES[ask.cell] * ask.hidden
        d, b, h = ask.directions, ask.batch, ask.hidden
        stored = (4 if ask.cell in ("lstm", "gru") else 1) * h
        self.weights = [self._draw(rows * h, scale=h**-0.5) for _ in range(d)]
        self.gates = [self._draw(STEPS, b, max(rows, stored)) for _ in range(d)]
        self.output, self.cells = self._draw(STEPS, b, d * h), self._draw(STEPS, b, d * h)
        self.d_output = self._draw(STEPS, b, d * h)
        self.states = [self._draw(d, b, h, scale=0.3) for _ in range(4)]
        self.carried = [torch.zeros(d, b, h, device=self.device) for _ in range(2)]
        self.d_gates = [self._draw(STEPS, b, stored) for _ in range(d)]
        self.exchanged = self.d_gates if ask.kernel == "backward" else [self.output]
        #: For tiles that exchange something narrower than the output.
        self.narrow = [torch.empty(STEPS, b, h, dtype=torch.float16, device=self.device)]
        self.narrow += [torch.empty_like(self.narrow[0]) for _ in range(d - 1)]
        self.rows, self.gate_rows = STEPS * b, rows
        self.input, self.input_weights = self._draw(STEPS * b, h), self._draw(rows, h, scale=0.01)
        #: Whether the input's product is a kernel of ours, which one block's may begin beside: in
        #: layers of one direction alone.
        small = is_small_product(self.dtype.itemsize, self.rows, rows, h)
        self.small = small and ask.kernel == "forward" and d == 1

    def _draw(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=self.device) * scale).to(self.dtype)

    def mark(self, tile: Tile) -> None:
        for tensor in self.narrow if _is_narrow(tile) else self.exchanged:
            tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16).fill_(-1)

    def multiply_input(self) -> None:
        """What comes before a forward launch: it leaves gates in L2, as far as that has room."""
        sizes = (self.rows, self.gate_rows)
        for gates in self.gates:
            if self.small:
                places = (t.data_ptr() for t in (self.input, self.input_weights, gates))
                shares = ShareArguments(*places, *sizes, self.ask.hidden, by_vectors=1)
                launch = share_launcher(self.ask.numbers, self.device.index)
                launch(shares, share_blocks(*sizes))
            else:
                found = gates.view(-1)[: self.rows * self.gate_rows].view(sizes)
                torch.mm(self.input, self.input_weights.t(), out=found)

    @cached_property
    def product_microseconds(self) -> float:
        return _microseconds(self.multiply_input)

    def arguments(self, geometry: Geometry) -> ForwardArguments | BackwardArguments:
        ask = self.ask
        backward = ask.kernel == "backward"
        a: Any = BackwardArguments() if backward else ForwardArguments()
        row = ask.directions * ask.hidden
        for d in range(ask.directions):
            a.gates[d], a.weights[d] = self.gates[d].data_ptr(), self.weights[d].data_ptr()
            offset = d * ask.hidden * self.output.element_size()
            a.output[d], a.cells[d] = (t.data_ptr() + offset for t in (self.output, self.cells))
            a.exchange[d] = a.output[d]
            if _is_narrow(geometry.tile):
                a.exchange[d], row = self.narrow[d].data_ptr(), ask.hidden
            if not backward and ask.cell == "lstm":  # as in training
                a.kept[d] = a.gates[d]
            if backward:
                a.d_output[d] = self.d_output.data_ptr() + offset
                a.d_gates[d] = a.exchange[d] = self.d_gates[d].data_ptr()
        h0, c0, first, second = (t.data_ptr() for t in self.states)
        a.h0, a.c0 = h0, c0
        if backward:
            a.d_h_out, a.d_c_out = (t.data_ptr() for t in self.carried)
        else:
            a.h_in, a.h_out, a.c_n = h0, first, second
        a.failed = failure_flag().address
        a.steps = a.total = STEPS
        a.batch = a.end_sequence = ask.batch
        a.hidden, a.group_batch = ask.hidden, geometry.group_batch
        a.output_row = ask.directions * ask.hidden
        a.exchange_row = self.d_gates[0].shape[-1] if backward else row
        return a  # type: ignore[no-any-return]


def _is_narrow(tile: Tile) -> bool:
    return tile.exchanged_bytes < tile.element_bytes


def measure(problem: _Problem, geometry: Geometry, device: int) -> float | None:
    """Microseconds a step, marks included, after the input's product; None where the blocks cannot
    run at once. A small product's kernel is timed too, since ours may begin beside it, and what it
    takes by itself subtracted: that is measured once, so that it moves no tile past another."""
    tile = geometry.tile
    needed = geometry.all_blocks if tile.grid else tile.cluster
    if kernel(tile, architecture(device)).blocks_at_once() < needed:
        return None
    launch, arguments = launcher(geometry, device), problem.arguments(geometry)
    early = problem.small and tile.cluster == 1 and not tile.grid  # as in a layer

    def timed() -> None:
        if problem.small:
            problem.multiply_input()
        if tile.grid:
            problem.mark(tile)
        launch(arguments, early=early)

    def ahead() -> None:
        if tile.kernel == "forward" and not problem.small:
            problem.multiply_input()

    found = _microseconds(timed, ahead) - (problem.product_microseconds if problem.small else 0.0)
    failure_flag().check()
    return found / STEPS


def _microseconds(call: Callable[[], None], ahead: Callable[[], None] = lambda: None) -> float:
    """The median of some calls, each after what is not timed."""
    ahead()
    call()
    pairs = []
    for _ in range(ROUNDS):
        torch.cuda._sleep(2_000_000)  # a millisecond, so that the host is ahead of the device
        for _ in range(CALLS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            ahead()
            start.record()
            call()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
    return float(statistics.median(start.elapsed_time(end) * 1e3 for start, end in pairs))


def tune(asks: Sequence[Request], device: int, count: int) -> list[dict[str, Any]]:
    """One entry of `tuned.json` for each request that something fits."""
    entries, arch = [], architecture(device)
    for ask in asks:
        if ask.hidden % 8 != 0:
            raise ValueError(f"tiles are measured for multiples of 8 units, not {ask.hidden}")
        problem = _Problem(ask, device)
        best = _fastest(problem, finalists(ask, device, count), device)
        if best is None:
            continue
        for _ in range(CHANGES):
            before = best.geometry
            _, best = _quicker(problem, before, near(before, arch), device)
            if best is None or best.geometry == before:
                break
        if best is not None:
            entries.append(entry(ask, *best))
    return entries


class _Timed(NamedTuple):
    geometry: Geometry
    microseconds: float  # a step


def _fastest(problem: _Problem, tried: Iterable[Geometry], device: int) -> _Timed | None:
    found = ((geometry, measure(problem, geometry, device)) for geometry in tried)
    timed = (_Timed(geometry, us) for geometry, us in found if us is not None)
    return min(timed, key=lambda one: one.microseconds, default=None)


def _quicker(
    problem: _Problem, present: Geometry, others: Iterable[Geometry], device: int
) -> tuple[float | None, _Timed | None]:
    """What a tile takes; and the fastest of it and others, itself where these gain hardly any."""
    took, best = measure(problem, present, device), _fastest(problem, others, device)
    if took is not None and (best is None or best.microseconds > took * (1 - LEAST_GAIN)):
        best = _Timed(present, took)
    return took, best


class Again(NamedTuple):
    """What became of a request of the tables."""

    entry: dict[str, Any]
    before: float  # what its own tile took, measured in the same run
    left: int  # requests that are measured after this one, as far as is known


def tuned_again(device: int, numbers: str = "") -> Iterator[Again]:
    """Each request of the tables, or those in some numbers, measured anew, beside tiles near its
    own and of other numbers; those that another tile serves better once more, beside tiles near
    that."""
    arch, here = architecture(device), chip(device)
    known = ((ask, measured(ask)) for ask in known_requests(numbers))
    own = {ask: found for ask, found in known if found is not None and serves(found, ask, here)}
    before: dict[Request, float] = {}
    present = own
    for change in range(CHANGES):
        tried = _compiled_near(present, arch, device if change == 0 else None)
        changed: dict[Request, Geometry] = {}
        for at, (ask, others) in enumerate(tried.items()):
            took, best = _quicker(_Problem(ask, device), present[ask], others, device)
            if took is not None:
                before.setdefault(ask, took)
            if best is None or ask not in before:
                continue
            if best.geometry != present[ask]:
                changed[ask] = best.geometry
            yield Again(entry(ask, *best), before[ask], len(tried) - at - 1)
        present = changed


def _compiled_near(
    geometries: dict[Request, Geometry], arch: str, others_on: int | None
) -> dict[Request, list[Geometry]]:
    """Each with those near it, and those of other numbers where a device is named for them. All are
    compiled, side by side."""

    def near_one(ask: Request, geometry: Geometry) -> list[Geometry]:
        more = [] if others_on is None else others(ask, others_on)
        return [*near(geometry, arch), *more]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        tried = list(pool.map(near_one, geometries, geometries.values()))
        for geometry in {*geometries.values(), *(g for one in tried for g in one)}:
            pool.submit(compiled, geometry.tile.variant(arch))
    return dict(zip(geometries, tried, strict=True))


def entry(ask: Request, geometry: Geometry, microseconds: float) -> dict[str, Any]:
    request = asdict(ask)
    for name in ("features", "share"):  # cost nothing that a tile depends on, and is always one
        del request[name]
    tile = asdict(geometry.tile)
    # those of the request, and what changes the result
    for name in ("kernel", "cell", "features", "ragged", "rounded"):
        del tile[name]
    if tile["numbers"] == ask.numbers:
        del tile["numbers"]
    return {
        "request": request,
        "tile": tile,
        "blocks": geometry.blocks,
        "groups": geometry.groups,
        "group_batch": geometry.group_batch,
        "microseconds": round(microseconds, 3),
    }
