"""Compile the kernels that cases will ask for, side by side, before the first is measured.

One after the other, each when its case comes, they took most of the time of `ecornn bench rnn`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ecornn.bench.cases import Case
from ecornn.kernels.jit import CompileError, Variant, compiled
from ecornn.kernels.persistent.choose import Chip, Request, ranked
from ecornn.kernels.persistent.device import chip, numbers_of, unavailable
from ecornn.kernels.persistent.launch import architecture


def build_ahead(cases: Iterable[Case], device: torch.device, console: Console) -> int:
    """How many there were; none where no kernel of ours can run. One that does not compile is its
    case's to tell."""
    if device.type != "cuda" or unavailable() is not None:
        return 0
    given: int | None = device.index
    index = torch.cuda.current_device() if given is None else given
    wanted = variants(cases, chip(index), architecture(index))
    columns = (MofNCompleteColumn(), BarColumn(), TimeElapsedColumn())
    with (
        Progress(*columns, TextColumn("kernels"), console=console) as progress,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        task = progress.add_task("", total=len(wanted))
        for done in as_completed([pool.submit(compiled, variant) for variant in wanted]):
            if not isinstance(done.exception(), CompileError):
                done.result()
            progress.advance(task)
    return len(wanted)


def variants(cases: Iterable[Case], on: Chip, arch: str) -> list[Variant]:
    """Each once, in the order of the cases: the first choice for each request."""
    found: dict[Variant, None] = {}
    for case in cases:
        for ask in requests(case):
            for geometry in ranked(ask, on)[:1]:
                found[geometry.tile.variant(arch)] = None
    return list(found)


def requests(case: Case) -> Iterator[Request]:
    numbers = numbers_of(case.torch_dtype)
    if numbers is None:
        return
    directions = 2 if case.bidirectional else 1
    # layers of a stack may run two at once, on half of the chip each
    shares = (1, 2) if case.layers > 1 and directions == 1 and not case.lengths else (1,)
    for kernel in ("forward", "backward"):
        for share in shares:
            sizes = (case.cell, numbers, case.hidden, case.batch, directions)
            yield Request(kernel, *sizes, features=case.lengths, share=share)
