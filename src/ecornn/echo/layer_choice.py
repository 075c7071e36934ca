"""`LayerChoice`: which calls of a step's recurrent layers are run again for it to fit, and whether
those of this package keep their gates, found by rehearsals."""

from __future__ import annotations

from collections.abc import Callable, Container

from ecornn.echo.counted_storages import Functions
from ecornn.echo.lean.layers import EVERY_CALL, NO_CALL
from ecornn.echo.rehearse import Rehearsal, Rehearsed
from ecornn.ops.keeping import keeping_states_alone

#: Of layers that are enough together, so many are tried to be kept after all, the dearest first:
#: each is a rehearsal.
MOST_SPARED = 8


class LayerChoice:
    """`functions`: those that are replaced in a rehearsal, by the places of calls that are run
    again; None if none is. `room`: bytes for what the step makes. `own`: there are layers of this
    package that may keep less."""

    def __init__(
        self,
        rehearsal: Rehearsal,
        functions: Callable[[Container[int]], Functions] | None,
        room: int,
        *,
        own: bool = False,
    ) -> None:
        self._rehearsal, self._functions, self._room = rehearsal, functions, room
        self._own = own
        #: Do layers of this package keep their states alone?
        self.states_alone = False

    def chosen(self) -> tuple[Container[int], Rehearsed]:
        """Which ones, and what the step holds then; where nothing fits, what holds least."""
        none = self.with_states_if_needed(NO_CALL)
        if none.most <= self._room or not none.layers:
            return NO_CALL, none
        all_of_them = self.rehearsed(EVERY_CALL)
        if all_of_them.most > self._room:
            fewer = none.most <= all_of_them.most
            return (NO_CALL, none) if fewer else (EVERY_CALL, all_of_them)
        again, found = self._enough(none) or (frozenset(none.layers), all_of_them)
        again, found = self._spared(again, found)
        return EVERY_CALL if len(again) == len(none.layers) else again, found

    def with_states_if_needed(self, again: Container[int]) -> Rehearsed:
        """All layers of this package together, and before any of torch's is run again: gates are
        made again by one product, a layer of torch's by all of its steps."""
        found = self.rehearsed(again)
        if found.most <= self._room or not self._own:
            return found
        self.states_alone = True
        less = self.rehearsed(again)
        self.states_alone = less.most < found.most
        return less if self.states_alone else found

    def rehearsed(self, again: Container[int]) -> Rehearsed:
        with keeping_states_alone(self.states_alone):
            return self._rehearsal.step(None if self._functions is None else self._functions(again))

    def _enough(self, found: Rehearsed) -> tuple[frozenset[int], Rehearsed] | None:
        """At the peak, those first of which most bytes are there for each second that they take;
        then at the peak that is left."""
        again: frozenset[int] = frozenset()
        while (over := found.most - self._room) > 0:
            there = {p: count for p, count in found.at_peak.items() if count and p not in again}
            more: list[int] = []
            for place in sorted(there, key=lambda p: (-there[p] / found.layers[p], p)):
                if over > 0:
                    more.append(place)
                    over -= there[place]
            if not more:
                return None
            again = again.union(more)
            found = self.rehearsed(again)
        return again, found

    def _spared(self, again: frozenset[int], found: Rehearsed) -> tuple[frozenset[int], Rehearsed]:
        """Without those that are not needed: what the layer holds at whose turn the peak comes is
        there whether it is run again or not."""
        dearest = sorted(again, key=lambda place: -found.layers[place])
        for place in dearest[:MOST_SPARED] if len(again) > 1 else ():
            less = self.rehearsed(again - {place})
            if less.most <= self._room:
                again, found = again - {place}, less
        return again, found
