"""How much memory of a GPU a step may take, and whether a plan takes more."""

from __future__ import annotations

import torch

from ecornn.echo.pipeline import Decision
from ecornn.echo.plan.budget import bytes_of_inputs

#: Of what a step may take on a GPU: what it holds beyond is taken not to fit. The rest is for
#: scratch memory, fragments, and an optimizer that has no state yet.
FULL = 0.9


def limit_by_gpu(decision: Decision, device: torch.device) -> int | None:
    """Bytes for both passes of a graph, its inputs included, if its plan needs more than the GPU
    has; None if it fits. Processes that work together make the same plan, whatever each has left:
    there is no limit for them."""
    if decision.passes is None or together():
        return None
    room = room_on(device)
    if room is None:
        return None
    limit = bytes_of_inputs(decision.passes) + int(FULL * room)
    return limit if decision.chosen.estimate.peak(decision.request.calls) > limit else None


def together() -> bool:
    distributed = torch.distributed
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def room_on(device: torch.device) -> int | None:
    """Bytes that this process may take beside those that it has; None where nobody limits them, or
    an allocator of the user's own does not say."""
    if device.type != "cuda":
        return None
    try:
        free, total = torch.cuda.mem_get_info(device)
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))
        most = min(allowed, free + torch.cuda.memory_reserved(device))
        return most - torch.cuda.memory_allocated(device)
    except RuntimeError:
        return None
