"""Parts of a model that it calls many times in one forward pass, such as a decoder's step.

Unrolled, a loop over 50 steps is a graph of thousands of operations, and another one for every
length. Such a part is compiled by itself instead, once, and reused for all steps and lengths; the
rest of the model runs as it is written. The part is planned for as many calls as were seen: what
one call keeps is there as many times when the backward passes begin.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from functools import partial
from threading import RLock
from typing import Any

import torch
from torch import nn

from ecornn.echo.backend import EchoBackend
from ecornn.echo.calls_noted import CommonInputs, noting_calls
from ecornn.echo.codegen import choose_codegen, start_compilers
from ecornn.echo.counted import Calls, counted, counted_with_gradients, counted_without_numbers
from ecornn.echo.counted_storages import Functions, NotedFunctions
from ecornn.echo.exchanged import Exchanged
from ecornn.echo.frozen import for_what_is_trained
from ecornn.echo.graph import NotUnderstood
from ecornn.echo.lean.alone import AssumedLoan
from ecornn.echo.lean.layers import EVERY_CALL, NO_CALL
from ecornn.echo.lean.mode import LeanFunctions, Replaced, without_lean_functions
from ecornn.echo.lean.needs import missing
from ecornn.echo.lean.worth import Priced, Shares
from ecornn.echo.model_call import OBJECTS, ModelCall, asks_for_gradients
from ecornn.echo.options import BUDGETS, Memory, Options
from ecornn.echo.own_again import able, able_outside, run_again_later
from ecornn.echo.own_checkpoints import OwnCheckpoints
from ecornn.echo.own_kernels import OwnKernels, has_layers_of_torch, run_on_own_kernels
from ecornn.echo.parts import (
    called_often,
    has_free_layers,
    runs_untraced_layers,
    traceable,
)
from ecornn.echo.regions_told import told_of_regions
from ecornn.echo.rehearse import rehearsed, why_several_graphs
from ecornn.echo.report import GraphReport
from ecornn.echo.scarce import in_launches_if_scarce
from ecornn.echo.starts import Beginnings
from ecornn.echo.step_budget import Asked, Step, cannot_be_promised, within_budget
from ecornn.echo.twin import alone, device_of, has_hooks_on_what_is_kept
from ecornn.ops.keeping import keeping_states_alone

#: What the host takes for one call of a compiled part and its backward pass, beside launches. An
#: estimate on the low side, not timed by itself: a translator's step of 50 such calls took 75 to
#: 105 ms on hosts of H200s, replayed from a graph 18.
CALL_S = 1e-3
#: Beside why a call ran as it is written.
NOT_WITHIN = "; calls within a checkpoint, or other hooks on saved tensors, are not counted"


@dataclass(frozen=True)
class _CountedDry:
    """The calls of a model's parts, the times of a step, and the call itself."""

    calls: Calls
    shares: Shares
    call: ModelCall | None


