"""Operators that torch cannot run on tensors without numbers, told by the shapes of what they read.

`RULES` is the table. A rule holds while somebody observes or asks for it by `meta_kernels`; torch's
dispatcher is given nothing.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ecornn import ctc
from ecornn.ctc import Lengths, cudnn_may_take, made_by_cudnn
from ecornn.errors import InvalidInput
from ecornn.profiler.places import passed_over_by_compiler

aten = torch.ops.aten

WIDEST = (
    "how long the texts of a CTC loss are is not known on tensors without numbers: what it keeps is"
    " counted as if the longest filled its row of the targets, and may be less"
)
BY_CUDNN = (
    "whether cuDNN computes a CTC loss depends on lengths that are not known on tensors without"
    " numbers: it is counted as if no text had more than 255 labels, or more than its frames"
)


class Rules:
    """Of one observation; `notes` says in sentences where a bound stands for a number."""

    def __init__(self) -> None:
        self.notes: dict[str, None] = {}
        #: By thread: lengths of texts that a loss was given on another device than its own.
        self._lengths: dict[int, tuple[weakref.ref[Tensor], torch.device]] = {}

    def of(self, func: Any) -> Callable[..., Any] | None:
        """What runs the operator in torch's stead, if there is a rule for it."""
        rule = RULES.get(func)
        return None if rule is None else lambda *args, **named: rule(self, func, *args, **named)

    def ctc_loss(
        self,
        func: Any,
        log_probs: Tensor,
        targets: Tensor,
        frames: Lengths,
        texts: Lengths,
        *rest: Any,
        **named: Any,
    ) -> Any:
        if isinstance(texts, Tensor) and texts.device != log_probs.device:
            self._lengths[get_ident()] = (weakref.ref(texts), log_probs.device)
        if _has_numbers(log_probs):
            if _elsewhere(log_probs, frames, texts):
                lengths = _numbers(frames), _numbers(texts)
                return aten._ctc_loss.default(log_probs, targets, *lengths, *rest, **named)
            return func(log_probs, targets, frames, texts, *rest, **named)
        lengths = _frames(frames, log_probs), self._texts(texts, targets)
        # Where lengths are numbers torch itself has a kernel, with the checks of the CPU's. Fake
        # tensors refuse it: plain ones stand in for them.
        with _disable_current_modes():
            plain = [
                torch.empty(one.shape, dtype=one.dtype, device="meta")
                for one in (log_probs, targets)
            ]
            made = aten._ctc_loss.default(*plain, *lengths, *rest, **named)
        return tuple(log_probs.new_empty(one.shape) for one in made)

    def _texts(self, given: Lengths, targets: Tensor) -> list[int]:
        if not isinstance(given, Tensor) or _has_numbers(given):
            return _numbers(given)
        count = given.numel()
        if targets.dim() == 1 and count == 1:
            return [targets.shape[0]]  # all labels are of the one text
        if targets.dim() != 2:
            raise InvalidInput(
                "target_lengths",
                f"a tensor without numbers beside targets of shape {tuple(targets.shape)}",
                "lengths that can be read, or targets of shape (batch, longest text)",
                "pass the lengths as numbers or as a CPU tensor, or pad the targets: how much the"
                " CTC loss keeps depends on the longest text",
            )
        self.notes[WIDEST] = None
        return [targets.shape[1]] * count

    def ctc_loss_backward(
        self,
        func: Any,
        grad: Tensor,
        log_probs: Tensor,
        targets: Tensor,
        frames: Lengths,
        texts: Lengths,
        *rest: Any,
        **named: Any,
    ) -> Any:
        if _has_numbers(log_probs):
            given = (grad, log_probs, targets)
            if _elsewhere(log_probs, frames, texts):
                lengths = _numbers(frames), _numbers(texts)
                return aten._ctc_loss_backward.default(*given, *lengths, *rest, **named)
            return func(*given, frames, texts, *rest, **named)
        return torch.empty_like(log_probs, memory_format=torch.contiguous_format)

    def use_cudnn_ctc_loss(
        self,
        func: Any,
        log_probs: Tensor,
        targets: Tensor,
        frames: Lengths,
        texts: Lengths,
        blank: int,
    ) -> bool:
        if _has_numbers(log_probs):
            return bool(func(log_probs, targets, frames, texts, blank))
        found = cudnn_may_take(log_probs, targets, frames, texts, blank)
        if found and isinstance(texts, Tensor):
            self.notes[BY_CUDNN] = None
        return found

    def use_miopen_ctc_loss(self, func: Any, log_probs: Tensor, *rest: Any) -> bool:
        """Of another maker's GPUs."""
        if _has_numbers(log_probs) or torch.version.hip is not None:
            return bool(func(log_probs, *rest))
        return False

    def cudnn_ctc_loss(self, func: Any, log_probs: Tensor, *rest: Any, **named: Any) -> Any:
        if _has_numbers(log_probs):
            return func(log_probs, *rest, **named)
        return made_by_cudnn(log_probs)

    def clamp_min(self, func: Any, given: Tensor, least: Any) -> Any:
        """For its mean a CTC loss is divided by its lengths. Where a mode looks on, torch leaves
        these on their own device, and fails; where none does, it reads them and brings them to the
        loss's: so here."""
        made = func(given, least)
        lengths, device = self._lengths.get(get_ident(), (None, None))
        if lengths is None or lengths() is not given:
            return made
        del self._lengths[get_ident()]
        return made.to(device)


