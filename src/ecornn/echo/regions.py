"""Parts of a model that it calls many times in one forward pass, such as a decoder's step.

Unrolled, a loop over 50 steps is a graph of thousands of operations, and another one for every
length. Such a part is compiled by itself instead, once, and reused for all steps and lengths; the
rest of the model runs as it is written. The part is planned for as many calls as were seen: what
one call keeps is there as many times when the backward passes begin.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from functools import partial
from threading import RLock
from typing import Any

import torch
from torch import nn

from ecornn.echo.backend import EchoBackend
from ecornn.echo.calls_noted import CommonInputs, noting_calls
from ecornn.echo.counted import Calls, counted, counted_with_gradients, counted_without_numbers
from ecornn.echo.graph import NotUnderstood
from ecornn.echo.lean.alone import AssumedLoan
from ecornn.echo.lean.mode import LeanFunctions, Replaced, without_lean_functions
from ecornn.echo.lean.needs import missing
from ecornn.echo.lean.worth import Priced, Shares
from ecornn.echo.options import Options
from ecornn.echo.own_checkpoints import OwnCheckpoints
from ecornn.echo.rehearse import ModelCall, rehearsed
from ecornn.echo.report import GraphReport
from ecornn.echo.starts import Beginnings
from ecornn.echo.twin import alone, device_of
from ecornn.errors import InvalidInput

#: A part that is called less often is left to the graph of the whole: unrolling is no burden then.
FEWEST_CALLS = 4


def named(model: nn.Module, region: str | nn.Module) -> str:
    """The path of a part."""
    path: str
    for path, part in model.named_modules():
        if path and (part is region or path == region):
            return path
    parts = ", ".join(path for path, _ in model.named_children()) or "none"
    raise InvalidInput(
        "regions", repr(region), "a part of the model or its path", f"its parts are: {parts}"
    )


class Regions:
    """Runs a model, its regions compiled. Without regions the whole model is compiled."""

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        given: tuple[str, ...] | None,
        dynamic: bool | None,
        lean: bool | str = True,
    ) -> None:
        self.model, self.options, self.dynamic = model, options, dynamic
        self.lean = lean if missing() is None else False
        self.calls: dict[str, int] | None = None if given is None else dict.fromkeys(given, 0)
        self.given = given is not None
        #: Some parts are compiled, or none, and the rest runs as it is written.
        self.divided = self.given and bool(given)
        self.untraced = False  # that is because of layers which torch's compiler leaves alone
        self.why_wet: str | None = None
        self.replaced = Replaced()
        self.shares = Shares()
        self.first_call: ModelCall | None = None
        #: By path: which of the tensors that a part is called with are the same at all calls.
        self.common: dict[str, frozenset[int]] = {}
        self.beginnings, self.checkpoints = Beginnings(), OwnCheckpoints()
        self._backends: dict[str, EchoBackend] = {}
        #: By path: the `forward` that it was made of, and what was made of it.
        self._compiled: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
        self._lock = RLock()
        self._inside = 0
        self._before: list[tuple[nn.Module, Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.calls is None or any(count == 0 for count in self.calls.values()):
            counts = self._counted_dry(args, kwargs)
            if counts is None:
                return self._counted_wet(args, kwargs)
            self._settle(counts)
        if self.beginnings.unseen and self.divided and torch.is_grad_enabled():
            self._see_beginnings(args, kwargs)
        if not self.divided:
            return self._of("", self.model, 1)(*args, **kwargs)
        with self._in_place(), self.checkpoints.within_call():
            return self._called(args, kwargs)

    def _called(self, args: Any, kwargs: Any) -> Any:
        if not self.lean:
            return self.model(*args, **kwargs)
        functions = LeanFunctions(self.replaced, rerun_layers=self._reruns_layers)
        try:
            with functions:
                return self.model(*args, **kwargs)
        finally:
            functions.end_of_call()

    @property
    def _reruns_layers(self) -> bool:
        kind = self.options.memory.kind
        nearly_free = kind == "auto" and self.shares.nearly_free
        return self.lean == "layers" or kind == "min" or nearly_free

    def _settle(self, counts: dict[str, int]) -> None:
        if self.calls is None:
            often = {
                path: count
                for path, count in counts.items()
                if count >= FEWEST_CALLS and worth_compiling(self.model.get_submodule(path))
            }
            self.calls = {path: count for path, count in often.items() if not _within(path, often)}
            self.divided = bool(self.calls)
            if not self.divided and runs_untraced_layers(self.model):
                self.divided = self.untraced = True
                self.calls = {path: counts[path] for path in traceable(self.model, counts)}
        else:
            self.calls = {path: max(counts.get(path, 0), 1) for path in self.calls}

    def _counted_dry(self, args: Any, kwargs: Any) -> dict[str, int] | None:
        """Calls of the parts, by a run of a copy on fake tensors: it takes no memory, computes
        nothing and leaves the model as it is. None where the model's course depends on its numbers,
        or it cannot be copied."""
        mode = Priced()
        self.why_wet = None
        try:
            given = ModelCall.of(args, kwargs, device_of(self.model))
            calls = counted_without_numbers(self.model, args, kwargs, mode)
        except Exception as error:  # whatever the model raises without numbers
            self.why_wet = str(error).splitlines()[0] if str(error) else type(error).__name__
            return None
        self.shares, self.first_call, self.common = mode.shares, given, calls.common()
        if not any(places.chosen for places in calls.fed_back().values()):
            self.beginnings.note(self.model, Calls())
        return calls.counts

    def _see_beginnings(self, args: Any, kwargs: Any) -> None:
        """At the first call with gradients, where some part is handed results of its own."""
        try:
            calls = counted_with_gradients(self.model, args, kwargs)
        except Exception:  # whatever the model raises without numbers: then nothing is known
            calls = Calls()
        self.beginnings.note(self.model, calls)

    def _counted_wet(self, args: Any, kwargs: Any) -> Any:
        """One call of the model as it is, its parts' calls counted."""
        with counted(self.model, compare=False) as calls:
            result = self.model(*args, **kwargs)
        self._settle(calls.counts)
        self.beginnings.note(self.model, calls)  # nothing: it was not asked for
        return result

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """The regions' `forward` is the compiled one for the time of a call, or of several at once
        in threads."""
        assert self.calls is not None
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._exchange(self.calls)
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    self._exchange_back()

    def _exchange(self, calls: dict[str, int]) -> None:
        try:
            for path, count in calls.items():
                part = self.model.get_submodule(path)
                compiled = self._of(path, part, count)
                self._before.append((part, part.__dict__.get("forward")))
                part.__dict__["forward"] = compiled
            self.beginnings.begin(self.model)
        except BaseException:
            self._inside -= 1
            self._exchange_back()
            raise

    def _exchange_back(self) -> None:
        while self._before:
            part, before = self._before.pop()
            if before is None:
                part.__dict__.pop("forward", None)
            else:
                part.__dict__["forward"] = before

    def _of(self, path: str, part: nn.Module, calls: int) -> Callable[..., Any]:
        """A part that took another's place, or has another `forward`, is compiled anew."""
        known = self._compiled.get(path)
        inside = known is not None and part.__dict__.get("forward") is known[1]
        if known is None or (not inside and known[0] != part.forward):
            beside = self._seconds_beside() / calls if path else 0.0
            told = path or type(part).__name__
            common = CommonInputs(self.common.get(path, frozenset()))
            backend = EchoBackend(
                self.options, calls=calls, beside_s=beside, part=told, common=common
            )
            backend.recorded = [] if path else None
            self._backends[path] = backend
            run = alone(part.forward if path else part)
            compiled = torch.compile(run, backend=backend, dynamic=self.dynamic)
            if calls > 1:
                compiled = noting_calls(compiled, common)
                compiled = self.beginnings.of(path).around(compiled)
            compiled = self.checkpoints.heeded(without_lean_functions(compiled), part.forward)
            known = part.forward, compiled
            self._compiled[path] = known
        return known[1]

    def _seconds_beside(self) -> float:
        """Of a step, outside the regions, each of which has its part of it to be measured by."""
        return self.shares.step_outside(self.calls or ()) / max(1, len(self.calls or ()))

    def rehearsed(self) -> int:
        """The most that both passes of a call like the first one hold beside what is there before
        it, by a rehearsal. Raises where that is not possible."""
        if self.first_call is None:
            called = self.calls is not None and any(self.calls.values())
            objects = "it is called with objects that may hold tensors, and these are not kept"
            raise NotUnderstood(self.why_wet or (objects if called else "not called yet"))
        parts = {path: backend.recorded or [] for path, backend in self._backends.items()}
        functions, first = self._assumed if self.lean else None, self.beginnings.of_call(self.model)
        return rehearsed(self.model, self.first_call, parts, functions, first)

    def _assumed(self) -> LeanFunctions:
        """The functions that are replaced in a rehearsal."""
        private = 0 < self.replaced.calls == self.replaced.private
        lend = partial(AssumedLoan, private=private)
        return LeanFunctions(Replaced(), rerun_layers=self._reruns_layers, lend=lend)

    def graphs(self) -> list[GraphReport]:
        return [told for backend in self._backends.values() for told in backend.report.graphs]

    def told(self) -> list[str]:
        """How the model was divided, in sentences."""
        if self.calls is None:
            return ["not called yet: nothing is compiled"]
        if not self.divided:
            often = f"no part of it, single layers aside, is called {FEWEST_CALLS} times or more"
            return [f"the whole model is compiled: {'as asked for' if self.given else often}"]
        how = "named by the caller" if self.given else "found at the first call"
        parts = "; ".join(f"{path}, {count} times" for path, count in self.calls.items())
        found = [f"called in one forward pass, {how}, each compiled once: {parts or 'none'}"]
        if self.untraced:
            found.append("torch's compiler does not take recurrent layers of torch.nn")
        if self.why_wet is not None:
            found.append(f"the first call ran without Echo, to count those calls: {self.why_wet}")
        found += self.checkpoints.told()
        unlean = f"no function of it is replaced: {missing() or 'as asked for'}"
        rest = self.replaced.told() if self.lean else [unlean]
        if self.lean and self.replaced.layers:
            rest.append(f"that is estimated to take {self.shares.of_step:.1%} of a step")
        return [*found, "the rest of the model runs as it is written", *rest]


def worth_compiling(part: nn.Module) -> bool:
    """A single layer of torch.nn, or a part without weights, leaves nothing to plan by itself: such
    a part, an activation used all over a model among them, stays in the graph of the whole."""
    single = type(part).__module__.startswith("torch.nn") and not list(part.children())
    return not single and any(True for _ in part.parameters())


def runs_untraced_layers(model: nn.Module) -> bool:
    """torch's compiler leaves its own recurrent layers alone, and with them every function that
    calls them in a loop."""
    allowed = getattr(torch._dynamo.config, "allow_rnn", False)
    return not allowed and any(isinstance(part, nn.RNNBase) for part in model.modules())


def traceable(model: nn.Module, counts: dict[str, int]) -> list[str]:
    """The largest parts that were called and have no such layer."""
    found = [
        path
        for path in counts
        if not runs_untraced_layers(part := model.get_submodule(path)) and worth_compiling(part)
    ]
    return [path for path in found if not _within(path, found)]


def _within(path: str, others: Container[str]) -> bool:
    """Is a part within another?"""
    parents = (path.rsplit(".", k)[0] for k in range(1, path.count(".") + 1))
    return any(parent in others for parent in parents)
