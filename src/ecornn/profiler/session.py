"""`profile`: the public way in, as a call and as a context manager."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from types import AsyncGeneratorType, CoroutineType, GeneratorType, TracebackType
from typing import Any, overload

import torch
from torch import nn
from torch.optim import Optimizer

from ecornn.errors import EcornnError, InvalidInput
from ecornn.garbage import no_garbage_collected
from ecornn.profiler.allocator import EVERY
from ecornn.profiler.assemble import assemble, assemble_later
from ecornn.profiler.collect import Collector
from ecornn.profiler.history import Recorder
from ecornn.profiler.inventory import Contents, contents_of
from ecornn.profiler.kept import missing
from ecornn.profiler.light import LightCollector
from ecornn.profiler.model import MemoryReport

DEVICES = ("cpu", "cuda", "meta")


class Profile:
    """Observes what runs inside `with`; `report` is there afterwards, also if that raised.

    What was raised goes on unchanged, with the report as its attribute `memory_report` if it takes
    attributes.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: tuple[Optimizer, ...],
        *,
        every: int = EVERY,
        what_if: bool = False,
        operators: bool = False,
    ) -> None:
        """`every`: 1 has the allocator's count after each operator, at twice the time."""
        self._model, self._optimizers, self._every = model, optimizers, every
        self._what_if, self._operators = what_if, operators or what_if
        self._collector: Collector | LightCollector | None = None
        self._report: MemoryReport | None = None
        self._used = False

    @property
    def report(self) -> MemoryReport:
        if self._report is None:
            raise NotObserved("the report is made when the observed block ends; read it after that")
        return self._report

    def __enter__(self) -> Profile:
        if self._used:
            raise NotObserved("this profile has been used; make another one with profile(…)")
        # A search among all that the process has took 160 ms, three times in 31 profiles of a
        # ResNet-50 on a CPU. In the step itself it is the program's own affair.
        with no_garbage_collected():
            self._collector = self._make_collector()
            self._used = True
            try:
                self._collector.start()
            except BaseException:
                self._collector.close()
                raise
        return self

    def _make_collector(self) -> Collector | LightCollector:
        """By the allocator's history where there is one, unless every operator is asked for."""
        contents = contents_of(self._model)
        device = device_of(contents)
        reason = None
        if device.type == "cuda" and not self._operators and not contents.are_fake:
            reason = LightCollector.missing()
            if reason is None:
                given = (self._model, self._optimizers, device, Recorder(device))
                return LightCollector(*given, contents)
        collector = Collector.made_for(self._model, self._optimizers, device, self._every)
        collector.no_history = reason
        if self._what_if:
            from ecornn.profiler.trace import Trace  # brings Echo, and torch's compiler with it

            collector.trace = Trace(collector.ledger)
        return collector

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        collector = self._collector
        assert collector is not None
        # The report is all that stays: neither the model nor what was recorded.
        self._collector = None
        del self._model, self._optimizers
        with no_garbage_collected():
            collector.stop(failed=error is not None)
            self._report = (
                assemble_later(collector.taken(), error)
                if isinstance(collector, LightCollector)
                else assemble(collector.observation(), error)
            )
        if error is not None:
            with suppress(AttributeError):  # of exceptions that take none
                error.memory_report = self._report  # type: ignore[attr-defined]

    def of(self, step: Callable[[], Any]) -> MemoryReport:
        """One call of `step`, observed."""
        with self:
            run_to_end(step)
        return self.report


def run_to_end(step: Callable[[], Any]) -> None:
    """All of it, if it is a generator. The loss is the step's, and given up with it."""
    result = step()
    if isinstance(result, GeneratorType):
        for _ in result:
            pass
    elif isinstance(result, CoroutineType | AsyncGeneratorType):
        if isinstance(result, CoroutineType):
            result.close()  # else Python warns that nobody has awaited it
        raise InvalidInput(
            "step",
            f"an asynchronous function, {getattr(step, '__name__', 'step')}, of which nothing ran",
            "a function that has done its work when it returns",
            "pass one that calls asyncio.run",
        )


class NotObserved(EcornnError, RuntimeError):
    """A report was asked for where there is none."""


@overload
def profile(
    step: Callable[[], Any],
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    *,
    what_if: bool = False,
    operators: bool = False,
) -> MemoryReport: ...


@overload
def profile(
    step: None = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    *,
    what_if: bool = False,
    operators: bool = False,
) -> Profile: ...


def profile(
    step: Callable[[], Any] | None = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    *,
    what_if: bool = False,
    operators: bool = False,
) -> MemoryReport | Profile:
    """Where the memory of one step goes.

    `step()` is called once; or, without it, `with profile(model=model) as observed:` observes the
    block and `observed.report` tells. A step that is a generator is run to its end. `optimizer`:
    one or several; those that take a step meanwhile are found without it, but what they hold
    before that is then known only from there on. With `what_if`, the report also says for each
    module what making its feature maps again would free and cost, and the step takes longer.

    On CUDA the allocator's own history is read, which slows a step least. With `operators`, as
    everywhere else, every operator is observed in Python: then each tensor's shape and the operator
    that made it are known, and time is counted in operators.
    """
    check(step, model)
    assert model is not None
    profiled = Profile(model, read_optimizers(optimizer), what_if=what_if, operators=operators)
    return profiled if step is None else profiled.of(step)


def read_optimizers(given: Any) -> tuple[Optimizer, ...]:
    """One, several or none."""
    if given is None or isinstance(given, Optimizer):
        return () if given is None else (given,)
    found = tuple(given) if isinstance(given, Iterable) else (given,)
    for one in found:
        if not isinstance(one, Optimizer):
            remedy = "leave out what is none: an optimizer is found when it takes a step"
            expected = "a torch.optim.Optimizer, or several"
            raise InvalidInput("optimizer", repr(type(one)), expected, remedy)
    return found


def check(step: Any, model: Any) -> None:
    if step is not None and not callable(step):
        raise InvalidInput("step", repr(type(step)), "a function without arguments", "pass one")
    if not isinstance(model, nn.Module):
        remedy = "pass the module whose layers are to be told apart"
        raise InvalidInput("model", repr(type(model)), "a torch.nn.Module", remedy)
    reason = missing()
    if reason is not None:
        raise InvalidInput("step", reason, "torch 2.11 or newer", "install a supported version")


def device_of(model: Contents) -> torch.device:
    """The one that holds most of the model."""
    device = model.main_device or torch.get_default_device()
    if device.type not in DEVICES:
        remedy = "move the model"
        raise InvalidInput("model", f"weights on {device}", f"one of {', '.join(DEVICES)}", remedy)
    return device
