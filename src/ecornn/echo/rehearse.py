"""A whole step of a divided model, rehearsed on tensors without numbers.

Parts of such a model are compiled, the rest runs as it is written. A copy of the model without
numbers takes one forward and one backward pass by torch's own autograd: operators of the rest make
what they make, compiled parts run the code that was generated for them, its kernels doing nothing
(`replay.py`). Every storage is counted from when it is made until its last reference goes, as an
allocator would count it. Scratch memory inside kernels is not seen, but for that of cuDNN's layers
and CTC loss, which is measured at a short length, as is what the layers reserve.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from ecornn.echo.calls_noted import first_of
from ecornn.echo.counted import Places
from ecornn.echo.fakes import CUDNN, WithoutNumbers
from ecornn.echo.graph import NotUnderstood
from ecornn.echo.lean.mode import without_lean_functions
from ecornn.echo.own_checkpoints import OwnCheckpoints
from ecornn.echo.recorded import Pass, Recorded, key_of
from ecornn.echo.replay import Code, Ledger, callable_of
from ecornn.echo.starts import Starts
from ecornn.echo.twin import alone, device_of, draws_kept, without_numbers
from ecornn.echo.weight_sums import WeightSums


@dataclass(frozen=True)
class Form:
    """A tensor that a model was called with, without its numbers."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


#: What holds no tensor.
PLAIN = (
    *(int, float, complex, str, bytes, type(None), slice, range, Enum),
    *(torch.dtype, torch.device, torch.Size),
)