#: By operator: the rule, which is called with the rules it is of, the operator and its arguments.
RULES: Mapping[Any, Callable[..., Any]] = {
    aten._ctc_loss.default: Rules.ctc_loss,
    aten._ctc_loss.Tensor: Rules.ctc_loss,
    aten._ctc_loss_backward.default: Rules.ctc_loss_backward,
    aten._ctc_loss_backward.Tensor: Rules.ctc_loss_backward,
    aten._use_cudnn_ctc_loss.default: Rules.use_cudnn_ctc_loss,
    aten._use_cudnn_ctc_loss.Tensor: Rules.use_cudnn_ctc_loss,
    aten._cudnn_ctc_loss.default: Rules.cudnn_ctc_loss,
    aten._cudnn_ctc_loss.Tensor: Rules.cudnn_ctc_loss,
    aten.clamp_min.default: Rules.clamp_min,
    **(
        {
            aten._use_miopen_ctc_loss.default: Rules.use_miopen_ctc_loss,
            aten._use_miopen_ctc_loss.Tensor: Rules.use_miopen_ctc_loss,
        }
        if hasattr(aten, "_use_miopen_ctc_loss")  # asked by torch 2.13
        else {}
    ),
}


def _elsewhere(log_probs: Tensor, *lengths: Lengths) -> bool:
    """Lengths on another device than the scores. Where no mode looks on, torch reads them and calls
    its kernel with numbers; where one does, it hands over tensors, and the kernel refuses them."""
    return any(isinstance(one, Tensor) and one.device != log_probs.device for one in lengths)


def _has_numbers(tensor: Tensor) -> bool:
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def _numbers(lengths: Lengths) -> list[int]:
    if isinstance(lengths, Tensor):
        with _disable_current_modes():  # reading them is no part of the step
            return [int(one) for one in lengths.reshape(-1).tolist()]
    return list(lengths)


def _frames(given: Lengths, log_probs: Tensor) -> list[int]:
    """They change nothing of what is made: unknown ones are taken as all frames."""
    if isinstance(given, Tensor) and not _has_numbers(given):
        return [log_probs.shape[0]] * given.numel()
    return _numbers(given)


class MetaKernels(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would load its compiler to keep it out; where it is loaded, we keep it out."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self) -> None:
        super().__init__()
        self._rules = Rules()
        if "torch._dynamo" in sys.modules:
            passed_over_by_compiler(sys.modules[__name__], ctc)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._rules.of(func) or func)(*args, **(kwargs or {}))


def meta_kernels() -> MetaKernels:
    """`with meta_kernels():` runs steps on meta tensors that need an operator of `RULES`, such as
    the CTC loss's. A profile needs none around it; the steps before it do."""
    return MetaKernels()
