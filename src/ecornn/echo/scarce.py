"""Whether memory counts more than time: a step of a model as it is written does not fit the GPU."""

from __future__ import annotations

from typing import Any

from torch import nn

from ecornn.echo.gpu_room import FULL, room_on, together
from ecornn.echo.graph import NotUnderstood
from ecornn.echo.model_call import ModelCall, asks_for_gradients
from ecornn.echo.options import Memory
from ecornn.echo.own_kernels import OwnKernels
from ecornn.echo.parts import called_often
from ecornn.echo.rehearse import rehearsal_of
from ecornn.echo.twin import device_of
from ecornn.errors import InvalidInput
from ecornn.ops.keeping import TracedAsOperators


def in_launches_if_scarce(
    own: OwnKernels,
    model: nn.Module,
    counts: dict[str, int],
    call: ModelCall | None,
    memory: Memory,
    args: Any,
    kwargs: Any,
) -> OwnKernels | None:
    """All recurrent layers on our kernels, in as many launches as it takes, where memory counts
    more than time and nothing would divide the model then: around parts a layer is asked at every
    call. None elsewhere."""
    found = own.slower_ones_served(counts)
    if found is None or called_often(model, counts):
        return None
    layers = {path: part for path, part in model.named_modules() if isinstance(part, nn.RNNBase)}
    traced = (path for path, part in layers.items() if isinstance(part, TracedAsOperators))
    if layers.keys() - found.refused.keys() - set(traced):
        return None
    return found if memory_counts(model, call, memory, args, kwargs) else None


def memory_counts(
    model: nn.Module, call: ModelCall | None, memory: Memory, args: Any, kwargs: Any
) -> bool:
    """Of a call like this one, with `memory` asked for. Not where nobody can tell, nor of processes
    that work together, which have different amounts left and one plan. A budget is promised of the
    model with torch's layers, which can be run again: it is no question of launches."""
    if memory.kind != "auto":
        return memory.kind == "min"
    devices = {weight.device for weight in model.parameters()}
    room = room_on(device_of(model)) if len(devices) == 1 and not together() else None
    if call is None or room is None or not asks_for_gradients(model, args, kwargs):
        return False
    try:
        with rehearsal_of(model, call, {}) as rehearsal:
            return rehearsal.step(None).most > FULL * room
    except (InvalidInput, NotUnderstood):
        return False
