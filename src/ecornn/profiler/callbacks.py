"""One step in the middle of a training run: in a plain loop, in Lightning, in Transformers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ecornn.errors import EcornnError, InvalidInput
from ecornn.profiler.model import MemoryReport
from ecornn.profiler.session import NotObserved, Profile, profile

Then = Callable[[MemoryReport], Any]


class MissingPackage(EcornnError, ImportError):
    """A framework that was asked for is not installed."""


class ProfileAt:
    """`with watch:` around every step of a loop: profiles the one with this number, counted from 0,
    and does nothing in the others. `then` is called with the report, which stays in `report`."""

    def __init__(
        self,
        number: int,
        model: nn.Module | None = None,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        then: Then | None = None,
    ) -> None:
        if number < 0:
            raise InvalidInput("number", str(number), "0 or more", "the first step is 0")
        self.number, self._model, self._optimizer, self._then = number, model, optimizer, then
        self._steps = 0
        self._running: Profile | None = None
        self._report: MemoryReport | None = None

    @property
    def report(self) -> MemoryReport:
        if self._report is None:
            raise NotObserved(f"step {self.number} has not been taken; {self._steps} have")
        return self._report

    def begin(self, model: nn.Module | None = None, optimizer: Any = None) -> None:
        """A step begins. What was not given before may be given here."""
        if self._steps == self.number and self._running is None:
            optimizer = self._optimizer if self._optimizer is not None else optimizer
            model = self._model if self._model is not None else model
            self._running = profile(model=model, optimizer=optimizer)
            self._running.__enter__()

    def end(self, error: BaseException | None = None) -> None:
        """A step has ended, or broken."""
        self._steps += 1
        running, self._running = self._running, None
        if running is not None:
            running.__exit__(type(error) if error is not None else None, error, None)
            self._report = running.report
            if self._then is not None:
                self._then(self._report)

    def close(self, error: BaseException | None = None) -> None:
        """Leave nothing behind if a step never ended."""
        if self._running is not None:
            self.end(error)

    def __enter__(self) -> ProfileAt:
        self.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end(error)


def lightning_callback(number: int, then: Then | None = None) -> Any:
    """For `Trainer(callbacks=[…])` of Lightning: profiles batch `number` of the first that it sees.
    The report is in `callback.watch.report`."""
    base = _imported("lightning.pytorch", "pytorch_lightning").Callback
    watch = ProfileAt(number, then=then)

    class MemoryProfile(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.watch = watch

        def on_train_batch_start(self, trainer: Any, module: nn.Module, *_: Any) -> None:
            watch.begin(module, trainer.optimizers)

        def on_train_batch_end(self, *_: Any) -> None:
            watch.end()

        def on_exception(self, trainer: Any, module: nn.Module, error: BaseException) -> None:
            watch.close(error)

    return MemoryProfile()


def transformers_callback(number: int, then: Then | None = None) -> Any:
    """For `Trainer(callbacks=[…])` of Transformers. Its trainer does not tell callbacks of errors:
    `with callback: trainer.train()` sees to it that a step that breaks leaves nothing behind."""
    base = _imported("transformers").TrainerCallback
    watch = ProfileAt(number, then=then)

    class MemoryProfile(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.watch = watch

        def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            # Their optimizer may be a wrapper; the real one is found when it steps.
            optimizer = given.get("optimizer")
            known = optimizer if isinstance(optimizer, Optimizer) else None
            watch.begin(given["model"], known)

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            watch.end()

        def __enter__(self) -> Any:
            return self

        def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
            watch.close(error)

    return MemoryProfile()


def _imported(*names: str) -> Any:
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
    raise MissingPackage(f"{' or '.join(names)} is not installed; install it to use this callback")
