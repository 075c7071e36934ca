"""A budget for a whole step of a divided model: how its parts are planned, which of its recurrent
layers are run again, and what those of this package keep, so that the step fits.

Each way to run the step that is considered is rehearsed (`rehearse.py`), with the very code that
would be generated for its parts. Where the model as it is written fits, parts are planned for the
least time. Elsewhere they take what is nearly free first; then layers of this package make their
gates again; then those of torch are run again, the fewest that are found to be enough; and where
all layers are not, parts spend more time as well.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch._functorch.config as functorch_config
from torch import fx, nn

from ecornn.echo.backend import EchoBackend
from ecornn.echo.counted import Places
from ecornn.echo.counted_storages import Functions
from ecornn.echo.graph import NotUnderstood
from ecornn.echo.layer_choice import LayerChoice
from ecornn.echo.lean.layers import EVERY_CALL, NO_CALL
from ecornn.echo.model_call import ModelCall
from ecornn.echo.options import AUTO, MIN, Memory, refusal
from ecornn.echo.recorded import Recorded, key_of
from ecornn.echo.rehearse import Find, Part, Rehearsed, rehearsal_of
from ecornn.echo.report import GraphReport
from ecornn.errors import InvalidInput
from ecornn.sizes import size_text

#: How often parts are planned anew between what is nearly free and the least: each time is a
#: compilation.
TIGHTENINGS = 2


@dataclass(frozen=True)
class Asked:
    """What is asked for: `paths` of the parts that are compiled, by `backend_of` for a part and its
    memory; `functions` that are replaced, by the places of layers that are run again, None if none
    is; `every`: all layers are run again, whatever fits; `starts`: by path, see `Starts`; `own`:
    some layers of this package outside these parts may keep less."""

    model: nn.Module
    call: ModelCall
    memory: Memory
    paths: Collection[str]
    backend_of: Callable[[str, Memory], EchoBackend]
    functions: Callable[[Container[int]], Functions] | None
    every: bool
    starts: Mapping[str, Places]
    own: bool = False


@dataclass(frozen=True)
class Way:
    """A way to run a step: how its parts are planned, or run as they are written where they are not
    named here, which calls of layers are run again, and whether those of this package keep their
    states alone; and what it is found to hold."""

    parts: Mapping[str, Memory]
    graphs: Mapping[str, Sequence[GraphReport]]
    again: Container[int]
    found: Rehearsed
    states_alone: bool = False


@dataclass(frozen=True)
class Step:
    """The way that was chosen. `limit` and `as_written`, what the model holds as it is written, are
    bytes with weights and inputs. `bare`: none of its parts is compiled after all."""

    asked: Memory
    way: Way
    limit: int
    as_written: int
    bare: bool = False

    def told(self) -> str:
        found = self.way.found
        plain = "; no part is compiled: the step holds less without that" if self.bare else ""
        return (
            f"memory {self.asked}: {self.limit:,} bytes for a whole step like the first, weights"
            f" and inputs included; {size_text(found.held + found.most)} are predicted,"
            f" {size_text(self.as_written)} for the model as it is written{plain}"
        )


def within_budget(asked: Asked) -> Step:
    """Raises where the step does not fit, or cannot be rehearsed."""
    try:
        return _within_budget(asked)
    except NotUnderstood as error:
        raise cannot_be_promised(asked.memory, str(error)) from error


def cannot_be_promised(memory: Memory, why: str) -> NotUnderstood:
    return NotUnderstood(
        f'memory: {memory} cannot be promised for a whole step, since {why}; ask for "auto" or'
        ' "min"'
    )


def _within_budget(asked: Asked) -> Step:
    with rehearsal_of(asked.model, asked.call, {}) as rehearsal:
        written = rehearsal.step(None)
    limit = limit_of(asked.memory, written)
    room = limit - written.held

    def step(way: Way) -> Step:
        bare = bool(asked.paths) and not way.parts
        return Step(asked.memory, way, limit, written.held + written.most, bare)

    def planned(memory: Memory) -> Way:
        return _way(asked, dict.fromkeys(asked.paths, memory), room)

    if written.most <= room and asked.paths:
        parts = dict.fromkeys(asked.paths, Memory("bytes", limit))
        plain = _if_it_can_be(asked, parts, room, with_layers=False)
        if plain is not None and plain.found.most <= room:
            return step(plain)
    nearly_free = planned(AUTO)
    if nearly_free.found.most <= room:
        return step(nearly_free)
    least = planned(MIN) if asked.paths else nearly_free
    if least.found.most > room:
        # a part may hold more than its model had it hold, by checkpoints of its own for example
        bare = _way(asked, {}, room) if asked.paths else nearly_free
        if bare.found.most <= room:
            return step(bare)
        smallest = min(way.found.most for way in (nearly_free, least, bare))
        of = "the forward and backward pass of a step like this one"
        raise refusal(asked.memory, limit, written.held + smallest, of)
    last = nearly_free
    for _ in range(TIGHTENINGS):
        tighter = _tighter(last, last.found.most - room)
        between = None if tighter is None else _if_it_can_be(asked, tighter, room)
        if between is None:
            break
        if between.found.most <= room:
            return step(between)
        last = between
    return step(least)


def limit_of(memory: Memory, written: Rehearsed) -> int:
    if memory.kind == "fraction":
        return written.held + int(memory.amount * written.most)
    return int(memory.amount)


def _if_it_can_be(
    asked: Asked, parts: Mapping[str, Memory], room: int, *, with_layers: bool = True
) -> Way | None:
    """None where some part does not fit what it is given, or that cannot be promised for it."""
    try:
        return _way(asked, parts, room, with_layers=with_layers)
    except (InvalidInput, NotUnderstood):
        return None


def _way(asked: Asked, parts: Mapping[str, Memory], room: int, *, with_layers: bool = True) -> Way:
    """With parts planned so, and as few layers run again as fit, or all that there are. Without
    `with_layers` none is, whatever fits, unless all are anyway, and none keeps less."""
    backends = {path: asked.backend_of(path, memory) for path, memory in parts.items()}
    compiled = {
        path: Part(_compiling(backend), asked.starts.get(path), backend.common)
        for path, backend in backends.items()
    }
    graphs = {path: backend.report.graphs for path, backend in backends.items()}
    with rehearsal_of(asked.model, asked.call, compiled) as rehearsal:
        layers = LayerChoice(rehearsal, asked.functions, room, own=asked.own and with_layers)
        if asked.every or not with_layers:
            again = EVERY_CALL if asked.every else NO_CALL
            found = layers.with_states_if_needed(again)
        else:
            again, found = layers.chosen()
    return Way(parts, graphs, again, found, layers.states_alone)


def _compiling(backend: EchoBackend) -> Find:
    """Compiles what torch has traced of a part as it will be compiled when it is called, and tells
    what will run then."""
    recorded: list[Recorded] = []
    backend.recorded = recorded

    def find(module: fx.GraphModule, inputs: Sequence[Any]) -> Recorded:
        key = key_of(module, inputs)
        # by itself torch compiles a backward pass when it is first run
        ahead = functorch_config.patch(force_non_lazy_backward_lowering=True)
        with ahead, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it will be warned of when the model is called
            backend(module, inputs)
        found = [one for one in recorded if one.key == key]
        if not found or (found[-1].results is not None and found[-1].backward is None):
            raise NotUnderstood("torch has not compiled both passes of a part ahead of its call")
        return found[-1]

    return find


def _tighter(way: Way, over: int) -> dict[str, Memory] | None:
    """Parts planned for less, by so many bytes in all, in proportion to what they keep."""
    peaks, kept = {}, {}
    for path, graphs in way.graphs.items():
        known = [(graph.calls, graph.chosen) for graph in graphs if graph.chosen is not None]
        peaks[path] = max((chosen.peak_bytes for _, chosen in known), default=0)
        kept[path] = max((calls * chosen.kept_bytes for calls, chosen in known), default=0)
    total = sum(kept.values())
    if not 0 < over < total:
        return None
    return {
        path: Memory("bytes", peaks[path] - -(-over * kept[path] // total))
        if kept[path]
        else way.parts[path]
        for path in way.parts
    }
