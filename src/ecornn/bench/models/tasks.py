"""How each model is trained, and where users would cut it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from ecornn.bench.models import (
    attention_nmt,
    decoder_only,
    encoder_decoder,
    lstm_language_model,
    resnet,
    speech,
)
from ecornn.errors import InvalidInput

SIZES = ("full", "tiny")


@dataclass(frozen=True)
class Task:
    """`optimizer`: "adam", or "sgd" with momentum. `autocast`: the forward pass runs under
    bfloat16 autocast. The others name modules, as patterns over their paths:

    `blocks`: what a user would wrap in `torch.utils.checkpoint`.
    `drawless`: the same for a user who captures the step in a CUDA graph, where a block that draws
    random numbers cannot be wrapped: its generator's state cannot be read during a capture.
    `looped`: called in a Python loop, so that `torch.compile` is given these alone.
    `untraced`: kept from `torch.compile`, which would run an operator of theirs on zeros to learn
    what it makes: cuDNN's loss is not made for texts and sounds of no length.

    `compared_in`: the numbers that gradients are compared in, where that is not float32.
    `strict`: all that it calls has deterministic kernels, so that torch can be told to raise where
    something has none. Told to warn, it leaves memory-efficient attention as it is, whose gradients
    then differ from run to run.
    """

    name: str
    make_model: Callable[[Any], nn.Module]
    make_batch: Callable[[Any, int, torch.Generator], tuple[Tensor, ...]]
    full: Any
    tiny: Any
    optimizer: str
    autocast: bool
    blocks: tuple[str, ...]
    drawless: tuple[str, ...] = ()
    looped: tuple[str, ...] = ()
    untraced: tuple[str, ...] = ()
    compared_in: torch.dtype = torch.float32
    strict: bool = False

    def size(self, name: str, length: int | None = None) -> Any:
        """The size of that name, with another length of sequences where one is given."""
        if name not in SIZES:
            raise InvalidInput("size", repr(name), f"one of {', '.join(SIZES)}", "name one")
        found = self.full if name == "full" else self.tiny
        if length is None:
            return found
        if not hasattr(found, "length"):
            raise InvalidInput(
                "length", str(length), f"none: {self.name} has no sequences of words", "leave it"
            )
        return replace(found, length=length)


def matching(model: nn.Module, patterns: tuple[str, ...]) -> dict[str, nn.Module]:
    """The model's modules whose paths match one of the patterns; each pattern must match."""
    modules = dict(model.named_modules())
    found = {
        path: module
        for path, module in modules.items()
        if any(fnmatchcase(path, pattern) and _as_deep(path, pattern) for pattern in patterns)
    }
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in found):
            raise InvalidInput("patterns", repr(pattern), "the path of a module", "correct it")
    return found


def _as_deep(path: str, pattern: str) -> bool:
    """`*` stands for one name: `blocks.*` does not mean what is inside the blocks."""
    return path.count(".") == pattern.count(".")


NMT = Task(
    "nmt",
    attention_nmt.make_model,
    attention_nmt.make_batch,
    attention_nmt.Size(),
    attention_nmt.Size(40, 30, hidden=16, length=5, batch=4),
    optimizer="adam",
    autocast=False,
    blocks=("decoder",),
    drawless=("decoder.attention",),
    looped=("decoder",),
)
SPEECH = Task(
    "speech",
    speech.make_model,
    speech.make_batch,
    speech.Size(),
    speech.Size(24, channels=4, hidden=16, layers=2, frames=40, labels=6, batch=4),
    optimizer="sgd",
    autocast=False,
    blocks=("frontend", "recurrent.*"),
    drawless=("frontend", "recurrent.*"),
    untraced=("loss",),
)
LANGUAGE_MODEL = Task(
    "lstm-lm",
    lstm_language_model.make_model,
    lstm_language_model.make_batch,
    lstm_language_model.Size(),
    lstm_language_model.Size(40, hidden=16, length=6, batch=4),
    optimizer="sgd",
    autocast=False,
    blocks=("layers.*",),
    drawless=("layers.*",),
)
DECODER_ONLY = Task(
    "gpt2",
    decoder_only.make_model,
    decoder_only.make_batch,
    decoder_only.Size(),
    decoder_only.Size(60, width=32, layers=2, heads=2, length=16, batch=2),
    optimizer="adam",
    autocast=True,
    blocks=("blocks.*",),
    strict=True,
)
ENCODER_DECODER = Task(
    "transformer",
    encoder_decoder.make_model,
    encoder_decoder.make_batch,
    encoder_decoder.Size(),
    encoder_decoder.Size(60, width=32, inner=64, layers=2, heads=2, length=8, batch=2),
    optimizer="adam",
    autocast=True,
    blocks=("encoder.*", "decoder.*"),
)
RESNET = Task(
    "resnet50",
    resnet.make_model,
    resnet.make_batch,
    resnet.Size(),
    resnet.Size((1, 1, 1, 1), width=8, classes=10, image=32, batch=4),
    optimizer="sgd",
    autocast=True,
    blocks=("blocks.*",),
    drawless=("blocks.*",),
    # A batch norm after every convolution multiplies rounding: with the statistics of each added
    # up in another order, gradients of the untrained network in float32 differ by 6 %.
    compared_in=torch.float64,
)

TASKS: Mapping[str, Task] = {
    task.name: task for task in (NMT, SPEECH, LANGUAGE_MODEL, DECODER_ONLY, ENCODER_DECODER, RESNET)
}


def task_named(name: str) -> Task:
    if name not in TASKS:
        raise InvalidInput("model", repr(name), f"one of {', '.join(TASKS)}", "name one")
    return TASKS[name]
