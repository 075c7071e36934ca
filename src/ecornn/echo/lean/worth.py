"""Which of a model's recurrent layers are nearly free to run again, and how long does a step take
outside the parts that are compiled? Estimated from one run of its forward pass on tensors without
numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ecornn.echo.analysis.machine import machine_of
from ecornn.echo.fakes import WithoutNumbers
from ecornn.echo.graph import PRODUCTS
from ecornn.echo.lean import layers
from ecornn.echo.lean.ours import KERNELS, OwnCall, OwnRun, own_call, own_run
from ecornn.echo.parts import is_free_to_choose, within
from ecornn.echo.work import Work, work_of

#: Of the estimated time of the step as it is written. More than the 2 % that a compiled part may
#: add: such a part takes less time than it does as it is written, by far more than this.
NEARLY_FREE = 0.03
#: A backward pass takes about twice as long as its forward pass.
PASSES = 3
#: Operators that allocate and launch nothing, or not even that, by the names of their packets.
MAKE_NOTHING = frozenset(
    {
        *("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty"),
        *("new_empty_strided", "detach_", "lift_fresh", "resize_", "set_"),
    }
)


@dataclass(frozen=True)
class LayerCall:
    """A call of a recurrent layer: within which part, the seconds of its forward pass, the bytes of
    its results, to which all that it keeps is about proportional, and whether it can be run
    again."""

    path: str
    seconds: float
    bytes: int
    able: bool


@dataclass
class Shares:
    """Seconds of a forward pass: of all of it, of its calls of recurrent layers of torch, in order,
    and, by path, of each of the model's parts. `own`: calls of layers of this package that may
    keep gates or not; `own_runs`: all of theirs."""

    seconds: float = 0.0
    layers: list[LayerCall] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    own: list[OwnCall] = field(default_factory=list)
    own_runs: list[OwnRun] = field(default_factory=list)

    def layers_outside(self, paths: Collection[str]) -> list[LayerCall]:
        """By their places: those within compiled parts are nobody's to run again."""
        return [
            call for call in self.layers if not (call.path in paths or within(call.path, paths))
        ]

    def of_step(self, calls: Iterable[LayerCall]) -> float:
        """The share of a step that running such calls again adds to it."""
        added = sum(call.seconds for call in calls)
        return added / (PASSES * self.seconds) if self.seconds else 0.0

    def told(self, again: Container[int], paths: Collection[str]) -> str:
        """What running some calls again takes; nothing where that is not known."""
        calls = enumerate(self.layers_outside(paths))
        chosen = [call for place, call in calls if call.able and place in again]
        if not (chosen and self.seconds):
            return ""
        return f"; that is estimated to take {self.of_step(chosen):.1%} of a step"

    def nearly_free(self, paths: Collection[str]) -> Container[int]:
        """The calls that are run again without being asked for: as many as take no more than a
        small share of a step together, those first that free most in a second. Of calls alike the
        earlier one: what it keeps is there for longer, and so most likely at the peak."""
        calls = self.layers_outside(paths)
        able = [place for place, call in enumerate(calls) if call.able]
        chosen: list[int] = []
        for place in sorted(able, key=lambda i: (-calls[i].bytes / calls[i].seconds, i)):
            if self.of_step(calls[i] for i in (*chosen, place)) <= NEARLY_FREE:
                chosen.append(place)
        if not chosen:
            return layers.NO_CALL
        return layers.EVERY_CALL if len(chosen) == len(able) else frozenset(chosen)

    def own_nearly_free(self, paths: Collection[str]) -> list[str]:
        """The same of layers of this package, some of `paths`, each with all of its calls."""
        seconds = dict.fromkeys(paths, 0.0)
        freed = dict.fromkeys(seconds, 0)
        for run in self.own_runs:
            if run.path in seconds:
                seconds[run.path] += run.seconds
                freed[run.path] += run.bytes
        chosen: list[str] = []
        left = NEARLY_FREE * PASSES * self.seconds
        called = [path for path in paths if seconds[path] > 0]
        for path in sorted(called, key=lambda p: -freed[p] / seconds[p]):
            if freed[path] >= layers.FEWEST_BYTES and seconds[path] <= left:
                left -= seconds[path]
                chosen.append(path)
        return chosen

    def step_outside(self, paths: Collection[str]) -> float:
        """Seconds of a step outside some parts, none of which is within another."""
        return PASSES * max(self.seconds - sum(self.parts.get(path, 0.0) for path in paths), 0.0)


