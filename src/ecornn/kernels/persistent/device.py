"""What the GPU at hand offers, and the geometry that serves a request on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ecornn.errors import KernelGaveUp
from ecornn.kernels.jit import compiled, compiler_unavailable
from ecornn.kernels.persistent.choose import Chip, Request, blocks_needed, ranked
from ecornn.kernels.persistent.gradients import MOST_UNITS, gradient_launcher
from ecornn.kernels.persistent.launch import architecture, kernel, make_context_current
from ecornn.kernels.persistent.shares import share_launcher
from ecornn.kernels.persistent.tile import Geometry
from ecornn.kernels.persistent.transposed import transpose_launcher

#: Tensor cores for bfloat16 and TF32 begin here.
OLDEST = (8, 0)
#: How many of the ranked geometries are compiled before a request is given up.
TRIES = 8
#: Clusters of each size that run at once with one block on a multiprocessor, measured on an H200;
#: the driver is asked again for the kernel that is chosen.
_HOPPER_CLUSTERS = ((2, 66), (4, 30), (8, 15), (16, 7))


@cache
def unavailable() -> str | None:
    """Why no persistent kernel can run on this machine; None if it can."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if torch.version.hip is not None:
        return "its kernels are CUDA sources, and this is a ROCm build of torch"
    if (missing := compiler_unavailable()) is not None:
        return missing
    return None


def too_old() -> str | None:
    if torch.cuda.get_device_capability() < OLDEST:
        return "the GPU is older than compute capability 8.0"
    return None


@cache
def chip(device: int) -> Chip:
    properties = torch.cuda.get_device_properties(device)
    shared = int(getattr(properties, "shared_memory_per_block_optin", 99 * 1024))
    count = properties.multi_processor_count
    clusters = _HOPPER_CLUSTERS if properties.major == 9 else ()
    scaled = tuple((size, n * count // 132) for size, n in clusters)
    return Chip(count, shared, tuple((size, n) for size, n in scaled if n > 0))


#: What was found before, and with it that its kernel is loaded.
_FOUND: dict[tuple[Request, int], Geometry | None] = {}


def geometry(ask: Request, device: int) -> Geometry | None:
    """The best geometry whose blocks the device can run at once, its kernel loaded; None where
    there is none."""
    key = (ask, device)
    if key not in _FOUND:
        _FOUND[key] = _find_geometry(ask, device)
    return _FOUND[key]


def build_side_by_side(asks: Sequence[Request], device: int) -> None:
    """Compile what each of several requests will most likely take, at the same time: on two cores
    the two passes of an LSTM of 512 units in TF32 took 2.6 s instead of 3.9. What does not compile
    is told of when it is asked for."""
    new = [ask for ask in asks if not is_loaded(ask, device)]
    arch = architecture(device)
    first = (ranked(ask, chip(device))[:1] for ask in new)
    variants = {found.tile.variant(arch) for one in first for found in one}
    if len(variants) < 2:  # left to whoever asks for it
        return
    with ThreadPoolExecutor(len(variants)) as pool:
        for variant in variants:
            pool.submit(compiled, variant)


def is_loaded(ask: Request, device: int) -> bool:
    """Whether a launch needs nothing more that a capturing stream would not allow."""
    return (ask, device) in _FOUND


def _find_geometry(ask: Request, device: int) -> Geometry | None:
    failure_flag()  # pinned memory, which cannot be had while a stream is captured
    with torch.cuda.device(device):
        make_context_current(device)
        for found in ranked(ask, chip(device))[:TRIES]:
            needed = ask.share * blocks_needed(found, ask.share)
            if kernel(found.tile, architecture(device)).blocks_at_once() >= needed:
                # what goes with it, so that a capture finds it loaded
                if ask.kernel == "backward":
                    if ask.hidden <= MOST_UNITS:
                        gradient_launcher(ask.cell, ask.numbers, device)
                    if ask.numbers == "tf32":
                        transpose_launcher(device)
                else:
                    share_launcher(ask.numbers, device)
                return found
    return None


def too_few_at_once(ask: Request, device: int) -> str | None:
    """Of a request that has no geometry: that its blocks wait for each other, and the driver does
    not run all of them at once; None where no tile holds the weights at all."""
    found = next(iter(ranked(ask, chip(device))), None)
    if found is None:
        return None
    needed = ask.share * blocks_needed(found, ask.share)
    with torch.cuda.device(device):
        make_context_current(device)
        at_once = kernel(found.tile, architecture(device)).blocks_at_once()
    return (
        f"{needed} blocks have to run at the same time, since they wait for each other, and this "
        f"GPU runs {at_once} of them: part of it belongs to another process or partition, or it "
        "is too small"
    )


def numbers_of(dtype: torch.dtype) -> str | None:
    """How a dtype is multiplied; None if it is not. float32 follows torch's setting for RNNs."""
    if dtype == torch.float32:
        rnn: Any = torch.backends.cudnn.rnn
        return _FLOAT32.get(rnn.fp32_precision, "ieee")
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype)


#: By that setting. "none" is what the older `torch.backends.cudnn.allow_tf32 = False` makes of it:
#: who does not want TF32 is as well served by three products of it.
_FLOAT32 = {"tf32": "tf32", "none": "tf32x3", "ieee": "ieee"}


class FailureFlag:
    """One integer in pinned memory that kernels set when they give up; read without waiting."""

    def __init__(self) -> None:
        with seen_by_nobody():
            # torch's default device may be a GPU, whose memory cannot be pinned
            self.tensor = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
            self.value = self.tensor.numpy()
        self.address = self.tensor.data_ptr()

    def check(self) -> None:
        if self.value[0]:
            self.value[0] = 0
            raise KernelGaveUp(
                "an earlier recurrent layer's kernel gave up waiting for one of its blocks, and "
                "its results are wrong: the GPU is shared with another process, or was preempted "
                "for seconds; run again, or make the layers with backend='aten'"
            )


@contextmanager
def seen_by_nobody() -> Iterator[None]:
    """For what outlives a call that may be the first and run on tensors without numbers: made
    under such a mode, it would be one of them."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


@cache
def failure_flag() -> FailureFlag:
    return FailureFlag()
