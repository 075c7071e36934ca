"""One step on CUDA, observed by the allocator's own history.

No operator is seen by Python, which is what takes longest in `collect.py`. Hooks on modules, on
autograd's nodes and on optimizers say where the program is, and that stands beside every
allocation; the graph is read as there.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import cache, lru_cache
from threading import RLock
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ecornn.profiler import (
    history,
    inventory,
    kept,
    lives,
    operators,
    places,
    roles,
    sightings,
    storages,
    threads,
)
from ecornn.profiler.compiled import CompiledGraphs, Value, is_compiled
from ecornn.profiler.history import History, Recording
from ecornn.profiler.inventory import Contents, contents_of
from ecornn.profiler.kept import Graph, Met, Node, Starts, name_of, running_node
from ecornn.profiler.lives import Mark, Marks, mark_of
from ecornn.profiler.observation import compiled_notes, elsewhere_notes, packed_notes
from ecornn.profiler.operators import COMPILED
from ecornn.profiler.places import Calls, folders_now, passed_over_by_compiler
from ecornn.profiler.roles import Roles
from ecornn.profiler.sightings import Keeper, Sightings
from ecornn.profiler.taken import Taken
from ecornn.profiler.threads import Makers

#: Puts the hooks of a tensor on a node; `Tensor.register_hook` calls it.
_PUT = "_register_hook_dict"
#: Nodes that only look at a gradient in another way: they allocate nothing.
QUIET = frozenset(
    f"{name}Backward{n}"
    for name in ("T", "Transpose", "Permute", "Squeeze", "Unsqueeze")
    for n in range(4)
)


class LightCollector:
    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        device: torch.device,
        recorder: Recording,
        contents: Contents | None = None,
    ) -> None:
        """`contents`: the model's, if somebody has looked already."""
        contents = contents_of(model) if contents is None else contents
        self._device, self._recorder = device, recorder
        self._marks = Marks(recorder.say)
        self.sightings = Sightings(device, self._marks.passed)
        self.graph = Graph()
        self._compiled = CompiledGraphs(model)
        # States are mostly written in place, and gradients stay: what is seen of them afterwards is
        # what was before. Each look takes as long as an operator of a small model.
        self._roles = Roles(
            self.sightings, model, contents, optimizers, self._moved, at_every_chance=False
        )
        self._makers = Makers()
        self._calls = Calls(contents.modules, self._makers, self._roles.inputs, self._moved)
        self._starts: Starts | None = None
        #: Hooks are put on nodes as those of a tensor are, through one: 0.17 µs each on a CPU, and
        #: 1.2 by `register_prehook`, which makes a handle for each. By one thread at a time.
        self._carrier: Any = torch.empty(0, device="cpu")
        self._putting = RLock()
        #: When the graph was read last.
        self._number = 0
        self._saw_backward = False
        #: By who made a node of compiled code and its number, what it keeps; and of how many nobody
        #: knows.
        self._saved_values: dict[tuple[int, int], dict[int, Value]] = {}
        self._unread = 0
        self._history: History | None = None

    @staticmethod
    def missing() -> str | None:
        """Why a step cannot be observed in this way, if it cannot."""
        reason = history.missing()
        if reason is None and not hasattr(torch._C._FunctionBase, _PUT):
            reason = f"torch {torch.__version__} has no {_PUT}"
        if reason is None and "torch._dynamo" in sys.modules:
            ours = (
                sys.modules[__name__],
                inventory,
                lives,
                sightings,
                roles,
                places,
                kept,
                operators,
                storages,
                threads,
            )
            if not passed_over_by_compiler(*ours):
                reason = f"torch {torch.__version__} would compile its hooks"
        return reason

    def start(self) -> None:
        self._starts = Starts(self._backward_starts, self._backward_ended)
        self._recorder.start()
        self.sightings.begin()
        self._moved()

    def stop(self, *, failed: bool) -> None:
        """Leave nothing behind, whatever state the step was left in."""
        try:
            if failed or not self._saw_backward:
                self._number = self._marks.passed()
                maker = self._makers.of_running()
                self._read(self.graph.alive(self._makers, maker), maker)
            self._history = self._recorder.stop()
            self.sightings.end()
            self._roles.close()
        finally:
            self.close()

    def close(self) -> None:
        """Take away every hook, and record nothing more."""
        started, self._starts = self._starts, None
        if started is not None:
            started.close()
        self._calls.close()
        self._roles.unhook()
        self._marks.close()
        self.sightings.end()
        self._recorder.close()
        if started is not None:  # autograd has a thread for every device, and each has spoken
            for device in self.sightings.elsewhere:
                if device.type == "cuda":
                    history.hush(self._recorder.say, device)

    def taken(self) -> Taken:
        """After `stop`: all that a report is made from."""
        assert self._history is not None
        notes = (
            *elsewhere_notes(set(map(str, self.sightings.elsewhere))),
            *compiled_notes(saw_compiled=bool(self._saved_values), unread=self._unread),
            *packed_notes(self.graph.packed),
        )
        return Taken(
            self._device,
            self._history,
            self._marks.said,
            self.sightings.seen,
            self._recorder.driver_bytes(),
            notes,
            folders_now(),
        )

    def _moved(self) -> None:
        """Another module, pass or optimizer than before."""
        if not self.sightings.recording:
            return
        running, node = self._calls.running, running_node()
        if running:
            mark = mark_of("forward" if node is None else "backward", running[-1])
        elif node is not None:
            module = self._calls.at(self._makers.of_running(), node._sequence_nr())
            mark = Mark("backward", module, name_of(node))
        else:
            mark = mark_of("optimizer" if self._roles.stepping else "forward", "")
        self._marks.set(mark)

    def _backward_starts(self, roots: list[Any]) -> None:
        self._saw_backward = True
        self._number = self._marks.passed()
        self._makers.pass_starts()
        self._marks.set(Mark("backward", ""))
        self._read(roots, self._makers.of_running())

    def _backward_ended(self) -> None:
        self._makers.pass_ends()
        # Not after each pass inside it: every look is at all parameters.
        if running_node() is None:
            with self.sightings.at_once():
                self._roles.gradients()
        self._moved()

    def _read(self, roots: list[Any], maker: int) -> None:
        """Have each node say when it runs, and tell what it keeps. A step has thousands."""
        with self._putting:
            self._put(self.graph.unvisited(roots), maker)

    def _put(self, found: list[Met], maker: int) -> None:
        hooks, hooks_for = self._marks.known_hooks(), self._marks.hooks_for
        saved, kept, number_then = self.graph.saved, self.sightings.kept, self._number
        carrier, first = self._carrier, self._makers.first_of_this_step(maker)
        modules = self._calls.all_at(maker, [number for number, _, _ in found])
        for (number, node, kind), module in zip(found, modules, strict=True):
            name = kind.name or name_of(node)
            if name not in QUIET:
                carrier._backward_hooks = hooks.get((module, name)) or hooks_for(module, name)
                node._register_hook_dict(carrier)
            tensors = None if kind.keeps_nothing else saved(node, kind)
            if tensors:
                keeper = (
                    self._keeper(Node(maker, number, name, node), module)
                    if kind.has_others
                    else known_keeper(module, name, number >= first)
                )
                kept(tensors, number_then, keeper)
        carrier._backward_hooks = None

    def _keeper(self, found: Node, module: str) -> Keeper:
        """Of a function of the program's."""
        maker, number, name, node = found
        of_this_step = self._makers.of_this_step(maker, number)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            operator, values = name.removesuffix("Backward"), {}
            if is_compiled(node):
                operator, values = COMPILED, self._values_of(found, module)
            return Keeper(_by(module, operator), of_this_step, values)
        return known_keeper(module, name, of_this_step)

    def _values_of(self, found: Node, module: str) -> dict[int, Value]:
        key = found.maker, found.number
        values = self._saved_values.get(key)
        if values is None:
            values = self._saved_values[key] = self._compiled.saved_by(found.node, module)
            self._unread += not values
        return values


def _by(module: str, operator: str) -> str:
    return f"{module}: {operator}" if module else operator


@lru_cache(maxsize=4096)
def known_keeper(module: str, node: str, of_this_step: bool) -> Keeper:
    """Of a node of autograd's own: a layer that is called often has many that are alike."""
    return Keeper(_by(module, operator_of(node)), of_this_step, {})


@cache
def operator_of(node: str) -> str:
    """Such as "native_layer_norm", of the node NativeLayerNormBackward0."""
    name = re.sub(r"Backward\d*$", "", node)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
