"""From a history to one record for every allocation, and which one a tensor lay in.

An address is lent again and again. What the program tells of a tensor is therefore told with a
number: numbers are counted up and stand beside what the allocator does, so that of all that lay at
the address, the one meant is the last before that number was passed. If that one had ended by then,
none is: the tensor lies in memory of others', which the allocator has given back or never had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from ecornn.profiler.history import History
from ecornn.profiler.places import Folders, file_line, passed_over_file
from ecornn.profiler.storages import Record

#: Before all that is recorded.
FIRST = -1


class Mark(NamedTuple):
    phase: str
    module: str
    #: Of the backward pass: the node that runs.
    node: str = ""


NOTHING = Mark("forward", "")


@lru_cache(maxsize=4096)
def mark_of(phase: str, module: str) -> Mark:
    """Made once: modules come again and again."""
    return Mark(phase, module)


#: As autograd keeps the hooks of a tensor: they are gone from every node when this is emptied.
Hooks = dict[int, Callable[[Any], None]]
#: By the text of a number: the number, and what it stands for.
Said = Mapping[str, tuple[int, Mark]]


class Marks:
    """What the program was doing, by the number that stands beside what the allocator did."""

    #: Of all that are ever made: threads of autograd's are told last what the profile before said.
    _next = count(1)

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        #: By the text of the number.
        self.said: dict[str, tuple[int, Mark]] = {}
        self._now, self.last = NOTHING, next(self._next)
        #: Those that were made since that number was set, and all of them.
        self._hooks: dict[tuple[str, str], Hooks] = {}
        self._every: list[Hooks] = []
        self._made_at = FIRST

    def set(self, mark: Mark) -> None:
        self._now = mark
        self.last = number = next(self._next)
        text = str(number)
        self.said[text] = (number, mark)
        self._say(text)

    def passed(self) -> int:
        """A number between what was done until now and what follows."""
        number = self.last
        self.set(self._now)
        return number

    def known_hooks(self) -> dict[tuple[str, str], Hooks]:
        """By module and name, for nodes of the backward pass: one for all that are alike, since a
        step has thousands. They are those that were made since a number was passed last, and until
        one is."""
        if self._made_at != self.last:
            self._hooks = {}
            self._made_at = self.last
        return self._hooks

    def hooks_for(self, module: str, node: str) -> Hooks:
        """One of them. As long as no number was passed since it was made, it says one text over
        and over, which takes about half the time that a new number does."""
        known, key = self.known_hooks(), (module, node)
        found = known.get(key)
        if found is None:
            found = known[key] = {0: self._make_setter(Mark("backward", module, node))}
            self._every.append(found)
        return found

    def _make_setter(self, mark: Mark) -> Callable[[Any], None]:
        number, text, say = self.last, str(next(self._next)), self._say
        self.said[text] = (number, mark)

        def setter(_gradients: Any) -> None:
            if self.last == number:
                self._now = mark
                say(text)
            else:
                self.set(mark)

        return setter

    def close(self) -> None:
        """Nodes that live on have no hook from now on. Hooks hold on to this, and this must not
        hold on to them."""
        for hooks in self._every:
            hooks.clear()
        self._every.clear()
        self._hooks.clear()


class Lives:
    """`records`: what was there before (born at time 0), then every allocation, each at a time of
    its own. What ends between two allocations is there at the time of the first, so that the most
    that is alive at any time is the most there ever was."""

    def __init__(
        self, history: History, said: Said, addresses: Iterable[int], folders: Folders = ()
    ) -> None:
        """`addresses`: those that will be asked for. `folders`: from which lines are told."""
        self.folders = folders
        #: At each time from 1: operator, module, phase.
        self.times: list[tuple[str, str, str]] = []
        #: After which time it changed, and by how much until then: memory taken from the device.
        self._reserved: list[tuple[int, int]] = [(-1, 0)]
        self._before: list[Record] = []
        self._made: list[Record] = []
        #: By address, in order: the number that had been passed, and what came to lie there, or
        #: None where what lay there ended.
        self._at: dict[int, list[tuple[int, Record | None]]] = {one: [] for one in addresses}
        alive, changed = self._follow(history.events, said)
        self._reserved_before = history.reserved - changed
        for address, size in history.in_use.items():
            if address not in alive:
                self._was_before(address, size)
        self.records = self._before + self._made

    def reserved_at(self, time: int) -> int:
        """What the allocator had taken from the device, counted back from the end."""
        changes = [count for after, count in self._reserved if after < time]
        return self._reserved_before + changes[-1]

    def in_order(self, before: Iterable[Record]) -> None:
        """What was there before, in the order in which the program told of it: addresses say
        nothing. What nobody told of comes last, the largest first."""
        place = {id(record): number for number, record in enumerate(before)}
        last = len(place)
        self._before.sort(key=lambda one: (place.get(id(one), last), -one.bytes))
        self.records = self._before + self._made

    def _follow(
        self, events: Sequence[Mapping[str, Any]], said: Said
    ) -> tuple[dict[int, Record], int]:
        """What is alive at the end, by address, and how much more is reserved than before."""
        place_of, nowhere = Places(self.folders).of, ("", "")
        alive: dict[int, Record] = {}
        passed, time, reserved = FIRST + 1, 0, 0
        told, (phase, module, node) = "", NOTHING
        times, made, at = self.times, self._made, self._at
        for event in events:  # thousands: nothing is done here that can be done later
            action = event["action"]
            if action == "alloc":
                if event["user_metadata"] != told:
                    told = event["user_metadata"]
                    number, (phase, module, node) = said.get(told, (0, NOTHING))
                    if number > passed:
                        passed = number
                frames = event.get("frames")
                operator, line = place_of(frames) if frames else nowhere
                operator = node or operator
                time += 1
                times.append((operator, module, phase))
                record = Record(event["size"], (), None, module, operator, None, time, None, line)
                address = event["addr"]
                alive[address] = record
                if address in at:
                    at[address].append((passed, record))
                made.append(record)
            elif action == "free_requested":
                address = event["addr"]
                found = alive.pop(address, None) or self._was_before(address, event["size"])
                found.freed = time + 1
                # Beside a thread that has said nothing, nobody knows which number was passed.
                if address in at and event["user_metadata"] in said:
                    passed = max(passed, said[event["user_metadata"]][0])
                    at[address].append((passed, None))
            elif action in ("segment_alloc", "segment_map"):
                reserved += event["size"]
                self._reserved.append((time, reserved))
            elif action in ("segment_free", "segment_unmap"):
                reserved -= event["size"]
                self._reserved.append((time, reserved))
        return alive, reserved

    def _was_before(self, address: int, size: int) -> Record:
        record = Record(size, (), None, "", "", None, 0)
        if address in self._at:
            self._at[address].insert(0, (FIRST, record))
        self._before.append(record)
        return record

    def find(self, address: int, passed: int) -> Record | None:
        """What lay at the address when the marks had come to that number, if it was lent then."""
        found = None
        for number, record in self._at.get(address, ()):
            if number > passed:
                break
            found = record
        return found


class Places:
    """Each frame is looked at once: torch makes one of all that are alike, and they live as long as
    the history does."""

    def __init__(self, folders: Folders) -> None:
        self._folders = folders
        #: By the identity of a frame; lines are None in files that are passed over.
        self._functions: dict[int, str] = {}
        self._lines: dict[int, str | None] = {}

    def of(self, frames: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
        """The function that took the memory, such as "functional.relu", and the innermost line
        outside of torch and of this package's layers."""
        first = frames[0]
        function = self._functions.get(id(first))
        if function is None:
            function = f"{Path(first['filename']).stem}.{first['name']}"
            self._functions[id(first)] = function
        lines = self._lines
        for frame in frames:
            line = lines.get(id(frame), "")
            if line == "":
                line = lines[id(frame)] = self._line_of(frame)
            if line is not None:
                return function, line
        return function, ""

    def _line_of(self, frame: Mapping[str, Any]) -> str | None:
        file = frame["filename"]
        if passed_over_file(file):
            return None
        return file_line(file, frame["line"], frame["name"], self._folders)