@dataclass(frozen=True)
class ModelCall:
    """What a model was called with, and under which autocast: (device's type, dtype) or None."""

    args: Any
    kwargs: Any
    autocast: tuple[str, torch.dtype] | None

    @classmethod
    def of(cls, args: Any, kwargs: Any, device: torch.device) -> ModelCall | None:
        """None where something is handed over that may hold tensors, which must not be kept."""
        if not all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in tree_leaves((args, kwargs))):
            return None
        kind = device.type
        # of a device that has none, such as meta, torch does not even tell whether it is on
        cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if cast else None
        args, kwargs = tree_map(_form, (args, kwargs))
        return cls(args, kwargs, None if dtype is None else (kind, dtype))

    def context(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.autocast is None else torch.autocast(*self.autocast)


def _form(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    form = tuple(value.shape), tuple(value.stride()), value.dtype, value.device
    return Form(*form, value.requires_grad)


class Counted(WithoutNumbers):
    """Counts the storages of tensors without numbers. No mode beside it: torch's compiler leaves
    alone what runs under others."""

    def __init__(self, device: str) -> None:
        super().__init__(CUDNN)
        self.ledger = Ledger(device)

    def made(self, func: Any, args: Any, kwargs: Any, result: Any, scratch: int) -> None:
        for leaf in tree_leaves(result):
            if isinstance(leaf, FakeTensor):
                self.ledger.see(leaf)
        self.ledger.most = max(self.ledger.most, self.ledger.now + scratch)

    def held(self, value: Any) -> Any:
        """What the caller holds: it is not counted."""
        if isinstance(value, Form):
            with self:
                made = torch.empty_strided(
                    value.size, value.stride, dtype=value.dtype, device=value.device
                )
            value = made.requires_grad_(value.requires_grad)
        if isinstance(value, FakeTensor):
            self.ledger.ignore(value)
        return value


@dataclass
class Rehearsal:
    """`parts`: by path, what their compiled graphs run. `model`: the copy. `functions`: replaces
    functions while the model is called, and ends with `end_of_call`."""

    parts: Mapping[str, Sequence[Recorded]]
    mode: Counted
    model: nn.Module
    functions: Callable[[], Any] | None = None
    starts: dict[str, Starts] = field(default_factory=dict)
    _runs: dict[int, Callable[[list[Any]], Any]] = field(default_factory=dict)
    _sums: dict[int, WeightSums] = field(default_factory=dict)
    _made: dict[Any, WeightSums] = field(default_factory=dict)  # by nodes of the call under way

    def end(self) -> None:
        """torch's compiler keeps the backend, and what it refers to, for as long as it runs."""
        self.parts, self.model, self.functions = {}, nn.Module(), None
        self._runs.clear()
        self._sums.clear()
        self._made.clear()

    def call(self, call: ModelCall, given: Any) -> Any:
        args, kwargs = given
        for one in self.starts.values():
            one.next_is_first = True
        with self.mode, call.context():
            if self.functions is None:
                return self.model(*args, **kwargs)
            functions = self.functions()
            with functions:
                result = self.model(*args, **kwargs)
            functions.end_of_call()
            return result

    def backend(self, path: str) -> Callable[..., Any]:
        """For torch.compile: instead of compiling a graph, find what was compiled for it."""

        def find(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            key = key_of(module, inputs)
            found = [one for one in self.parts[path] if one.key == key]
            if not found:
                raise NotUnderstood(f"{path} was not compiled for what it is called with here")
            return lambda *given: self._called(found[-1], given)

        return find

    def _called(self, part: Recorded, given: Sequence[Any]) -> Any:
        if part.results is None or part.backward is None:
            if part.forward is None:
                raise NotUnderstood("a compiled part does not show what it runs")
            return tuple(self._run(part.forward, list(given)))
        results = _Part.apply(self, part, *given)
        nodes = {result.grad_fn for result in results if isinstance(result, Tensor)} - {None}
        if nodes and (sums := self._sums_of(part)) is not None:
            self._made[nodes.pop()] = sums
        return results

    def noting_calls(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """As `calls_noted.noting_calls` does."""

        def note(result: Tensor) -> bool:
            sums = self._made.get(result.grad_fn)
            if sums is not None:
                sums.register(result.grad_fn, None)
            return sums is not None

        def called(*args: Any, **kwargs: Any) -> Any:
            result = run(*args, **kwargs)
            first_of(result, note)
            self._made.clear()
            return result

        return called

    def _sums_of(self, part: Recorded) -> WeightSums | None:
        if part.sums is None:
            return None
        if id(part) not in self._sums:
            self._sums[id(part)] = part.sums.anew()
        return self._sums[id(part)]

    def _run(self, what: Pass, arguments: list[Any]) -> list[Any]:
        if id(what) not in self._runs:
            self._runs[id(what)] = self._callable(what)
        with self.mode, torch.no_grad():
            return list(self._runs[id(what)](arguments))

    def _callable(self, what: Pass) -> Callable[[list[Any]], Any]:
        if not isinstance(what, Code):
            return what
        held = {
            name: self.mode.held(self.mode.from_tensor(value))
            if isinstance(value, Tensor)
            else value
            for name, value in what.constants.items()
        }
        return callable_of(what.source, held)


class _Part(torch.autograd.Function):
    """Both passes of a compiled part, as AOTAutograd calls them."""

    #: Newer versions of torch (2.13, not 2.11) hand over gradients in a list that can be emptied.
    boxed_grads_call = True

    @staticmethod
    def forward(ctx: Any, rehearsal: Rehearsal, part: Recorded, *given: Any) -> Any:
        assert part.forward is not None
        assert part.results is not None
        returned = rehearsal._run(part.forward, list(given))
        results, kept = returned[: part.results], returned[part.results :]
        ctx.rehearsal, ctx.part = rehearsal, part
        ctx.numbers = [value for value in kept if not isinstance(value, Tensor)]
        ctx.save_for_backward(*(value for value in kept if isinstance(value, Tensor)))
        ctx.mark_non_differentiable(*(r for r in results if not _differentiable(r)))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> Any:
        with ctx.rehearsal.mode:  # as AOTAutograd does: what is expanded takes memory of its own
            given = tangents[0] if isinstance(tangents[0], list) else tangents
            arriving = [t.contiguous() if 0 in t.stride() else t for t in given if t is not None]
        arguments = [*ctx.numbers, *ctx.saved_tensors, *arriving]
        ctx.maybe_clear_saved_tensors()
        arriving.clear()
        if isinstance(given, list):
            given.clear()
        gradients = ctx.rehearsal._run(ctx.part.backward, arguments)
        if (sums := ctx.rehearsal._sums_of(ctx.part)) is not None:
            with ctx.rehearsal.mode:
                gradients = sums.handed_over(gradients)
        return None, None, *gradients


def _differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype.is_floating_point


def rehearsed(
    model: nn.Module,
    call: ModelCall,
    parts: Mapping[str, Sequence[Recorded]],
    functions: Callable[[], Any] | None,
    starts: Mapping[str, Places] | None = None,
) -> int:
    """The most bytes that both passes of a call hold at once beside what is there before.
    `starts`: by path, see `Starts`."""
    mode = Counted(device_of(model).type)
    try:
        with draws_kept():
            first = {path: Starts(places) for path, places in (starts or {}).items()}
            rehearsal = Rehearsal(parts, mode, without_numbers(model, mode), functions, first)
            try:
                return _most(rehearsal, call)
            finally:
                rehearsal.end()
    except Exception as error:  # whatever the model raises without numbers
        inner = getattr(error, "inner_exception", error)  # torch's compiler wraps what it meets
        said = str(inner).splitlines()[0] if str(inner) else type(inner).__name__
        raise NotUnderstood(f"the step could not be rehearsed: {said}") from error


def _most(rehearsal: Rehearsal, call: ModelCall) -> int:
    """The model is called twice, the first time for torch to trace the compiled parts."""
    mode, model = rehearsal.mode, rehearsal.model
    for path in rehearsal.parts:
        part = model.get_submodule(path)
        found = rehearsal.backend(path)
        compiled = torch.compile(alone(part.forward), backend=found, dynamic=False)
        compiled = rehearsal.noting_calls(compiled)
        if path in rehearsal.starts:
            compiled = rehearsal.starts[path].around(compiled)
        run = without_lean_functions(compiled)
        part.__dict__["forward"] = OwnCheckpoints().heeded(run, part.forward)
    for tensor in (*model.parameters(), *model.buffers()):
        mode.held(tensor).grad = None
    given = tree_map(mode.held, (call.args, call.kwargs))
    rehearsal.call(call, given)
    before = mode.ledger.most = mode.ledger.now
    results = tree_leaves(rehearsal.call(call, given))
    roots = [leaf for leaf in results if isinstance(leaf, Tensor) and leaf.requires_grad]
    with mode:
        torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])
    return mode.ledger.most - before
