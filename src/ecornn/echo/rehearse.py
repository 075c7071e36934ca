"""A whole step of a divided model, rehearsed on tensors without numbers.

Parts of such a model are compiled, the rest runs as it is written. A copy of the model without
numbers takes one forward and one backward pass by torch's own autograd: operators of the rest make
what they make, compiled parts run the code that was generated for them, its kernels doing nothing
(`replay.py`). Every storage is counted from when it is made until its last reference goes, as an
allocator would count it. Scratch memory inside kernels is not seen, but for that of cuDNN's layers
and CTC loss, which is measured at a short length, as is what the layers reserve.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.exc import Unsupported, UserError
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map

from ecornn.echo.calls_noted import CommonInputs, first_of, noting_calls
from ecornn.echo.counted import Places
from ecornn.echo.counted_storages import Counted, Functions
from ecornn.echo.graph import NotUnderstood
from ecornn.echo.lean.mode import without_lean_functions
from ecornn.echo.model_call import ModelCall
from ecornn.echo.own_again import run_again_later
from ecornn.echo.own_checkpoints import OwnCheckpoints
from ecornn.echo.recorded import Pass, Recorded, key_of
from ecornn.echo.replay import Code, callable_of
from ecornn.echo.starts import Starts
from ecornn.echo.twin import (
    alone,
    device_of,
    keeping_unseen,
    leaving_no_trace,
    without_hooks_on_what_is_kept,
    without_numbers,
)
from ecornn.echo.weight_sums import WeightSums
from ecornn.errors import InvalidInput


@dataclass(frozen=True)
class Rehearsed:
    """`most`: bytes that both passes hold at once beside `held`, which are there before: weights,
    buffers and what the model is called with."""

    most: int
    held: int
    #: By place among the calls of recurrent layers, of those that could be run again: the seconds
    #: that it takes; and the bytes at the peak of what those made that are not run again.
    layers: Mapping[int, float] = field(default_factory=dict)
    at_peak: Mapping[int, int] = field(default_factory=dict)


#: Of what torch has traced of a part, and the forms of its inputs: what runs.
Find = Callable[[fx.GraphModule, Sequence[Any]], Recorded]


def among(path: str, compiled: Sequence[Recorded]) -> Find:
    """What was compiled for a part, the latest last."""

    def find(module: fx.GraphModule, inputs: Sequence[Any]) -> Recorded:
        key = key_of(module, inputs)
        found = [one for one in compiled if one.key == key]
        if not found:
            raise NotUnderstood(f"{path} was not compiled for what it is called with here")
        return found[-1]

    return find


@dataclass(frozen=True)
class Part:
    """A part that is compiled. `starts`: see `Starts`. `common`: is told of the part's calls, for
    whoever compiles it meanwhile."""

    find: Find
    starts: Places | None = None
    common: CommonInputs | None = None


class Rehearsal:
    """Steps of a copy of a model, one after the other. `parts`: by path, what is compiled. `again`:
    by path of a layer of this package that is run again, whether it keeps its states alone then."""

    def __init__(
        self,
        model: nn.Module,
        call: ModelCall,
        parts: Mapping[str, Part],
        again: Mapping[str, bool],
    ) -> None:
        self.mode = mode = Counted(device_of(model).type)
        self.model = without_numbers(model, mode)
        self.parts, self._model_call, self._traced = parts, call, False
        self._runs: dict[int, Callable[[list[Any]], Any]] = {}
        self._sums: dict[int, WeightSums] = {}
        self._made: dict[Any, WeightSums] = {}  # by nodes of the call under way
        self._starts = [self._compile(path, part) for path, part in parts.items()]
        for path, states_alone in again.items():
            layer = self.model.get_submodule(path)
            layer.__dict__["forward"] = run_again_later(layer, states_alone=states_alone)
        self._given = tree_map(mode.held, (call.args, call.kwargs))
        weights = [mode.held(t) for t in (*self.model.parameters(), *self.model.buffers())]
        self._leaves = [*weights, *(t for t in tree_leaves(self._given) if isinstance(t, Tensor))]
        self._held_bytes = mode.bytes_held(self._leaves)

    def _compile(self, path: str, part: Part) -> Starts:
        """As `Regions` does."""
        module, starts = self.model.get_submodule(path), Starts(part.starts)
        run = torch.compile(alone(module.forward), backend=self._backend(path), dynamic=False)
        run = self._noting_calls(run)
        if part.common is not None:
            run = noting_calls(run, part.common)
        run = without_lean_functions(starts.around(run))
        module.__dict__["forward"] = OwnCheckpoints().heeded(run, module.forward)
        return starts

    def end(self) -> None:
        """torch's compiler keeps the backend, and what it refers to, for as long as it runs."""
        self.parts, self.model, self._given, self._leaves = {}, nn.Module(), None, []
        self._runs.clear()
        self._sums.clear()
        self._made.clear()

    def step(self, functions: Functions | None) -> Rehearsed:
        """`functions`: replaces functions while the model is called."""
        ledger = self.mode.ledger
        with _understood(), self._model_call.around(), without_hooks_on_what_is_kept():
            if not self._traced:  # the first call is for torch to trace the compiled parts
                self._called_model(functions)
                self._traced = True
            for tensor in self._leaves:
                tensor.grad = None
            before = ledger.begin()
            results, seconds = self._called_model(functions)
            roots = [t for t in tree_leaves(results) if isinstance(t, Tensor) and t.requires_grad]
            if roots:
                with self.mode:
                    torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])
            return Rehearsed(ledger.most - before, self._held_bytes, seconds, ledger.owned_at_most)

    def why_several_graphs(self) -> str | None:
        """Why torch's compiler does not make one graph of the model's call; None if it does."""
        args, kwargs = self._given
        run = torch.compile(
            alone(self.model.forward), backend=lambda m, _: m.forward, fullgraph=True, dynamic=False
        )
        try:
            with (
                self._model_call.around(),
                keeping_unseen(),
                self.mode,
                self._model_call.context(),
            ):
                run(*args, **kwargs)
        except (Unsupported, UserError) as error:
            return str(error).splitlines()[0]
        return None

    def _called_model(self, functions: Functions | None) -> tuple[Any, dict[int, float]]:
        args, kwargs = self._given
        for one in self._starts:
            one.next_is_first = True
        with self.mode, self._model_call.context():
            if functions is None:
                return self.model(*args, **kwargs), {}
            lean = functions(self.mode.ledger)
            with lean:
                result = self.model(*args, **kwargs)
            lean.end_of_call()
            return result, lean.seconds

    def _backend(self, path: str) -> Callable[..., Any]:
        """For torch.compile: what was compiled for a graph is found, or compiled now."""

        def find(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            # compiling is no part of the step, and is done as outside of a rehearsal
            self.mode.ledger.ignoring = True
            try:
                with unset_fake_temporarily():
                    found = self.parts[path].find(module, inputs)
            finally:
                self.mode.ledger.ignoring = False
            return lambda *given: self._called(found, given)

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

    def _noting_calls(self, run: Callable[..., Any]) -> Callable[..., Any]:
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
        ctx.formats = [suggest_memory_format(r) if isinstance(r, Tensor) else None for r in results]
        ctx.numbers = [value for value in kept if not isinstance(value, Tensor)]
        ctx.save_for_backward(*(value for value in kept if isinstance(value, Tensor)))
        ctx.mark_non_differentiable(*(r for r in results if not _differentiable(r)))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> Any:
        # as AOTAutograd does: what lies otherwise than the result takes memory of its own, such as
        # what is expanded
        with ctx.rehearsal.mode:
            given = tangents[0] if isinstance(tangents[0], list) else tangents
            arriving = [
                tangent.contiguous(memory_format=format)
                for tangent, format in zip(given, ctx.formats, strict=True)
                if tangent is not None
            ]
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


@contextmanager
def rehearsal_of(
    model: nn.Module,
    call: ModelCall,
    parts: Mapping[str, Part],
    again: Mapping[str, bool] | None = None,
) -> Iterator[Rehearsal]:
    """Raises `NotUnderstood` where it is not possible, from its steps too."""
    with leaving_no_trace():
        with _understood():
            rehearsal = Rehearsal(model, call, parts, again or {})
        try:
            yield rehearsal
        finally:
            rehearsal.end()


@contextmanager
def _understood() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever the model raises without numbers
        inner = getattr(error, "inner_exception", error)  # torch's compiler wraps what it meets
        if isinstance(inner, InvalidInput):  # what is asked of a part that is compiled meanwhile
            raise inner from None
        said = str(inner).splitlines()[0] if str(inner) else type(inner).__name__
        raise NotUnderstood(f"the step could not be rehearsed: {said}") from error


def why_several_graphs(model: nn.Module, call: ModelCall) -> str | None:
    """Why torch's compiler makes several graphs of a call; None if it makes one, or nobody can tell
    before the model runs."""
    try:
        with rehearsal_of(model, call, {}) as rehearsal, _understood():
            return rehearsal.why_several_graphs()
    except NotUnderstood:
        return None


def rehearsed(
    model: nn.Module,
    call: ModelCall,
    parts: Mapping[str, Sequence[Recorded]],
    functions: Functions | None,
    starts: Mapping[str, Places] | None = None,
    again: Mapping[str, bool] | None = None,
) -> int:
    """The most bytes that both passes of a call hold at once beside what is there before.
    `parts`: by path, what their compiled graphs run; `starts`: by path, see `Starts`; `again`: as
    in `Rehearsal`."""
    begins = starts or {}
    found = {
        path: Part(among(path, compiled), begins.get(path)) for path, compiled in parts.items()
    }
    with rehearsal_of(model, call, found, again) as rehearsal:
        return rehearsal.step(functions).most
