"""Loss, gradients and buffers of a contender beside eager's, from equal weights and seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ecornn.bench.models.step import Step

Named = dict[str, Tensor]

#: A gradient that is small beside the others is compared on this share of all gradients' norm:
#: that of a bias before a batch norm, say, is zero but for rounding.
SMALL = 1e-2

#: Largest error allowed, by the precision of the products. A wrong mask or a gradient that is left
#: out gives about 1; rounding in another order gives far less.
BOUNDS = {"ieee": 1e-3, "tf32": 1e-2}


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


def bound(step: Step) -> float:
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


def take_passes(step: Step, seed: int, passes: Callable[[], Tensor] | None = None) -> Passes:
    """`passes` runs them where they are not the step's own; it clears the gradients itself."""
    torch.manual_seed(seed)
    if passes is None:
        step.clear()
        passes = step.passes
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
    step: Step, eager: Step, seed: int, passes: Callable[[], Tensor] | None = None
) -> Comparison:
    """`eager` is a step of the same model; it is given the weights and buffers of `step`."""
    eager.autocast = step.autocast
    eager.model.load_state_dict(step.model.state_dict())
    return compare(take_passes(step, seed, passes), take_passes(eager, seed))
