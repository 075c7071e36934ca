"""Which tensors are weights, gradients and optimizer state, and whose."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ecornn.profiler.operators import tensors_in

OUTSIDE = "a parameter outside of the model"
_STRANGER = (OUTSIDE, "", f"the gradient of {OUTSIDE}")


class Book(Protocol):
    """Where it is written down what a tensor's storage is for."""

    def mark(self, tensor: Tensor, role: str, text: str, module: str, *, before: bool) -> None: ...

    def handed(self, tensor: Tensor) -> None: ...


class Roles:
    """Looks at the model and at every optimizer that is given or takes a step meanwhile."""

    def __init__(
        self,
        book: Book,
        model: nn.Module,
        optimizers: Iterable[Optimizer],
        moved: Callable[[], None] | None = None,
        *,
        at_every_chance: bool = True,
    ) -> None:
        """`moved` is told that an optimizer's step begins or ends. `at_every_chance`: optimizers'
        states are looked at before the step as well as after it, and each gradient when it is
        made; else gradients after a backward pass, unless somebody may take them away in it."""
        self._book, self._model = book, model
        self._moved = _nothing if moved is None else moved
        self._optimizers: list[Optimizer] = []
        #: How many optimizers are inside `step`.
        self.stepping = 0
        #: By the identity of a parameter: its name, the module's path, and what its gradient is.
        self._names: dict[int, tuple[str, str, str]] = {}
        self._weights(before=True)
        for optimizer in optimizers:
            self._add(optimizer, before=True, states=at_every_chance)
        self._handles: list[Any] = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        for parameter in self._parameters():
            if at_every_chance or _is_hooked(parameter):
                self._watch(parameter)

    def _parameters(self) -> Iterator[Tensor]:
        found = {id(one): one for one in self._model.parameters()}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                found |= {id(one): one for one in group["params"]}
        yield from found.values()

    def _watch(self, parameter: Tensor) -> None:
        # One without memory yet takes no hook: its gradient is seen when the step ends.
        if parameter.requires_grad and parameter.is_leaf and not is_lazy(parameter):
            hook: Callable[[Tensor], None] = self._gradient
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def _weights(self, *, before: bool = False) -> None:
        mark, names = self._book.mark, self._names
        for name, parameter in self._model.named_parameters():
            known = names.get(id(parameter))
            if known is None or known[0] != name:
                known = names[id(parameter)] = (name, _owner(name), f"the gradient of {name}")
            mark(parameter, "weights", f"the parameter {name}", known[1], before=before)
            gradient = parameter.grad
            if gradient is not None:
                mark(gradient, "gradients", known[2], known[1], before=before)
        for name, buffer in self._model.named_buffers():
            mark(buffer, "weights", f"the buffer {name}", _owner(name), before=before)

    def _gradient(self, parameter: Tensor, *, before: bool = False) -> None:
        gradient = parameter.grad
        if gradient is not None:
            _, owner, text = self._names.get(id(parameter), _STRANGER)
            self._book.mark(gradient, "gradients", text, owner, before=before)

    def gradients(self) -> None:
        """A backward pass has ended."""
        for parameter in self._parameters():
            self._gradient(parameter)

    def _add(self, optimizer: Optimizer, *, before: bool = False, states: bool = True) -> None:
        if not any(one is optimizer for one in self._optimizers):
            self._optimizers.append(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self._names:
                    self._book.mark(parameter, "weights", OUTSIDE, "", before=before)
                    self._gradient(parameter, before=before)
                state = optimizer.state.get(parameter) if states else None
                if state:
                    self._state(parameter, state, before=before)

    def _state(self, parameter: Tensor, state: Any, *, before: bool) -> None:
        name, owner, _ = self._names.get(id(parameter), _STRANGER)
        for key, value in state.items():
            for one in value if isinstance(value, tuple | list) else (value,):
                if isinstance(one, Tensor):
                    self._book.mark(
                        one, "optimizer state", f"{key} of {name}", owner, before=before
                    )

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not any(one is optimizer for one in self._optimizers):
            self._add(optimizer, before=True)
        self.stepping += 1
        self._moved()

    def _after_step(self, *_: Any) -> None:
        self.stepping -= 1
        self._moved()

    def inputs(self, tensors: Iterable[Any]) -> None:
        """What is handed to the model from outside."""
        for tensor in tensors_in(tensors):
            # What an operator with a derivative made is no input.
            if tensor.grad_fn is None:
                self._book.handed(tensor)

    def close(self) -> None:
        """Once more: weights may have been replaced, and state made."""
        self._weights()
        for optimizer in self._optimizers:
            self._add(optimizer)

    def unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._moved = _nothing


def _nothing() -> None: ...


def _is_hooked(parameter: Tensor) -> bool:
    """Optimizers that step inside the backward pass hook the parameters."""
    hooks = (parameter._post_accumulate_grad_hooks, parameter._backward_hooks)
    return any(hooks)


def _owner(name: str) -> str:
    return name.rpartition(".")[0]
