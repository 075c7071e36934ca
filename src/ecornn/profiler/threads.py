"""Which thread made a node of autograd's.

Every thread numbers the nodes that it makes by itself, and a node does not tell which thread that
was. On CUDA a backward pass runs on a thread of the device's, and with it all that is made again in
a reentrant checkpoint, which then starts a pass of its own from there.
"""

from __future__ import annotations

from threading import get_ident

from ecornn.profiler.kept import next_number, running_node


class Makers:
    """Told when the forward pass runs and when a backward pass starts and ends."""

    def __init__(self) -> None:
        self._home = get_ident()
        #: Of the first node that is made from now on.
        self._first_number = next_number()
        self._forward = {self._home}
        #: Of each backward pass that runs: which thread started it, and which made its nodes.
        self._passes: list[tuple[int, int]] = []

    def makes(self) -> int:
        """A module is called on this thread."""
        here = get_ident()
        if here not in self._forward and running_node() is None:
            self._forward.add(here)
        return here

    def pass_starts(self) -> None:
        here = get_ident()
        # Inside another pass, what it starts from was made just before; else in the forward pass.
        made_here = here in self._forward or running_node() is not None
        self._passes.append((here, here if made_here else self._home))

    def pass_ends(self) -> None:
        here = get_ident()
        last = max((i for i, (thread, _) in enumerate(self._passes) if thread == here), default=-1)
        if last >= 0:
            self._passes.pop(last)

    def of_running(self) -> int:
        """Who made the nodes of the pass that runs on this thread, whichever one started it; if
        none runs, of one that would start now."""
        here = get_ident()
        for thread, maker in reversed(self._passes):
            if thread == here:
                return maker
        if self._passes:
            return self._passes[-1][1]
        return here if here in self._forward else self._home

    def of_this_step(self, maker: int, number: int) -> bool:
        return number >= self.first_of_this_step(maker)

    def first_of_this_step(self, maker: int) -> int:
        """What another thread made, it made in a pass of the step."""
        return self._first_number if maker == self._home else 0
