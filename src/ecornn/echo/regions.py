"""Parts of a model that it calls many times in one forward pass, such as a decoder's step.

Unrolled, a loop over 50 steps is a graph of thousands of operations, and another one for every
length. Such a part is compiled by itself instead, once, and reused for all steps and lengths; the
rest of the model runs as it is written. The part is planned for as many calls as were seen: what
one call keeps is there as many times when the backward passes begin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import RLock
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ecornn.echo.backend import EchoBackend
from ecornn.echo.graph import NotUnderstood
from ecornn.echo.lean.alone import AssumedLoan
from ecornn.echo.lean.mode import LeanFunctions, Replaced, without_lean_functions
from ecornn.echo.lean.needs import missing
from ecornn.echo.lean.worth import Priced, Shares
from ecornn.echo.model_call import ModelCall
from ecornn.echo.options import Options
from ecornn.echo.parts import (
    FEWEST_CALLS,
    called_often,
    counted,
    runs_untraced_layers,
    traceable,
)
from ecornn.echo.rehearse import rehearsed
from ecornn.echo.report import GraphReport
from ecornn.echo.twin import alone, device_of, draws_kept, fake, without_numbers
from ecornn.echo.weight_sums import noting_calls


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
        if not self.divided:
            return self._of("", self.model, 1)(*args, **kwargs)
        with self._in_place():
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
            self.calls = called_often(self.model, counts)
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
            with draws_kept():
                twin = without_numbers(self.model, mode)
                args, kwargs = tree_map(lambda value: fake(value, mode), (args, kwargs))
                with counted(twin) as counts, mode.parts_of(twin), mode, torch.no_grad():
                    twin(*args, **kwargs)
        except Exception as error:  # whatever the model raises without numbers
            self.why_wet = str(error).splitlines()[0] if str(error) else type(error).__name__
            return None
        self.shares, self.first_call = mode.shares, given
        return counts

    def _counted_wet(self, args: Any, kwargs: Any) -> Any:
        """One call of the model as it is, its parts' calls counted."""
        with counted(self.model) as counts:
            result = self.model(*args, **kwargs)
        self._settle(counts)
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
            backend = EchoBackend(self.options, calls=calls, beside_s=beside, part=told)
            backend.recorded = [] if path else None
            self._backends[path] = backend
            run = alone(part.forward if path else part)
            compiled = torch.compile(run, backend=backend, dynamic=self.dynamic)
            if calls > 1:
                compiled = noting_calls(compiled)
            known = part.forward, without_lean_functions(compiled)
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
        return rehearsed(self.model, self.first_call, parts, self._assumed if self.lean else None)

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
        unlean = f"no function of it is replaced: {missing() or 'as asked for'}"
        rest = self.replaced.told() if self.lean else [unlean]
        if self.lean and self.replaced.layers:
            rest.append(f"that is estimated to take {self.shares.of_step:.1%} of a step")
        return [*found, "the rest of the model runs as it is written", *rest]
