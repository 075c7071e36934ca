"""`LeanFunctions`: replaces functions of torch while a model is called, and counts that."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from ecornn.echo.lean import layers
from ecornn.echo.lean.alone import Loan
from ecornn.echo.lean.cross_entropy import Call
from ecornn.echo.lean.needs import missing
from ecornn.sizes import size_text


@dataclass
class Replaced:
    """Calls of cross entropy so far, how many of their scores nobody else referred to, and the
    largest scores; calls of layers that are run again, and the largest results of one; and of the
    latest forward pass, the calls of layers that could be run again, and those that are."""

    calls: int = 0
    private: int = 0
    largest_bytes: int = 0
    layers: int = 0
    largest_layer_bytes: int = 0
    latest_able: int = 0
    latest_again: int = 0

    def told(self) -> list[str]:
        told = []
        if self.calls:
            size = size_text(self.largest_bytes)
            told.append(
                f"cross_entropy keeps only its scores, to the same bits, in {self.calls} calls: its"
                f" backward pass holds less by their size ({size} at most), and by twice their size"
                f" where nothing else refers to them ({self.private} calls)"
            )
        if self.layers:
            size = size_text(self.largest_layer_bytes)
            told.append(
                f"recurrent layers of torch are run again in the backward pass, {self.layers}"
                f" calls: nothing but their arguments is kept (their results: {size} at most)"
            )
        return told


class LeanFunctions(TorchFunctionMode):
    """For one call of a model, in its thread."""

    def __init__(
        self,
        replaced: Replaced,
        *,
        again: Container[int] = layers.NO_CALL,
        lend: Callable[[Tensor], Loan] = Loan,
    ) -> None:
        """`again`: places of the calls of recurrent layers that are run again, among such calls."""
        super().__init__()
        self.replaced, self.again, self._lend = replaced, again, lend
        self.loans: list[Loan] = []
        self._layer_calls = 0
        self._able = self._run_again = 0
        self.other_streams = False

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        # Dynamo reads this where a part of the model is compiled by others: nothing changes there.
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        if func is F.cross_entropy:
            return self._cross_entropy(args, kwargs or {})
        if func in layers.LAYERS:
            return self._layer(func, args, kwargs or {})
        if func is Tensor.record_stream:
            self.other_streams = True
        return func(*args, **(kwargs or {}))

    def _cross_entropy(self, args: Sequence[Any], kwargs: Any) -> Any:
        try:
            call = Call(*args, **kwargs)
        except TypeError:  # torch says what is wrong
            return F.cross_entropy(*args, **kwargs)
        if _watched() or call.refusal() is not None:
            return F.cross_entropy(*args, **kwargs)
        self.replaced.calls += 1
        self.replaced.largest_bytes = max(self.replaced.largest_bytes, call.input.nbytes)
        self.loans.append(self._lend(call.input))
        return call.carry_out(self.loans[-1])

    def _layer(self, func: Any, args: Sequence[Any], kwargs: Any) -> Any:
        # all calls have a place: which of them can be run again may be another matter next time
        place, self._layer_calls = self._layer_calls, self._layer_calls + 1
        call = layers.Arguments.of(args, kwargs)
        if call is None or _watched() or layers.refusal(call) is not None:
            return func(*args, **kwargs)
        again = place in self.again
        self._able += 1
        self._run_again += again
        if again:
            self.replaced.layers += 1
            most = self.replaced.largest_layer_bytes
            self.replaced.largest_layer_bytes = max(most, call.output_bytes)
        return self.run_layer(place, func, call, again=again)

    def run_layer(self, place: int, layer: Any, call: layers.Arguments, *, again: bool) -> Any:
        return layers.run_again_later(layer, call) if again else layer(*call.all)

    def end_of_call(self) -> None:
        """When the model's call is over and its names are gone."""
        while self.loans:
            loan = self.loans.pop()
            loan.end_of_call(seen_by_other_streams=self.other_streams)
            self.replaced.private += loan.private
        if self._able:  # not where no gradient is asked for, as in evaluation
            self.replaced.latest_able, self.replaced.latest_again = self._able, self._run_again


def _watched() -> bool:
    """Is the call traced, differentiated by other means than the backward pass, or within hooks on
    what is kept? A checkpoint has such hooks, and runs the call again when this mode is over: it
    must keep then what it kept before."""
    forwards: Any = forward_ad._current_level
    transform: Any = torch._C._functorch.peek_interpreter_stack()
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return forwards >= 0 or transform is not None or hooks is not None or torch._C._is_tracing()


def without_lean_functions(run: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled code must be called as if these modes were not there: dynamo would compile it for
    them, and once more for calls without them. Also where none is asked for: what is compiled may
    be a part of another model."""
    if missing() is not None:
        return run

    def called(*args: Any, **kwargs: Any) -> Any:
        depth = torch._C._len_torch_function_stack()
        if depth == 0:
            return run(*args, **kwargs)
        if depth == 1:  # as a decoder's step is called within its model, once a word
            only = torch.overrides._pop_mode()
            if isinstance(only, LeanFunctions):
                try:
                    return run(*args, **kwargs)
                finally:
                    torch.overrides._push_mode(only)
            torch.overrides._push_mode(only)
            return run(*args, **kwargs)
        modes = [torch.overrides._pop_mode() for _ in range(depth)]  # the innermost first
        _push_all(mode for mode in modes if not isinstance(mode, LeanFunctions))
        try:
            return run(*args, **kwargs)
        finally:
            while torch._C._len_torch_function_stack():
                torch.overrides._pop_mode()
            _push_all(modes)

    return called


def _push_all(modes: Iterable[Any]) -> None:
    for mode in reversed(list(modes)):
        torch.overrides._push_mode(mode)
