"""`WithoutNumbers`: tensors without numbers, also for some operators of which torch itself cannot
tell what they make then: the loss of speech models, and recurrent layers of cuDNN and oneDNN."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, _meta_registrations
from torch._subclasses import FakeTensorMode

from ecornn.echo import ctc
from ecornn.echo.cudnn import in_one_memory, room_of_cudnn
from ecornn.echo.onednn import workspace_bytes
from ecornn.ops.scratch import scratch_bytes

aten = torch.ops.aten

#: Of an operator's arguments: what it makes, and the bytes that it takes and gives back meanwhile.
Fake = Callable[..., tuple[Any, int]]
NOTHING: Mapping[Any, Fake] = {}


class WithoutNumbers(FakeTensorMode):
    """An operator may run others; `made` is told of what the outermost ones make, and of the bytes
    that they take and give back on the way, as far as those are known."""

    def __init__(self, also: Mapping[Any, Fake] = NOTHING) -> None:
        """`also`: by operator, what it makes, and the bytes that it takes for a while."""
        super().__init__(allow_non_fake_inputs=True)
        self._depth = 0
        self._ours = {**CTC, **ONEDNN, **also}

    def made(self, func: Any, args: Any, kwargs: Any, result: Any, scratch: int) -> None:
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        scratch, ours = 0, self._ours.get(getattr(func, "overloadpacket", None))
        self._depth += 1
        try:
            if ours is not None:
                with self:
                    result, scratch = ours(*args, **(kwargs or {}))
            else:
                result = super().__torch_dispatch__(func, types, args, kwargs)
                scratch = scratch_bytes(func, args)
        finally:
            self._depth -= 1
        if not self._depth:
            self.made(func, args, kwargs or {}, result, scratch)
        return result


def _cudnn_rnn(*args: Any) -> tuple[tuple[Tensor, ...], int]:
    """Weights that do not lie in one memory are copied into one, which the backward pass reads."""
    from torch._meta_registrations import _cudnn_rnn as made_of

    given, weights, _, buffer = args[:4]
    if buffer is None and in_one_memory(weights):
        buffer = weights[0].detach()
    elif buffer is None:
        buffer = given.new_empty(sum(weight.numel() for weight in weights))
    *made, _, _ = made_of(*args)
    room = room_of_cudnn(*args)
    reserve = given.new_empty(room.reserve, dtype=torch.uint8)
    return (*made, reserve, buffer), room.forward


def _cudnn_rnn_backward(*args: Any) -> tuple[tuple[Any, ...], int]:
    """All weights' gradients are parts of one memory."""
    given, weights, _, _, hx, cx = args[:6]
    gradients: list[Tensor] = []
    if args[21][3]:  # some weight has one
        flat = given.new_empty(sum(weight.numel() for weight in weights))
        parts = flat.split([weight.numel() for weight in weights])
        gradients = [part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)]
    of_cx = None if cx is None else torch.empty_like(cx)
    made = torch.empty_like(given), torch.empty_like(hx), of_cx, gradients
    # what the forward pass was called with: not its result and the gradients that arrive
    return made, room_of_cudnn(*args[:6], *args[10:20]).backward


def _onednn_rnn(*args: Any) -> tuple[tuple[Any, ...], int]:
    """What it keeps for the backward pass is nothing by torch's own description."""
    *made, _ = _meta_registrations.mkldnn_rnn_layer(*args)
    return (*made, args[0].new_empty(workspace_bytes(*args), dtype=torch.uint8)), 0


def _onednn_rnn_backward(*args: Any) -> tuple[tuple[Any, ...], int]:
    """torch's own description has one memory for the gradients of both biases, until it is read
    from a cache that does not know of that; on a CPU they are two."""
    made = list(_meta_registrations.mkldnn_rnn_layer_backward(*args))
    made[4] = torch.empty_like(made[3])
    return tuple(made), 0


CTC: dict[Any, Fake] = {
    aten._use_cudnn_ctc_loss: ctc.use_cudnn_ctc_loss,
    aten._cudnn_ctc_loss: ctc.cudnn_ctc_loss,
    aten._ctc_loss: ctc.ctc_loss,
    aten._ctc_loss_backward: ctc.ctc_loss_backward,
}
if hasattr(aten, "_use_miopen_ctc_loss"):
    CTC[aten._use_miopen_ctc_loss] = ctc.use_miopen_ctc_loss
ONEDNN: dict[Any, Fake] = {}
if hasattr(_meta_registrations, "mkldnn_rnn_layer_backward"):
    ONEDNN[aten.mkldnn_rnn_layer] = _onednn_rnn
    ONEDNN[aten.mkldnn_rnn_layer_backward] = _onednn_rnn_backward
#: What these take is measured on the GPU.
CUDNN: dict[Any, Fake] = {
    aten._cudnn_rnn: _cudnn_rnn,
    aten._cudnn_rnn_backward: _cudnn_rnn_backward,
    aten._use_cudnn_ctc_loss: ctc.use_cudnn_ctc_loss_for_sure,
    aten._cudnn_ctc_loss: ctc.cudnn_ctc_loss_with_room,
}
