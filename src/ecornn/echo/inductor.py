"""Echo's partitioner in the form that inductor takes, and what inductor made of its two passes;
imported when inductor is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor, fx
from torch._guards import TracingContext
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.utils import get_donated_idxs

from ecornn.echo.graph import NotUnderstood
from ecornn.echo.launches import with_direct_launches
from ecornn.echo.recorded import Recorded
from ecornn.echo.replay import Code, Replay
from ecornn.echo.report import Foretold, GraphReport
from ecornn.echo.rewrite import Modules
from ecornn.echo.without_kernels import without_kernels
from ecornn.errors import InvalidInput


class EchoPartitioner(CustomPartitionerFn):
    """`key` stands for everything that the split depends on beside the graph: inductor's cache of
    compiled code asks for it, and pickles the partitioner with its other settings."""

    def __init__(self, partition: Callable[..., Modules] | None, key: str) -> None:
        self.partition, self.key = partition, key

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **settings: Any
    ) -> Modules:
        assert self.partition is not None, "a partitioner from a pickle only stands for its key"
        return self.partition(gm, joint_inputs, **settings)

    def uuid(self) -> str:
        return self.key

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (None, self.key)

    def given_up(self, inputs: Sequence[int] | None) -> EchoPartitioner:
        """Its key for a backward pass that may overwrite these of its inputs."""
        return type(self)(None, f"{self.key} {sorted(inputs or ())}")


class Watched:
    """Has inductor compile the passes of one graph, writes down their code, and replays it to tell
    the report what they will hold."""

    def __init__(
        self,
        told: GraphReport,
        recorded: Recorded,
        before_backward: Callable[[fx.GraphModule], None] = lambda _: None,
    ) -> None:
        self.told, self._recorded, self._before_backward = told, recorded, before_backward
        self._replay: Replay | None = None
        self._results: list[Any] = []
        self._kept: list[Any] = []
        self._weights: frozenset[int] = frozenset()

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any], **settings: Any) -> Any:
        if settings.get("is_backward"):
            self._before_backward(module)
        with without_kernels(module) if self.told.ahead else nullcontext():
            compiled = _compiled(module, inputs, settings)
        try:
            code = _code_of(compiled)
            if settings.get("is_backward"):
                self._recorded.backward = code
                self._backward(code, inputs)
            else:
                self._recorded.forward = code
                self._forward(code, inputs, settings.get("static_input_idxs") or ())
        except NotUnderstood as error:
            self.told.foretold, self.told.not_foretold = None, str(error)
            self._replay = None
        run = with_direct_launches(compiled)
        sums = self._recorded.sums if settings.get("is_backward") else None
        return run if sums is None else sums.around(run)

    def _forward(self, code: Code, inputs: Sequence[Any], weights: Sequence[int]) -> None:
        replay = self._replay = Replay(inputs)
        returned = replay.forward(code)
        results = self._recorded.results
        count = len(returned) if results is None else results
        kept, self._results, self._weights = returned[count:], returned[:count], frozenset(weights)
        # torch hands over tensors, then numbers, and takes numbers first
        tensors = [value for value in kept if isinstance(value, Tensor)]
        self._kept = [value for value in kept if not isinstance(value, Tensor)] + tensors
        result_bytes = replay.ledger.bytes_of(self._results)
        self.told.foretold = Foretold(
            inputs=replay.input_bytes,
            forward=replay.ledger.most,
            results=result_bytes,
            kept=replay.ledger.bytes_of(returned) - result_bytes,
            source="inductor's code",
        )
        waits = "the backward pass is not compiled yet"
        self.told.not_foretold = None if results is None else waits

    def _backward(self, code: Code, inputs: Sequence[Any]) -> None:
        replay, forward = self._replay, self.told.foretold
        if replay is None or forward is None:
            return  # why is told already
        self._replay = None
        returned = replay.backward(code, self._kept, inputs)
        sums = self._recorded.sums
        # what stands in the place of a gradient that is made later is a part of it
        later = () if sums is None else (*sums.gathered, *sums.common)
        weights = self._weights - {one.weight for one in later if one.later_bytes}
        gradients = [value for k, value in enumerate(returned) if k in weights]
        of_weights = sum(one.later_bytes for one in later if one.weight in self._weights)
        of_all = sum(one.later_bytes for one in later)
        self.told.foretold = replace(
            forward,
            backward=replay.ledger.most + of_all,
            gradients=replay.ledger.bytes_of(gradients) + of_weights,
        )
        self.told.not_foretold = None
        self._results = []
        if (over := self.told.over_budget) is not None:
            # other code than was seen ahead of the call: that of a graph which is kept, for one
            raise InvalidInput(
                "memory",
                f"{self.told.memory}, and code of {self.told.name} that holds more: {over}",
                "code that holds as much as when it was compiled ahead of the call",
                "ask for as much as is predicted, or do not keep graphs for a second pass",
            )


def _compiled(module: fx.GraphModule, inputs: Sequence[Any], settings: dict[str, Any]) -> Any:
    """Inductor's cache does not ask which of a backward pass's inputs may be overwritten. Code that
    overwrites them came back from it for a graph that was retained, and a second backward pass
    through that gave other gradients than the first."""
    if settings.get("is_backward"):
        _spare_shared(inputs)
    partitioner = config.custom_partitioner_fn
    if not settings.get("is_backward") or not isinstance(partitioner, EchoPartitioner):
        return compile_fx_inner(module, inputs, **settings)
    with config.patch(custom_partitioner_fn=partitioner.given_up(get_donated_idxs())):
        return compile_fx_inner(module, inputs, **settings)


def _spare_shared(inputs: Sequence[Any]) -> None:
    """torch (2.13) lets a backward pass overwrite what nobody has but it, also where it is handed
    both a tensor and a view of it, which inductor takes for memory of their own: it wrote to the
    one before it read the other, and a weight's gradient was another one. Such are not
    overwritten."""
    context = TracingContext.try_get()
    known = None if context is None else context.fw_metadata
    if known is None or not known.bw_donated_idxs:
        return
    storages = [_storage(value) for value in inputs]
    known.bw_donated_idxs = [k for k in known.bw_donated_idxs if storages.count(storages[k]) == 1]


def _storage(value: Any) -> int | None:
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _code_of(compiled: Any) -> Code:
    source = getattr(compiled, "source_code", None)
    if not isinstance(source, str) or "def call(" not in source:
        raise NotUnderstood(f"inductor's {type(compiled).__name__} does not show its Python code")
    constants = getattr(compiled, "constants", None) or {}
    return Code(source, constants)
