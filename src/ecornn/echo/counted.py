"""How often a model calls its parts in one forward pass, with which tensors every time, and with
which of their own results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ecornn.echo.fakes import WithoutNumbers
from ecornn.echo.lean.worth import Priced
from ecornn.echo.own_kernels import OwnKernels
from ecornn.echo.twin import fake, keeping_unseen, leaving_no_trace, without_numbers


def tensors_of(args: Any, kwargs: Any) -> list[Tensor]:
    """What a part is called with, in a fixed order."""
    return [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]


@dataclass
class Given:
    """What the calls of a part were given, place by place. Tensors are held for the time of
    counting: another one could have the address of one that is gone."""

    first: list[Tensor]
    same: set[int]  # as at the first call
    fed_back: set[int]  # results of earlier calls, but at the first
    gradients: bool  # only those count as results that have one
    results: dict[int, Tensor] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)  # to, by a call
    #: What calls were given, and how often each had been written to when they were over.
    after: list[tuple[Tensor, int]] = field(default_factory=list)

    @classmethod
    def of(cls, given: list[Tensor], gradients: bool) -> Given:
        return cls(given, set(range(len(given))), set(range(len(given))), gradients)

    def again(self, given: list[Tensor]) -> None:
        places = range(len(given)) if len(given) == len(self.first) else ()
        self.same &= {k for k in places if given[k] is self.first[k]}
        own = {k for k in places if self.results.get(id(given[k])) is given[k]}
        self.fed_back &= {k for k in own if given[k].requires_grad or not self.gradients}

    def returned(self, given: list[Tensor], results: list[Tensor]) -> None:
        """What a call was given and returns as it came, or a part of its memory, is no result of
        its own: whoever writes to that writes to what the call was given."""
        memory = {_memory(tensor) for tensor in given}
        self.results |= {id(t): t for t in results if _memory(t) not in memory}
        self.after += [(tensor, _version(tensor)) for tensor in given]

    @property
    def written_later(self) -> bool:
        """To what a call was given, when it was over."""
        return any(_version(tensor) != version for tensor, version in self.after)


def _memory(tensor: Tensor) -> Any:
    """Alike for tensors that share some. What has none of its own is taken by itself."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse tensors
        return id(tensor)


def _version(tensor: Tensor) -> int:
    """Another one when it was written to. What is made in inference mode has none: where a loop
    begins is looked at again when gradients are asked for."""
    return 0 if tensor.is_inference() else tensor._version


@dataclass(frozen=True)
class Places:
    """Some of the tensors of a call that has `of` of them."""

    chosen: frozenset[int] = frozenset()
    of: int = 0


@dataclass
class Calls:
    """Calls with tensors, by path."""

    counts: dict[str, int] = field(default_factory=dict)
    given: dict[str, Given] = field(default_factory=dict)

    def common(self) -> dict[str, frozenset[int]]:
        """Places of tensors that all calls of a part have in common."""
        return {path: frozenset(one.same) for path, one in self._repeated()}

    def fed_back(self) -> dict[str, Places]:
        """Places of tensors that are a part's own results, and that it does not write to."""
        return {
            path: Places(frozenset(one.fed_back - one.written), len(one.first))
            for path, one in self._repeated()
        }

    def written_later(self) -> frozenset[str]:
        """Parts that must not count on finding in the backward pass what they were given."""
        return frozenset(path for path, one in self.given.items() if one.written_later)

    def _repeated(self) -> list[tuple[str, Given]]:
        return [(path, one) for path, one in self.given.items() if self.counts.get(path, 0) > 1]


@contextmanager
def counted(model: nn.Module, *, compare: bool = True, gradients: bool = False) -> Iterator[Calls]:
    """`compare`: tensors are held meanwhile, to see which are the same at all calls. `gradients`:
    results without one are not told of as fed back."""
    calls = Calls()
    hooks = []
    #: Part, what it is given, and how often each of that had been written to.
    under_way: list[tuple[nn.Module, Given, list[Tensor], list[int]]] = []

    def enter(path: str) -> Callable[..., None]:
        def hook(part: nn.Module, args: Any, kwargs: Any) -> None:
            given = tensors_of(args, kwargs)
            if given:
                calls.counts[path] = calls.counts.get(path, 0) + 1
            if not compare:
                return
            if path not in calls.given:
                calls.given[path] = Given.of(given, gradients)
            elif given:
                calls.given[path].again(given)
            under_way.append((part, calls.given[path], given, list(map(_version, given))))

        return hook

    def leave(part: nn.Module, args: Any, result: Any) -> None:
        while under_way[-1][0] is not part:  # it raised, and its caller went on
            under_way.pop()
        _, of_part, given, versions = under_way.pop()
        of_part.written |= {k for k, t in enumerate(given) if _version(t) != versions[k]}
        of_part.returned(given, tensors_of(result, None))

    for path, part in model.named_modules():
        if path:
            hooks.append(part.register_forward_pre_hook(enter(path), with_kwargs=True))
            if compare:
                hooks.append(part.register_forward_hook(leave))
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def counted_without_numbers(
    model: nn.Module, args: Any, kwargs: Any, mode: Priced, own: OwnKernels | None = None
) -> Calls:
    """By a copy of the model; with `own`, its recurrent layers as ours."""
    with leaving_no_trace():
        seen_to = {} if own is None else {"seen_to": own.sees_to}
        twin = without_numbers(model, mode, **seen_to)
        args, kwargs = tree_map(lambda value: fake(value, mode), (args, kwargs))
        with (
            nullcontext() if own is None else own.noted(twin),
            counted(twin) as calls,
            mode.parts_of(twin),
            mode,
            torch.no_grad(),
        ):
            twin(*args, **kwargs)
    return calls


class _Unpriced(WithoutNumbers):
    def made(self, *_: Any) -> None:
        pass


def counted_with_gradients(model: nn.Module, args: Any, kwargs: Any) -> Calls:
    """By a copy of the model too. Nothing that it is called with has a gradient: what has one has
    it because of weights. A run by itself: estimates of times are made of operators that run
    without gradients."""
    mode = _Unpriced()

    def given(value: Any) -> Any:
        value = fake(value, mode)
        asked = isinstance(value, Tensor) and value.requires_grad
        return value.detach() if asked else value

    with leaving_no_trace():
        twin = without_numbers(model, mode)
        args, kwargs = tree_map(given, (args, kwargs))
        with (
            counted(twin, gradients=True) as calls,
            keeping_unseen(),
            mode,
            torch.enable_grad(),
        ):
            twin(*args, **kwargs)
    return calls
