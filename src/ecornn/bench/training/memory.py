"""The most memory that a step holds at any time.

On CUDA what PyTorch's allocator has handed out: weights, gradients, optimizer state, batch and
everything the step makes, cuBLAS's workspace among it. On the CPU the same things, from the
allocations that torch's profiler sees.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from ecornn.bench.models.step import Step

GIB = 2**30


def peak_bytes(step: Step) -> int:
    """Of one step of a model that has been warmed up."""
    step.clear()
    collect(step.device)
    if step.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    return held_bytes(step) + allocated_peak(step)


def collect(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def held_bytes(step: Step) -> int:
    """Weights, gradients, buffers, optimizer state and batch, each storage once."""
    weights = list(step.model.parameters())
    gradients = [w.grad for w in weights if w.grad is not None]
    held = [*weights, *gradients, *step.model.buffers(), *step.batch]
    return storage_bytes(held) + optimizer_bytes(step)


def bytes_now(step: Step) -> int:
    """What is held between steps; on CUDA with everything else that is there."""
    collect(step.device)
    return torch.cuda.memory_allocated() if step.device.type == "cuda" else held_bytes(step)


def optimizer_scratch(step: Step) -> int:
    """What Adam's step makes beside its state: on CUDA the roots of all its second moments at once,
    elsewhere those of one weight at a time, and then divided. SGD works in place."""
    if not isinstance(step.optimizer, torch.optim.Adam):
        return 0
    weights = list(step.model.parameters())
    if step.device.type == "cuda":
        return storage_bytes(weights)
    return 2 * max(storage_bytes([weight]) for weight in weights)


def fixed_bytes(step: Step) -> int:
    """What a step holds beside its batch, whatever that is, once its optimizer has its state: each
    weight with its gradient and its moments, two of Adam's and one of SGD's, and the buffers."""
    moments = 2 if isinstance(step.optimizer, torch.optim.Adam) else 1
    weights = sum(weight.nbytes for weight in step.model.parameters())
    return (2 + moments) * weights + sum(buffer.nbytes for buffer in step.model.buffers())


def optimizer_bytes(step: Step) -> int:
    state = tree_leaves(step.optimizer.state_dict()["state"])
    device = step.device.type
    return storage_bytes(t for t in state if isinstance(t, Tensor) and t.device.type == device)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def allocated_peak(function: Callable[[], object]) -> int:
    """The most that `function` has allocated at once on the CPU and not yet freed; what it frees
    that was there before is not seen."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        function()
    profiler = recorded.profiler
    events = [] if profiler is None else profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def taken_by_others(limit: int, device: torch.device) -> bool:
    """Whether the GPU has less left than this process may still take of `limit` bytes: what was
    refused then was refused for other processes' sake. On the CPU nothing is."""
    if device.type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) < limit


@contextmanager
def limited_to(gib: float, device: torch.device) -> Iterator[None]:
    """The allocator refuses to go beyond `gib` on CUDA, as on a smaller GPU; what the context
    itself takes is not in it. On the CPU nothing is refused."""
    if device.type != "cuda":
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * GIB / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
