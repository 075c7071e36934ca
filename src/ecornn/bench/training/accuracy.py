"""Loss, gradients and buffers of a contender beside eager's, from equal weights and seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ecornn.bench.models.step import Step

Named = dict[str, Tensor]

#: A gradient that is small beside the others is compared on this share of all gradients' norm:
#: that of a bias before a batch norm, say, is zero but for rounding.
SMALL = 1e-2

#: Largest error allowed, by the precision of the products. A wrong mask or a gradient that is left
#: out gives about 1; rounding in another order gives far less.
BOUNDS = {"ieee": 1e-3, "tf32": 1e-2, "float64": 1e-6}


@dataclass(frozen=True)
class Passes:
    """What a forward and a backward pass leave: the loss, gradients and buffers."""

    loss: Tensor
    gradients: Named
    buffers: Named


@dataclass(frozen=True)
class Comparison:
    """`error`: of the loss or the worst gradient; `where`: of which. `state_error`: of the worst
    buffer. `bitwise`: all three are equal to the last bit."""

    error: float
    where: str
    state_error: float
    bitwise: bool

    def metrics(self) -> dict[str, float | str]:
        return {
            "error": self.error,
            "state_error": self.state_error,
            "bitwise": int(self.bitwise),
        }


class TracedBatchNorm(TorchFunctionMode):
    """Runs the batch norm that torch puts into a traced graph, its own. Eager's on a GPU is
    cuDNN's, which adds in another order: no bit of a difference could be laid to whom it is due."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.batch_norm:
            return _own_batch_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _own_batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    statistics = (running_mean, running_var, training, momentum, eps)
    found: Tensor = torch.ops.aten.native_batch_norm(x, weight, bias, *statistics)[0]
    return found


def make_comparable(step: Step) -> None:
    """In full precision, in the numbers that the model's gradients can be compared in: under
    autocast torch's tracing alone already rounds elsewhere than eager."""
    step.autocast = False
    dtype = step.task.compared_in
    step.model.to(dtype)
    step.batch = tuple(t.to(dtype) if t.is_floating_point() else t for t in step.batch)


def bound(step: Step) -> float:
    if step.task.compared_in == torch.float64 and not step.autocast:
        return BOUNDS["float64"]
    tf32 = step.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return BOUNDS["tf32" if tf32 or step.autocast else "ieee"]


@contextmanager
def ieee(device: torch.device) -> Iterator[None]:
    """Products without TF32, cuDNN's among them."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    if device.type == "cuda":
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def has_draws(model: nn.Module) -> bool:
    return any(getattr(m, "p", 0) or getattr(m, "dropout", 0) for m in model.modules())


def take_passes(
    step: Step,
    seed: int,
    passes: Callable[[], Tensor] | None = None,
    *,
    as_traced: bool = False,
) -> Passes:
    """`passes` runs them where they are not the step's own; it clears the gradients itself."""
    torch.manual_seed(seed)
    if passes is None:
        step.clear()
        passes = step.passes
    with TracedBatchNorm() if as_traced else nullcontext():
        loss = passes()
    gradients = {n: p.grad for n, p in step.model.named_parameters() if p.grad is not None}
    return Passes(
        loss.clone(),
        {name: gradient.detach().clone() for name, gradient in gradients.items()},
        {name: buffer.clone() for name, buffer in step.model.named_buffers()},
    )


def compare(found: Passes, expected: Passes) -> Comparison:
    missing = sorted(set(expected.gradients) ^ set(found.gradients))
    if missing:
        return Comparison(1.0, f"gradient of {missing[0]}, there is none", 0.0, bitwise=False)
    total = torch.stack([g.double().norm() for g in expected.gradients.values()]).norm()
    errors = {"loss": difference(found.loss, expected.loss)}
    for name, gradient in expected.gradients.items():
        floor = SMALL * float(total)
        errors[f"gradient of {name}"] = difference(found.gradients[name], gradient, floor)
    states = [difference(found.buffers[n], b) for n, b in expected.buffers.items()]
    where = max(errors, key=lambda name: errors[name])
    pairs = (
        (found.loss, expected.loss),
        *((found.gradients[n], g) for n, g in expected.gradients.items()),
        *((found.buffers[n], b) for n, b in expected.buffers.items()),
    )
    bitwise = all(torch.equal(*pair) for pair in pairs)
    return Comparison(errors[where], where, max(states, default=0.0), bitwise)


def difference(found: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """‖found − expected‖ ÷ ‖expected‖, 1 where something is not finite."""
    apart = float((found.double() - expected.double()).norm())
    scale = max(float(expected.double().norm()), floor)
    if apart == 0:
        return 0.0
    error = apart / scale if scale else 1.0
    return error if error < float("inf") else 1.0


def compare_with_eager(
    step: Step,
    eager: Step,
    seed: int,
    passes: Callable[[], Tensor] | None = None,
    *,
    as_traced: bool = False,
    twins: bool = False,
) -> Comparison:
    """`eager` is a step of the same model; it is given the weights and buffers of `step`.
    `as_traced`: it runs the batch norm of traced graphs; so does `step` where they are `twins`,
    eager beside itself. Compiled code, be it of a part alone, would be compiled again for it."""
    eager.autocast = step.autocast
    eager.model.load_state_dict(step.model.state_dict())
    found = take_passes(step, seed, passes, as_traced=as_traced and twins)
    return compare(found, take_passes(eager, seed, as_traced=as_traced))
