"""Whether memory counts more than time: a step of a model as it is written does not fit."""

from __future__ import annotations

import torch
from torch import nn

from ecornn.echo.graph import NotUnderstood
from ecornn.echo.model_call import ModelCall, asks_for_gradients
from ecornn.echo.options import Memory
from ecornn.echo.rehearse import rehearsal_of
from ecornn.echo.step_budget import limit_of
from ecornn.echo.twin import device_of

#: Of what a step may take on a GPU: what it holds beyond is taken not to fit. The rest is for
#: scratch memory, fragments, and an optimizer that has no state yet.
FULL = 0.9


def memory_counts(model: nn.Module, call: ModelCall | None, memory: Memory) -> bool:
    """Of a call like this one, with `memory` asked for. Not where nobody can tell."""
    if memory.kind == "min":
        return True
    room = room_on(device_of(model)) if memory.kind == "auto" else None
    unlimited = memory.kind == "auto" and room is None
    if call is None or unlimited or not asks_for_gradients(model, call.args, call.kwargs):
        return False
    try:
        with rehearsal_of(model, call, {}) as rehearsal:
            written = rehearsal.step(None)
    except NotUnderstood:
        return False
    if room is None:
        return written.held + written.most > limit_of(memory, written)
    return written.most > FULL * room


def room_on(device: torch.device) -> int | None:
    """Bytes that this process may take beside those that it has; None where nobody limits them."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))
    most = min(allowed, free + torch.cuda.memory_reserved(device))
    return most - torch.cuda.memory_allocated(device)
