"""Is it nearly free to run a model's recurrent layers again, and how long does a step take outside
the parts that are compiled? Estimated from one run of its forward pass on tensors without
numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ecornn.echo.analysis.machine import machine_of
from ecornn.echo.fakes import WithoutNumbers
from ecornn.echo.graph import PRODUCTS
from ecornn.echo.lean import layers
from ecornn.echo.work import Work, work_of

#: Of the estimated time of the step as it is written. More than the 2 % that a compiled part may
#: add: such a part takes less time than it does as it is written, by far more than this.
NEARLY_FREE = 0.03
#: A backward pass takes about twice as long as its forward pass.
PASSES = 3
#: Kernels of one time step of a layer: its product, and its gates.
KERNELS = 2


@dataclass
class Shares:
    """Seconds of a forward pass: of all of it, of recurrent layers that could be run again, and, by
    path, of each of the model's parts."""

    seconds: float = 0.0
    layers: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def of_step(self) -> float:
        return self.layers / (PASSES * self.seconds) if self.seconds else 0.0

    @property
    def nearly_free(self) -> bool:
        return 0 < self.of_step <= NEARLY_FREE

    def step_outside(self, paths: Collection[str]) -> float:
        """Seconds of a step outside some parts, none of which is within another."""
        return PASSES * max(self.seconds - sum(self.parts.get(path, 0.0) for path in paths), 0.0)


class Priced(WithoutNumbers):
    """Adds up the estimated times of operators. No mode beside it: torch compiles nothing under
    others, and a model may compile parts of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.shares = Shares()

    def made(self, func: Any, args: Any, kwargs: Any, result: Any, scratch: int) -> None:
        if not func.is_view:
            work = work_of(func, tuple(args), dict(kwargs), result)
            product = func.overloadpacket.__name__ in PRODUCTS
            self.shares.seconds += machine_of(work.device).seconds(work, product=product)

    @contextmanager
    def parts_of(self, model: nn.Module) -> Iterator[None]:
        """Parts are priced with all that they call, recurrent layers among it."""
        began: list[float] = []

        def enter(*_: Any) -> None:
            began.append(self.shares.seconds)

        def leave_of(path: str) -> Callable[..., None]:
            def leave(*_: Any) -> None:
                spent = self.shares.seconds - began.pop()
                self.shares.parts[path] = self.shares.parts.get(path, 0.0) + spent

            return leave

        parts = [(path, part) for path, part in model.named_modules() if path]
        hooks = [part.register_forward_pre_hook(enter) for _, part in parts]
        hooks += [part.register_forward_hook(leave_of(path)) for path, part in parts]
        try:
            with self._layers_of(model):
                yield
        finally:
            for one in hooks:
                one.remove()

    @contextmanager
    def _layers_of(self, model: nn.Module) -> Iterator[None]:
        """Recurrent layers are priced as wholes: their operators say nothing of their steps."""

        def hook(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = args[0] if args else kwargs["input"]
            seconds = layer_seconds(layer, given)
            self.shares.seconds += seconds
            self.shares.layers += seconds if _would_be_run_again(layer, given) else 0.0

        found = [part for part in model.modules() if isinstance(part, nn.RNNBase)]
        hooks = [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in found]
        try:
            yield
        finally:
            for one in hooks:
                one.remove()


def layer_seconds(layer: nn.RNNBase, given: Tensor | PackedSequence) -> float:
    """Of the forward pass of a stack: at every time step each layer multiplies by its weights and
    works out its gates."""
    rows, steps, device = _rows(given), _steps(layer, given), _data(given).device
    matrices = [weight for weight in layer.parameters() if weight.dim() == 2]
    flops = 2 * rows * sum(matrix.numel() for matrix in matrices)
    read = steps * sum(matrix.nbytes for matrix in matrices)
    work = Work(None, read, _output_bytes(layer, given), flops, _data(given).dtype, device)
    machine = machine_of(device)
    launches = KERNELS * steps * _count(layer)
    return machine.seconds(work, product=True) + launches * machine.launch_s


def _would_be_run_again(layer: nn.RNNBase, given: Tensor | PackedSequence) -> bool:
    """As `layers.refusal` will say of a call with numbers."""
    draws = layer.training and layer.dropout > 0 and layer.num_layers > 1
    trained = any(weight.requires_grad for weight in layer.parameters())
    return trained and not draws and _output_bytes(layer, given) >= layers.FEWEST_BYTES


def _data(given: Tensor | PackedSequence) -> Tensor:
    return given.data if isinstance(given, PackedSequence) else given


def _rows(given: Tensor | PackedSequence) -> int:
    data = _data(given)
    return data.numel() // max(data.shape[-1], 1)


def _steps(layer: nn.RNNBase, given: Tensor | PackedSequence) -> int:
    if isinstance(given, PackedSequence):
        return len(given.batch_sizes)
    return given.shape[1 if given.dim() == 3 and layer.batch_first else 0]


def _count(layer: nn.RNNBase) -> int:
    return layer.num_layers * (2 if layer.bidirectional else 1)


def _output_bytes(layer: nn.RNNBase, given: Tensor | PackedSequence) -> int:
    width = layer.proj_size or layer.hidden_size
    return _rows(given) * _count(layer) * width * _data(given).itemsize
