"""A whole training step: clear the gradients, forward pass and loss, backward pass, optimizer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ecornn.bench.models.tasks import Task, task_named

#: By the optimizer's name. What is measured does not depend on them, and each makes the tiny
#: models' loss fall.
RATES = {"adam": 1e-3, "sgd": 1e-2}
MOMENTUM = 0.9


class Step:
    """Call it to take one step. `run` is what is called with the batch: the model, until somebody
    puts a compiled one in its place."""

    def __init__(
        self,
        task: Task,
        size: Any,
        batch: int,
        device: torch.device,
        *,
        seed: int = 0,
        capturable: bool = False,
    ) -> None:
        self.task, self.device, self.samples = task, device, batch
        self.autocast = task.autocast
        torch.manual_seed(seed)
        with device:
            self.model = task.make_model(size)
        self.model.train()
        self.run: Callable[..., Any] = self.model
        # Nothing can be drawn on meta tensors; only the shapes of what is drawn elsewhere stay.
        drawn_on = torch.device("cpu") if device.type == "meta" else device
        generator = torch.Generator(drawn_on).manual_seed(seed + 1)
        drawn = task.make_batch(size, batch, generator)
        self.batch = tuple(tensor.to(device) for tensor in drawn)
        self.optimizer = make_optimizer(task, self.model, capturable=capturable)

    def clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def loss(self) -> Tensor:
        # Not `enabled=`: on meta tensors autocast does not exist, even where it is off.
        cast = torch.autocast(self.device.type, torch.bfloat16) if self.autocast else nullcontext()
        with cast:
            found: Tensor = self.run(*self.batch)
        return found

    def passes(self) -> Tensor:
        """Forward and backward; the gradients are left in the parameters."""
        loss = self.loss()
        loss.backward()
        return loss.detach()

    def __call__(self) -> Tensor:
        self.clear()
        loss = self.passes()
        self.optimizer.step()
        return loss


def make_optimizer(task: Task, model: torch.nn.Module, *, capturable: bool) -> Any:
    """`capturable`: Adam counts its steps on the device, as a CUDA graph needs it."""
    rate = RATES[task.optimizer]
    if task.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), rate, capturable=capturable)
    return torch.optim.SGD(model.parameters(), rate, momentum=MOMENTUM)


def make_step(
    model: str,
    *,
    size: str = "full",
    batch: int | None = None,
    length: int | None = None,
    device: str | torch.device = "cuda",
    seed: int = 0,
    capturable: bool = False,
) -> Step:
    """A model of `TASKS` with a batch and an optimizer; `batch` and `length` are the size's own
    unless given."""
    task = task_named(model)
    chosen = task.size(size, length)
    samples = chosen.batch if batch is None else batch
    return Step(task, chosen, samples, torch.device(device), seed=seed, capturable=capturable)