class Regions:
    """Runs a model, its regions compiled. Without regions the whole model is compiled."""

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        given: tuple[str, ...] | None,
        dynamic: bool | None,
        lean: bool | str = True,
        recurrent: str = "auto",
    ) -> None:
        self.model, self.options, self.dynamic = model, options, dynamic
        self.recurrent = recurrent
        self.own: OwnKernels | None = None  # those of torch's layers that were made to run on them
        self.why_not_own: str | None = None  # none was, nor was it asked for
        self.lean = lean if missing() is None else False
        self.calls: dict[str, int] | None = None if given is None else dict.fromkeys(given, 0)
        self.given = given is not None
        #: Some parts are compiled, or none, and the rest runs as it is written.
        self.divided = self.given and bool(given)
        self.untraced = False  # that is because of layers which torch's compiler leaves alone
        self.why_wet: str | None = None
        #: Why torch's compiler makes several graphs of it; asked where a budget is one of them all.
        self.why_several: str | None = None
        self._known_as_one = False
        self.why_twice: str | None = None  # a loop that begins with zeros may be compiled so often
        self.replaced = Replaced()
        self.shares = Shares()
        #: The one that is rehearsed: the first, or with a budget the first that asks for gradients.
        self.first_call: ModelCall | None = None
        #: With a budget, how a step is run; was it planned for scores that nobody else refers to?
        self.step: Step | None = None
        self._taken_for_private = False
        self._nearly_free: Container[int] = NO_CALL
        #: Paths of those that are run again, around the parts.
        self.own_again: list[str] = []
        #: Parts whose inputs the model writes to once they were called.
        self.written_later: frozenset[str] = frozenset()
        #: By path: which of the tensors that a part is called with are the same at all calls.
        self.common: dict[str, frozenset[int]] = {}
        self.beginnings, self.checkpoints = Beginnings(), OwnCheckpoints()
        self._backends: dict[str, EchoBackend] = {}
        #: By path: the `forward` that it was made of, and what was made of it.
        self._compiled: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
        self._lock = RLock()
        self._exchanged = Exchanged()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._counted and not self._count(args, kwargs):
            return self._counted_wet(args, kwargs)
        if self.beginnings.unseen and self.divided and torch.is_grad_enabled():
            self._see_beginnings(args, kwargs)
        if not self.divided:
            self._see_graphs(args, kwargs)
        if not self.divided:
            return self._of("", self.model, 1)(*args, **kwargs)
        self._plan_for_budget(args, kwargs)
        with self._exchanged(self._forwards), self.checkpoints.within_call():
            return self._called(args, kwargs)

    @property
    def _counted(self) -> bool:
        return self.calls is not None and all(self.calls.values())

    def _count(self, args: Any, kwargs: Any) -> bool:
        """Whether the calls of the parts are known now. One thread counts, others wait for it:
        layers become ours meanwhile."""
        with self._lock:
            if self._counted:
                return True
            weights = list(self.model.parameters())
            generated = choose_codegen(self.options.codegen, weights)[0] == "inductor"
            if generated:
                start_compilers(weights)  # ready when the calls are counted and a part is traced
            ours = self._with_own_kernels(args, kwargs) if generated else None
            found = ours or self._counted_dry(args, kwargs)
            if isinstance(found, str):
                self.why_wet = found
                return False
            self._settle(self._taken_over(found))
            return True

    def _called(self, args: Any, kwargs: Any) -> Any:
        if not self.lean:
            return self.model(*args, **kwargs)
        functions = LeanFunctions(self.replaced, again=self.again)
        try:
            with functions, keeping_states_alone(self.states_alone):
                return self.model(*args, **kwargs)
        finally:
            functions.end_of_call()

    @property
    def again(self) -> Container[int]:
        """The places of calls of recurrent layers that are run again."""
        if self.lean == "layers" or self.options.memory.kind == "min":
            return EVERY_CALL
        return self._nearly_free if self.step is None else self.step.way.again

    @property
    def states_alone(self) -> bool:
        """Do layers of this package around the parts keep no gates, unless they were told to?"""
        if not self.lean:
            return False
        least = self.options.memory.kind == "min"
        return least if self.step is None else self.step.way.states_alone

    def _see_graphs(self, args: Any, kwargs: Any) -> None:
        """Graphs that torch's compiler makes of a whole model run in one step, and a budget is one
        of all of them: then the model is a part of itself, and its step is rehearsed."""
        if self.options.memory.kind not in BUDGETS or self._known_as_one:
            return
        with self._lock:
            if self.divided or not asks_for_gradients(self.model, args, kwargs):
                return
            call = ModelCall.of(args, kwargs, device_of(self.model))
            self.why_several = None if call is None else why_several_graphs(self.model, call)
            self._known_as_one = self.why_several is None
            if self.why_several is not None:
                self.calls, self.divided = {"": 1}, True

    def _plan_for_budget(self, args: Any, kwargs: Any) -> None:
        """A budget is one of the whole step. It is planned when a call asks for gradients, before
        anything of it runs. Raises where it cannot be met, or nobody can tell."""
        if self.options.memory.kind not in BUDGETS:
            return
        with self._lock:
            known = self.step is not None and (self._private or not self._taken_for_private)
            if known or not asks_for_gradients(self.model, args, kwargs):
                return
            self._taken_for_private = self._private
            call = ModelCall.of(args, kwargs, device_of(self.model))
            if call is None:
                raise cannot_be_promised(self.options.memory, OBJECTS)
            calls = self.calls or {}
            asked = Asked(
                *(self.model, call, self.options.memory, calls, self._backend_of),
                functions=self._assumed if self.lean else None,
                every=self.lean == "layers",
                starts=self.beginnings.of_call(self.model),
                own=bool(self.lean) and has_free_layers(self.model, calls),
            )
            self.step, self.first_call = within_budget(asked), call
            self.calls = {path: calls[path] for path in self.step.way.parts}
            self._compiled.clear()
            self._backends.clear()

    def _settle(self, counts: dict[str, int]) -> None:
        if self.calls is None:
            calls = called_often(self.model, counts)
            self.divided = bool(calls)
            if not self.divided and runs_untraced_layers(self.model):
                self.divided = self.untraced = True
                calls = {path: counts[path] for path in traceable(self.model, counts)}
        else:
            calls = {path: max(counts.get(path, 0), 1) for path in self.calls}
        if self.options.memory.kind == "auto":
            self._nearly_free = self.shares.nearly_free(calls)
        if self.divided and self.lean and self.own is not None:
            paths = able_outside(self.model, self.own.served, calls)
            least = self.options.memory.kind == "min"
            self.own_again = paths if least else self.shares.own_nearly_free(paths)
        self.calls = calls  # last: other threads take all the rest for settled by it

    def _counted_dry(
        self, args: Any, kwargs: Any, own: OwnKernels | None = None
    ) -> _CountedDry | str:
        """Calls of the parts, by a run of a copy on fake tensors: it takes no memory, computes
        nothing and leaves the model as it is. Where the model's course depends on its numbers, or
        it cannot be copied, what was said then. With `own`, the copy's recurrent layers are
        ours."""
        mode = Priced()
        try:
            given = ModelCall.of(args, kwargs, device_of(self.model))
            calls = counted_without_numbers(self.model, args, kwargs, mode, own)
        except Exception as error:  # whatever the model raises without numbers
            return str(error).splitlines()[0] if str(error) else type(error).__name__
        return _CountedDry(calls, mode.shares, given)

    def _with_own_kernels(self, args: Any, kwargs: Any) -> _CountedDry | None:
        """Recurrent layers of torch run on our kernels, where these serve them; None where not all
        do. Not with a budget of a model that is divided: there torch's are run again, as few as are
        enough."""
        left = self.recurrent == "torch" or self.lean == "layers"  # asks for torch's to run again
        if self.given or left or not has_layers_of_torch(self.model):
            return None
        own = OwnKernels()
        found = self._counted_dry(args, kwargs, own)
        if isinstance(found, str):
            self.why_not_own = f"a run without numbers, with ours in their place, failed: {found}"
            return None
        own.leave_loops(found.calls.counts)
        given = found.call, self.options.memory, args, kwargs
        own = in_launches_if_scarce(own, self.model, found.calls.counts, *given) or own
        if own.draws is not None and not own.slower:
            self.why_not_own = f"a run without numbers, with torch's, would fail: {own.draws}"
            return None
        all_served = bool(own.served) and len(own.served) == len(own.refused)
        divided = bool(called_often(self.model, found.calls.counts)) or not all_served
        if divided and self.options.memory.kind in BUDGETS:
            self.why_not_own = "with a budget of a divided model they may have to be run again"
            return None
        run_on_own_kernels(self.model, own.served)
        self.own = own
        return found if all_served else None

    def _taken_over(self, found: _CountedDry) -> dict[str, int]:
        self.why_wet = None
        self.shares, self.first_call = found.shares, found.call
        self.common, self.written_later = found.calls.common(), found.calls.written_later()
        if not any(places.chosen for places in found.calls.fed_back().values()):
            self.beginnings.note(self.model, Calls())
        return found.calls.counts

    def _see_beginnings(self, args: Any, kwargs: Any) -> None:
        """At the first call with gradients, where some part is handed results of its own."""
        try:
            calls = counted_with_gradients(self.model, args, kwargs)
        except Exception as error:  # whatever the model raises without numbers
            self.why_twice = str(error).splitlines()[0] if str(error) else type(error).__name__
            calls = Calls()
        self.beginnings.note(self.model, calls)

    def _counted_wet(self, args: Any, kwargs: Any) -> Any:
        """One call of the model as it is, its parts' calls counted. Not within a checkpoint of the
        caller's, whose second run of the model must be like the first."""
        if has_hooks_on_what_is_kept():
            self.why_wet = f"{(self.why_wet or '').removesuffix(NOT_WITHIN)}{NOT_WITHIN}"
            return self.model(*args, **kwargs)
        with counted(self.model, compare=False) as calls:
            result = self.model(*args, **kwargs)
        self._settle(calls.counts)
        self.beginnings.note(self.model, calls)  # nothing: it was not asked for
        if self.divided:
            self._plan_for_budget(args, kwargs)
        return result

    def _forwards(self) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
        """The regions, and what runs in their place."""
        for path, count in (self.calls or {}).items():
            part = self.model.get_submodule(path)
            yield part, self._of(path, part, count)
        for path in self.own_again:
            layer = self.model.get_submodule(path)
            if able(layer):
                yield layer, run_again_later(layer, states_alone=self.states_alone)
        self.beginnings.begin(self.model)

    def _of(self, path: str, part: nn.Module, calls: int) -> Callable[..., Any]:
        """A part that took another's place, or has another `forward`, is compiled anew."""
        known = self._compiled.get(path)
        inside = known is not None and part.__dict__.get("forward") is known[1]
        if known is None or (not inside and known[0] != part.forward):
            asked = self.step.way.parts[path] if self.step else self.options.memory
            backend = self._backend_of(path, asked)
            backend.or_least = self.step is not None
            self._backends[path] = backend
            run = alone(part.forward if self.divided else part)
            compiled = for_what_is_trained(run, backend, self.dynamic, part)
            if calls > 1:
                compiled = noting_calls(compiled, backend.common)
                compiled = self.beginnings.of(path).around(compiled)
            compiled = self.checkpoints.heeded(without_lean_functions(compiled), part.forward)
            known = part.forward, compiled
            self._compiled[path] = known
        return known[1]

    def _backend_of(self, path: str, memory: Memory) -> EchoBackend:
        if not self.divided:
            return EchoBackend(self.options, part=type(self.model).__name__)
        assert self.calls is not None
        calls = self.calls[path]
        backend = EchoBackend(
            replace(self.options, memory=memory),
            calls=calls,
            beside_s=self._seconds_beside() / calls + CALL_S,
            part=path or type(self.model).__name__,
            common=CommonInputs(self.common.get(path, frozenset())),
            among_others=True,
            written_later=path in self.written_later,
            within_step=self.options.memory.kind in BUDGETS,
        )
        backend.recorded = []
        return backend

    def _seconds_beside(self) -> float:
        """Of a step, outside the regions, each of which has its part of it to be measured by."""
        if self.why_several is not None:
            return 0.0
        return self.shares.step_outside(self.calls or ()) / max(1, len(self.calls or ()))

    def rehearsed(self) -> int:
        """The most that both passes of a call like the first one hold beside what is there before
        it, by a rehearsal. Raises where that is not possible."""
        if self.first_call is None:
            called = self.calls is not None and any(self.calls.values())
            raise NotUnderstood(self.why_wet or (OBJECTS if called else "not called yet"))
        parts = {path: backend.recorded or [] for path, backend in self._backends.items()}
        functions = self._assumed(self.again) if self.lean else None
        first = self.beginnings.of_call(self.model)
        with keeping_states_alone(self.states_alone):
            again = dict.fromkeys(self.own_again, self.states_alone)
            return rehearsed(self.model, self.first_call, parts, functions, first, again)

    @property
    def _private(self) -> bool:
        """Nobody else referred to the scores of a cross entropy, so far."""
        return self.replaced.calls == self.replaced.private

    def _assumed(self, again: Container[int]) -> Functions:
        """The functions that are replaced in a rehearsal. Before scores were seen that others refer
        to, it is assumed that there are none."""
        lend = partial(AssumedLoan, private=self._private)
        return partial(NotedFunctions, again=again, lend=lend)

    def graphs(self) -> list[GraphReport]:
        return [told for backend in self._backends.values() for told in backend.report.graphs]

    def told(self) -> list[str]:
        """How the model was divided, in sentences."""
        return told_of_regions(self)
