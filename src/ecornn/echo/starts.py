"""A loop's first call, made like the others.

A part that is handed its own results, as a decoder is its states, begins with states that somebody
made: zeros, of which no gradient is asked. torch compiles code for that one call and again, all of
it, for the others, which differ in nothing else. So such states are handed over as if a gradient
of them were asked for; it is made and not used.
"""

from __future__ import annotations

import operator
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad

from ecornn.echo.counted import Calls, Places, tensors_of
from ecornn.errors import EcornnError


class StateWritten(EcornnError, RuntimeError):
    """A part has written to a state that was handed over in another's place."""


class Starts:
    """Of one part. `places`: among the tensors that it is called with, those which are results of
    its calls before."""

    def __init__(self, places: Places | None = None) -> None:
        self.places = places or Places()
        self.next_is_first = False  # call in a forward pass of the model

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            if not self.next_is_first:
                return run(*args, **kwargs)
            self.next_is_first = False
            known = self.places.chosen and len(tensors_of(args, kwargs)) == self.places.of
            if not known or not torch.is_grad_enabled() or _differentiated_otherwise():
                return run(*args, **kwargs)
            exchange = _Exchange(self.places.chosen)
            try:
                args, kwargs = exchange.of(args), exchange.of(kwargs)
                result = run(*args, **kwargs)
                if exchange.was_written_to():
                    self.places = Places()
                    raise StateWritten(
                        "a part of the model has written to a state that it is given, which it did "
                        "not do when the model was first called, and the state's gradient would be "
                        "lost; from now on it is left alone: run this step once more"
                    )
                return result
            finally:
                exchange.undo()

        return called


class Beginnings:
    """Of all parts of a model."""

    def __init__(self) -> None:
        #: None: no call with gradients was seen.
        self._seen: dict[str, Places] | None = None
        self._mode, self._trained = True, [False]  # of the model and its weights, when it was
        self._starts: dict[str, Starts] = {}

    @property
    def unseen(self) -> bool:
        return self._seen is None

    def note(self, model: nn.Module, calls: Calls) -> None:
        """What calls were given when their results had gradients."""
        self._seen, self._mode, self._trained = calls.fed_back(), model.training, _trained(model)
        for path, starts in self._starts.items():
            starts.places = self._seen.get(path, Places())

    def of(self, path: str) -> Starts:
        """Of a part that is compiled anew."""
        made = self._starts[path] = Starts((self._seen or {}).get(path))
        return made

    def of_call(self, model: nn.Module) -> dict[str, Places]:
        """Of one that would be made now: none, unless the weights that were trained are so still,
        for a result might have no gradient but for what a call begins with. None in another mode,
        in which a part may write to what it is given."""
        seen = {path: places for path, places in (self._seen or {}).items() if places.chosen}
        if not seen or model.training is not self._mode:
            return {}
        now, then = _trained(model), self._trained
        known = len(now) == len(then) and all(a >= b for a, b in zip(now, then, strict=True))
        return seen if known else {}

    def begin(self, model: nn.Module) -> None:
        """A forward pass of the model."""
        of_call = self.of_call(model)
        for path, starts in self._starts.items():
            starts.next_is_first = path in of_call


def _trained(model: nn.Module) -> list[bool]:
    return [weight.requires_grad for weight in model.parameters()]


def _differentiated_otherwise() -> bool:
    """By other means than a backward pass, of which a detached tensor would know nothing."""
    level: Any = forward_ad._current_level
    transform: Any = torch._C._functorch.peek_interpreter_stack()
    return level >= 0 or transform is not None


class _Exchange:
    """Puts others in the place of some tensors. Lists and dicts stay the caller's own, which a part
    may write its new states to, and have what was theirs again afterwards."""

    def __init__(self, chosen: frozenset[int]) -> None:
        self._chosen, self._place = chosen, count()
        self._put: list[tuple[Any, Any, Any, Any]] = []  # into what, where, instead of what, what
        self._asked: list[tuple[Tensor, Any]] = []  # with the node that each has

    def of(self, value: Any) -> Any:
        """In the order of `tensors_of`."""
        if isinstance(value, Tensor):
            return self._asked_for(value) if next(self._place) in self._chosen else value
        if type(value) in (dict, OrderedDict, defaultdict):
            return self._within(value, iter(list(value.items())))
        if type(value) is list:
            return self._within(value, enumerate(list(value)))
        if type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_make")):
            found = [self.of(one) for one in value]
            as_it_was = all(map(operator.is_, found, value))
            return value if as_it_was else getattr(value, "_make", tuple)(found)
        for _ in tensors_of(value, None):  # in what torch knows to take apart, and we do not
            next(self._place)
        return value

    def _within(self, container: Any, items: Iterator[tuple[Any, Any]]) -> Any:
        for key, before in items:
            after = self.of(before)
            if after is not before:
                container[key] = after
                self._put.append((container, key, before, after))
        return container

    def _asked_for(self, state: Tensor) -> Tensor:
        """Others stay as they are."""
        numbers = state.is_floating_point() and type(state) in (Tensor, FakeTensor)
        if not numbers or state.requires_grad or state.is_inference():
            return state
        asked: Tensor = _Asked.apply(state, state.new_empty(0, requires_grad=True))
        self._asked.append((asked, asked.grad_fn))
        return asked

    def was_written_to(self) -> bool:
        """What has a gradient: the caller's own tensor knows nothing of it."""
        return any(asked.grad_fn is not node for asked, node in self._asked)

    def undo(self) -> None:
        while self._put:
            container, key, before, after = self._put.pop()
            there = key in container if isinstance(container, dict) else key < len(container)
            if there and container[key] is after:
                container[key] = before


class _Asked(torch.autograd.Function):
    """Not a leaf: a leaf must not be written to in place, and as long as anybody holds a loss its
    graph would hold the leaf, and a gradient of it."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, _: Tensor) -> Tensor:
        return state.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None
