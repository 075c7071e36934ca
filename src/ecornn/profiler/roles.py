"""Which tensors are weights, gradients and optimizer state, and whose."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ecornn.profiler.inventory import Contents, contents_of
from ecornn.profiler.operators import tensors_in

_SEVERAL = (tuple, list)
OUTSIDE = "a parameter outside of the model"


class Named(NamedTuple):
    """A parameter, and what it and its gradient are."""

    name: str
    module: str
    weight: str
    gradient: str


@lru_cache(maxsize=4096)
def _named(name: str) -> Named:
    return Named(name, _owner(name), f"the parameter {name}", f"the gradient of {name}")


@lru_cache(maxsize=4096)
def _named_buffer(name: str) -> tuple[str, str]:
    return f"the buffer {name}", _owner(name)


_STRANGER = Named(OUTSIDE, "", OUTSIDE, f"the gradient of {OUTSIDE}")


#: A tensor, what it is for, that as a text, and the module it belongs to.
Entry = tuple[Tensor, str, str, str]


class Book(Protocol):
    """Where it is written down what a tensor's storage is for."""

    def mark(self, entries: Sequence[Entry], *, before: bool) -> None:
        """`before`: what nobody has seen yet was there before the step."""
        ...

    def handed(self, tensor: Tensor) -> None: ...


class Roles:
    """Looks at the model and at every optimizer that is given or takes a step meanwhile."""

    def __init__(
        self,
        book: Book,
        model: nn.Module,
        contents: Contents,
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
        #: By the identity of a parameter.
        self._names: dict[int, Named] = {}
        self._weights(contents, before=True)
        for optimizer in optimizers:
            self._add(optimizer, before=True, states=at_every_chance)
        self._handles: list[Any] = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        for parameter in self._parameters(contents):
            if at_every_chance or _is_hooked(parameter):
                self._watch(parameter)

    def _parameters(self, contents: Contents) -> Iterable[Tensor]:
        found = {id(one): one for _, one in contents.parameters}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                found |= {id(one): one for one in group["params"]}
        return found.values()

    def _watch(self, parameter: Tensor) -> None:
        # One without memory yet takes no hook: its gradient is seen when the step ends.
        if parameter.requires_grad and parameter.is_leaf and not is_lazy(parameter):
            hook: Callable[[Tensor], None] = self._made
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def _weights(self, contents: Contents, *, before: bool = False) -> None:
        entries: list[Entry] = []
        for name, parameter in contents.parameters:
            known = self._names.get(id(parameter))
            if known is None or known.name != name:
                known = self._names[id(parameter)] = _named(name)
            entries.append((parameter, "weights", known.weight, known.module))
            gradient = parameter.grad
            if gradient is not None:
                entries.append((gradient, "gradients", known.gradient, known.module))
        for name, buffer in contents.buffers:
            entries.append((buffer, "weights", *_named_buffer(name)))
        self._book.mark(entries, before=before)

    def _gradients(self, parameters: Iterable[Tensor]) -> list[Entry]:
        found: list[Entry] = []
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None:
                known = self._names.get(id(parameter), _STRANGER)
                found.append((gradient, "gradients", known.gradient, known.module))
        return found

    def _made(self, parameter: Tensor) -> None:
        """A gradient."""
        self._book.mark(self._gradients([parameter]), before=False)

    def gradients(self) -> None:
        """A backward pass has ended."""
        self._book.mark(self._gradients(self._parameters(contents_of(self._model))), before=False)

    def _add(self, optimizer: Optimizer, *, before: bool = False, states: bool = True) -> None:
        if not any(one is optimizer for one in self._optimizers):
            self._optimizers.append(optimizer)
        entries: list[Entry] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self._names:
                    entries.append((parameter, "weights", OUTSIDE, ""))
                    entries += self._gradients([parameter])
                state = optimizer.state.get(parameter) if states else None
                if state:
                    entries += self._state(parameter, state)
        self._book.mark(entries, before=before)

    def _state(self, parameter: Tensor, state: Any) -> Iterator[Entry]:
        known = self._names.get(id(parameter), _STRANGER)
        for key, value in state.items():
            for one in value if isinstance(value, _SEVERAL) else (value,):
                if type(one) is Tensor or isinstance(one, Tensor):
                    yield one, "optimizer state", f"{key} of {known.name}", known.module

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
        self._weights(contents_of(self._model))
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
    return bool(parameter._post_accumulate_grad_hooks or parameter._backward_hooks)


def _owner(name: str) -> str:
    return name.rpartition(".")[0]