class Priced(WithoutNumbers):
    """Adds up the estimated times of operators. No mode beside it: torch compiles nothing under
    others, and a model may compile parts of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.shares = Shares()
        #: Paths of the parts that are being called, the innermost last; and of those that are
        #: recurrent layers of this package and free to choose what they keep.
        self._inside: list[str] = [""]
        self._free: set[str] = set()

    def made(self, func: Any, args: Any, kwargs: Any, result: Any, scratch: int) -> None:
        ran = own_run(self._inside[-1], func, args)
        self.shares.own_runs += [] if ran is None else [ran]
        if self._inside[-1] in self._free:
            own = own_call(self._inside[-1], func, args)
            self.shares.own += [] if own is None else [own]
        if launches(func, result):
            work = work_of(func, tuple(args), dict(kwargs), result)
            product = func.overloadpacket.__name__ in PRODUCTS or work.declared
            machine = machine_of(work.device)
            # An operator that Python calls takes more of the host than a kernel within a library
            # does: the 4,572 kernels of the translator's eager step take 25 µs each on an H200.
            host_s = machine.compiled_launch_s - machine.launch_s
            self.shares.seconds += machine.seconds(work, product=product) + host_s

    @contextmanager
    def parts_of(self, model: nn.Module) -> Iterator[None]:
        """Parts are priced with all that they call, recurrent layers among it."""
        began: list[float] = []
        inside = self._inside

        def enter_of(path: str) -> Callable[..., None]:
            def enter(*_: Any) -> None:
                began.append(self.shares.seconds)
                inside.append(path)

            return enter

        def leave_of(path: str) -> Callable[..., None]:
            def leave(*_: Any) -> None:
                inside.pop()
                spent = self.shares.seconds - began.pop()
                self.shares.parts[path] = self.shares.parts.get(path, 0.0) + spent

            return leave

        parts = [(path, part) for path, part in model.named_modules() if path]
        self._free = {path for path, part in parts if is_free_to_choose(part)}
        hooks = [part.register_forward_pre_hook(enter_of(path)) for path, part in parts]
        hooks += [part.register_forward_hook(leave_of(path)) for path, part in parts]
        try:
            with _Layers(self.shares, inside):
                yield
        finally:
            for one in hooks:
                one.remove()


def launches(func: Any, result: Any) -> bool:
    """Does an operator run anything? Not one that tells something of a tensor, such as the device
    that it is on, or makes another view of its memory, or memory that nobody has written to."""
    made = tree_leaves(result)
    if func.is_view or not any(isinstance(one, Tensor) for one in made):
        return False
    return func.overloadpacket.__name__ not in MAKE_NOTHING


class _Layers(TorchFunctionMode):
    """Recurrent layers are priced as wholes: their operators say nothing of their steps. Calls are
    seen where `LeanFunctions` sees them, so that they have the same places."""

    def __init__(self, shares: Shares, inside: Sequence[str]) -> None:
        """`inside`: the paths of the parts that are being called, the innermost last."""
        super().__init__()
        self._shares, self._inside = shares, inside

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in layers.LAYERS and not torch.compiler.is_compiling():
            self._price(layers.Arguments.of(args, kwargs))
        return func(*args, **(kwargs or {}))

    def _price(self, call: layers.Arguments | None) -> None:
        able = layers.refusal(call, grad_enabled=True) is None
        seconds = 0.0 if call is None else layer_seconds(call)
        bytes_ = 0 if call is None else call.output_bytes
        self._shares.seconds += seconds
        self._shares.layers.append(LayerCall(self._inside[-1], seconds, bytes_, able))


def layer_seconds(call: layers.Arguments) -> float:
    """Of the forward pass of a stack: at every time step each layer multiplies by its weights and
    works out its gates."""
    given, device = call.given, call.given.device
    matrices = [weight for weight in call.weights if weight.dim() == 2]
    flops = 2 * call.rows * sum(matrix.numel() for matrix in matrices)
    read = call.steps * sum(matrix.nbytes for matrix in matrices)
    work = Work(None, read, call.output_bytes, flops, given.dtype, device)
    machine = machine_of(device)
    launches = KERNELS * call.steps * call.state.shape[0]
    return machine.seconds(work, product=True) + launches * machine.launch_s
