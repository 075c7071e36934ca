"""One step, observed operator by operator.

`Collector` is a dispatch mode for the operators, and owns what else looks on: hooks on modules for
the path, on parameters and optimizers for roles, autograd's graph for what is kept. All of it is
there between `start` and `stop` alone.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from ecornn import ctc
from ecornn.profiler import (
    allocator,
    kept,
    operators,
    places,
    storages,
    threads,
    without_numbers,
)
from ecornn.profiler.allocator import EVERY, Allocator
from ecornn.profiler.compiled import CompiledGraphs, Value, is_compiled
from ecornn.profiler.inventory import contents_of
from ecornn.profiler.kept import (
    Graph,
    Node,
    Starts,
    next_number,
    running_node,
    tensors_alive,
)
from ecornn.profiler.observation import (
    NobodyCounts,
    Observation,
    compiled_notes,
    elsewhere_notes,
    no_history_notes,
    packed_notes,
)
from ecornn.profiler.operators import (
    COMPILED,
    SCALARS,
    Operator,
    Origin,
    describe,
    tensors_in,
)
from ecornn.profiler.places import (
    Calls,
    Line,
    Lines,
    folders_now,
    generates_code,
    in_generated_code,
    passed_over_by_compiler,
)
from ecornn.profiler.roles import Roles
from ecornn.profiler.storages import PLAIN, STRIDED, Ledger, Record, parts, within_reach
from ecornn.profiler.threads import Makers
from ecornn.profiler.without_numbers import Rules

if TYPE_CHECKING:
    from ecornn.profiler.trace import Trace

#: Of the peak: what is looked for in all that Python knows of, where tensors that the step reads
#: leave more than this unexplained. Libraries' buffers take about 1 % of a large step's peak.
OTHERS = 0.02


class Collector(TorchDispatchMode):
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would wrap what follows, which costs 2 µs an operator and the import of its
        compiler; where that is loaded, `made_for` keeps it out by other means."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs as it does without us; else torch would run its source instead."""
        return True

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        device: torch.device,
        every: int = EVERY,
    ) -> None:
        """`every`: so many operators at most are between two readings of a GPU's allocator."""
        super().__init__()
        self.ledger = Ledger(device)
        self.graph = Graph()
        #: At each time from 1: operator, module, phase.
        self.times: list[tuple[str, str, str]] = []
        #: Writes down the forward pass, where that was asked for.
        self.trace: Trace | None = None
        #: Why the allocator's history was not read in the place of all this, if that was wanted.
        self.no_history: str | None = None
        self.saw_backward = False
        self.saw_compiled = False
        self._lines = Lines()
        #: By identity, which the values hold on to: an operator's own hash runs in Python.
        self._operators: dict[int, Operator] = {}
        #: What runs in the stead of torch's kernels where those need numbers.
        self._rules = Rules()
        #: By who made a node, and its number.
        self._origins: dict[tuple[int, int], Origin] = {}
        #: Likewise for a node of compiled code, what it keeps; and of how many nobody knows.
        self._saved_values: dict[tuple[int, int], dict[int, Value]] = {}
        self.unread = 0
        self._compiled = CompiledGraphs(model)
        contents = contents_of(model)
        self._roles = Roles(self.ledger, model, contents, optimizers)
        self._makers = Makers()
        self._calls = Calls(contents.modules, self._makers, self._roles.inputs)
        self._running = self._calls.running
        self._starts: Starts | None = None
        #: The storages that were there before; weak, so that a new one at an address is told apart.
        self._before: dict[int, weakref.ref[Any]] | None = None
        #: The last node that was seen to be made: by whom, and its number.
        self._last = (0, -1)
        #: None also where tensors on a GPU are only simulated.
        real = device.type == "cuda" and not contents.are_fake
        self.untold = allocator.missing(device) if real else None
        real = real and self.untold is None
        self.allocator = Allocator(device, self.ledger.bytes_alive, every) if real else None

    def start(self) -> None:
        self._starts = Starts(self._backward_starts, self._makers.pass_ends)
        self.__enter__()

    @staticmethod
    def made_for(
        model: nn.Module, optimizers: Sequence[Optimizer], device: torch.device, every: int
    ) -> Collector:
        kind = Collector
        if "torch._dynamo" in sys.modules:
            ours = (storages, kept, allocator, operators, places, threads, without_numbers, ctc)
            alone = passed_over_by_compiler(sys.modules[__name__], *ours)
            kind = CollectorBesideCompiler if alone else WrappedCollector
        return kind(model, optimizers, device, every)

    def see_others(self) -> None:
        """Tensors that the step did not touch: on a GPU they are part of what the allocator counts,
        on the CPU of nothing. All that Python knows of is looked through, which takes as long as
        many a step: only where enough is unexplained before the step."""
        for tensor in tensors_alive():
            if tensor.device == self.ledger.device:
                self.ledger.given(
                    tensor, "other", "was there before the step, which did not read it"
                )

    def _backward_starts(self, roots: list[Any]) -> None:
        self.saw_backward = True
        self._makers.pass_starts()
        self._read(roots, self._makers.of_running())

    def stop(self, *, failed: bool) -> None:
        """Leave nothing behind, whatever state the step was left in."""
        try:
            self.__exit__(None, None, None)
            if failed or not self.saw_backward:
                maker = self._makers.of_running()
                self._read(self.graph.alive(self._makers, maker), maker)
            self._roles.close()
            if self.allocator is not None:
                self.allocator.read(self.ledger.clock, self.ledger.bytes_alive)
                if self.allocator.unexplained(self.ledger.records) > OTHERS:
                    self.see_others()
        finally:
            self.close()

    def observation(self) -> Observation:
        return Observation(
            self.ledger.device,
            sorted(self.ledger.records, key=lambda record: record.born),
            self.times,
            NobodyCounts() if self.allocator is None else self.allocator,
            [
                *([] if self.untold is None else [self.untold]),
                *no_history_notes(self.no_history),
                *elsewhere_notes(self.ledger.elsewhere),
                *compiled_notes(saw_compiled=self.saw_compiled, unread=self.unread),
                *packed_notes(self.graph.packed),
                *self._rules.notes,
            ],
            self.trace,
        )

    def close(self) -> None:
        """Take away every hook."""
        if self._starts is not None:
            self._starts.close()
        self._calls.close()
        self._roles.unhook()
        self.ledger.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Runs at every operator: tests/profiler/test_cost.py bounds what it may take."""
        operator = self._operators.get(id(func)) or self._describe(func)
        call = operator.call
        if operator.only_views:
            if (get_ident(), next_number() - 1) != self._last:
                self._place(operator)  # it may have a node
            return call(*args, **kwargs) if kwargs else call(*args)
        module, line, phase = self._place(operator)
        ledger = self.ledger
        ledger.clock += 1
        self.times.append((operator.name, module, phase))
        for value in (*args, *kwargs.values()) if kwargs else args:
            if type(value) not in SCALARS:
                for tensor in (value,) if type(value) in PLAIN else tensors_in((value,)):
                    if not ledger.knows(tensor):
                        self._unknown(tensor, phase, module, line)
        result = call(*args, **kwargs) if kwargs else call(*args)
        new: list[Record] = []
        for tensor in (result,) if type(result) in PLAIN else tensors_in((result,)):
            if type(tensor) in PLAIN and tensor.layout is STRIDED:
                record = ledger.made_plain(tensor, module, operator.name, line)
                if record is not None:
                    new.append(record)
            else:
                new += ledger.made(tensor, module, operator.name, line)
        if new and line is None and phase != "backward":
            line = self._lines.here()
            for record in new:
                record.line = line
        if self.trace is not None and phase == "forward":
            self.trace.saw(func, args, kwargs, result, module, ledger.clock)
        if self.allocator is not None:
            self.allocator.after(operator.name, ledger.clock, ledger.bytes_alive)
        return result

    def _unknown(self, tensor: Tensor, phase: str, module: str, line: Line | None) -> None:
        """An operator reads or writes what no operator made. It was there before the step, unless
        compiled code made it, past the dispatcher."""
        if tensor.device != self.ledger.device:
            self.ledger.elsewhere.add(str(tensor.device))
            return
        node = tensor.grad_fn
        of_this_step = self._makers.of_this_step
        made = node is not None and of_this_step(self._makers.of_running(), node._sequence_nr())
        if (made or in_generated_code()) and not self._was_before(tensor):
            # Sparse tensors and subclasses come here as well, and are mostly known.
            if self.ledger.made(tensor, module, COMPILED, line):
                self.saw_compiled = True
        else:
            # What is first read after the forward pass is no input: DDP's buckets.
            self.ledger.given(tensor, "inputs" if phase == "forward" else "other")

    def _was_before(self, tensor: Tensor) -> bool:
        """Known only where it is asked: beside a compiler."""
        if self._before is None:
            return False
        watches = [self._before.get(part.untyped_storage()._cdata) for part in parts(tensor)]
        return any(watch is not None and watch() is not None for watch in watches)

    def _describe(self, func: Any) -> Operator:
        operator = self._operators[id(func)] = describe(func, self._rules.of(func))
        return operator

    def _place(self, operator: Operator) -> tuple[str, Line | None, str]:
        """Whose operator it is, and in which phase. In the backward pass: of what it
        differentiates."""
        node, running = running_node(), self._running
        module = running[-1] if running else ""
        # With gradients on, a module's call in the backward pass is a forward pass made again.
        if node is not None and not (running and torch.is_grad_enabled()):
            maker, number = self._makers.of_running(), node._sequence_nr()
            if not self.graph.visited(node):
                self._read([node], maker)
            found = self._origins.get((maker, number))
            return (module, None, "backward") if found is None else (found[0], found[2], "backward")
        line = None
        # The first operator with a number is the node's own; later ones made no node. Lines cost a
        # walk up the frames: without a node, only what is new needs one.
        made = get_ident(), next_number() - 1
        if made != self._last:
            self._last = made
            if made not in self._origins:
                line = self._lines.here()
                self._origins[made] = Origin(module, operator.name, line)
        if node is not None:
            return module, line, "backward"
        return module, line, "optimizer" if self._roles.stepping and not running else "forward"

    def _read(self, roots: list[Any], maker: int) -> None:
        for found, tensors in self.graph.visit(roots, maker):
            self._kept(found, tensors)

    def _kept(self, found: Node, tensors: list[Tensor]) -> None:
        """`tensors` are kept for the backward pass of a node."""
        origin, node = self._origins.get((found.maker, found.number)), found.node
        tensors = [tensor for tensor in tensors if within_reach(tensor)]
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            operator = found.name.removesuffix("Backward")
            if is_compiled(node):
                for tensor in tensors:
                    self._kept_by_compiled(found, tensor)
                return
        else:
            operator = origin.operator if origin is not None else found.name
        module = origin.module if origin is not None else ""
        line = origin.line if origin is not None else None
        for tensor in tensors:
            self._keep(found, tensor, module, operator, line)

    def _keep(
        self, by: Node, tensor: Tensor, module: str, operator: str, line: Line | None
    ) -> None:
        text = f"{module}: {operator}" if module else operator
        # Unknown: kept since before the step, or made past the dispatcher.
        if not self.ledger.knows_as_it_is(tensor):
            if not self._makers.of_this_step(by.maker, by.number):
                self.ledger.given(tensor, role="")
            elif self._was_before(tensor):
                self.ledger.given(tensor)
            else:
                self.ledger.made(tensor, module, operator, line)
        for record in self.ledger.records_of(tensor):
            if text not in record.kept_by:
                record.kept_by += (text,)

    def _kept_by_compiled(self, by: Node, tensor: Tensor) -> None:
        """By the module in whose call the code ran; made where its graph says."""
        key = by.maker, by.number
        region = self._calls.at(*key)
        if key not in self._saved_values:
            self.saw_compiled = True
            self._saved_values[key] = self._compiled.saved_by(by.node, region)
            self.unread += not self._saved_values[key]
        self._keep(by, tensor, region, COMPILED, None)
        for part in parts(tensor):
            value = self._saved_values[key].get(part.untyped_storage()._cdata)
            if value is None:
                continue
            for record in self.ledger.records_of(part):
                if record.born and not record.role:
                    record.module = value.module or ""
                    record.line_text = value.line_text(folders_now())
                    if record.operator == COMPILED:
                        record.operator = value.operator or COMPILED


class CollectorBesideCompiler(Collector):
    """Where torch's compiler is loaded, what its code reads and makes must be told apart by what
    was there before."""

    def start(self) -> None:
        if generates_code():  # takes as long as many a step
            alive = [one for one in tensors_alive() if one.device == self.ledger.device]
            storages = [part.untyped_storage() for tensor in alive for part in parts(tensor)]
            self._before = {storage._cdata: weakref.ref(storage) for storage in storages}
        super().start()


class WrappedCollector(CollectorBesideCompiler):
    """For a torch that cannot be told to pass over our code: it wraps what is the class's own."""

    __torch_dispatch__ = Collector.__torch_dispatch__

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True
