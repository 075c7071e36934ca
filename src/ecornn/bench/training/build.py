"""Turn a plain training step into a contender's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import ecornn
from ecornn.bench.models.step import Step, make_step
from ecornn.bench.models.tasks import matching
from ecornn.bench.training.cases import ModelCase
from ecornn.bench.training.contenders import Contender
from ecornn.errors import EcornnError
from ecornn.nn.convert import REPLACEMENTS


class NotMeasurable(EcornnError, RuntimeError):
    """A contender that does not exist here; says why."""


def build(contender: Contender, case: ModelCase, device: str, batch: int | None = None) -> Step:
    """Nothing is compiled yet: that is the first call's work."""
    step = make_step(
        case.model,
        size=case.size,
        batch=case.batch if batch is None else batch,
        length=case.length,
        device=device,
        capturable=contender.graph,
    )
    if contender.converted:
        _convert(step)
    if contender.kind == "checkpoint":
        _checkpoint(step, graph=contender.graph)
    elif contender.kind == "compile":
        _compile(step, contender)
    elif contender.kind == "echo":
        step.run = ecornn.compile(step.model, memory=contender.memory, codegen=contender.codegen)
    return step


def _convert(step: Step) -> None:
    if not any(type(module) in REPLACEMENTS for module in step.model.modules()):
        raise NotMeasurable("the model has no recurrent layer")
    ecornn.convert(step.model)


def _checkpoint(step: Step, *, graph: bool) -> None:
    """As a user would write it: `checkpoint(block, x, use_reentrant=False)` for `block(x)`."""
    task = step.task
    patterns = task.drawless if graph else task.blocks
    if not patterns:
        raise NotMeasurable(
            "every block draws random numbers, and a generator's state cannot be read in a capture"
        )
    for block in matching(step.model, patterns).values():
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=not graph
        )


def _compile(step: Step, contender: Contender) -> None:
    for module in matching(step.model, step.task.untraced).values():
        module.forward = torch.compiler.disable(module.forward)
    if step.task.looped and not contender.unrolled:
        for module in matching(step.model, step.task.looped).values():
            module.compile()
    else:
        step.run = torch.compile(step.model)


@contextmanager
def configured(contender: Contender, compilers: int, *, eager_draws: bool) -> Iterator[None]:
    """torch's options for this contender. `compilers`: processes that compile kernels.
    `eager_draws`: compiled code draws as eager code does, which costs it time and memory: for
    comparing results only."""
    changes: list[tuple[Any, dict[str, Any]]] = []
    if contender.kind in ("compile", "echo"):
        import torch._functorch.config
        import torch._inductor.config

        options: dict[str, Any] = {}
        if contender.budget is not None:
            options["activation_memory_budget"] = contender.budget
        if contender.aggressive:
            options["aggressive_recomputation"] = True
        changes.append((torch._functorch.config, options))
        inductor = {"compile_threads": compilers, "fallback_random": eager_draws}
        changes.append((torch._inductor.config, inductor))
    for module, options in changes:
        for name in options:
            if not hasattr(module, name):
                raise NotMeasurable(f"torch {torch.__version__} has no {module.__name__}.{name}")
    undo = [(module, {name: getattr(module, name) for name in o}) for module, o in changes]
    try:
        _set(changes)
        yield
    finally:
        _set(undo)


def _set(changes: list[tuple[Any, dict[str, Any]]]) -> None:
    for module, options in changes:
        for name, value in options.items():
            setattr(module, name, value)
