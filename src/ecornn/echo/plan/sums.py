"""Small results, kept by every plan for code that is fused.

A sum over a row, or its largest entry, takes a pass over the row to make again, and what is made of
both is written to memory where the kernel of that pass ends: inductor's code for a translator's
loss wrote 1.1 GiB that it does not write where two numbers a row are kept.

A single number costs nothing to keep, and making it again makes the kernels longer that read it.
Inductor writes a shared result of more than 30 steps to memory: where one number of that loss was
made again from another, it wrote those 1.1 GiB as well.
"""

from __future__ import annotations

from ecornn.echo.passes import Passes
from ecornn.echo.plan.groups import run_again

#: A result is small if it has at most this share of the bytes of what it is made of.
SMALL = 1 / 16
#: Or if it has no more bytes than this, as a single number has.
NUMBER = 16


def with_sums(passes: Passes, kept: frozenset[int]) -> frozenset[int]:
    """`kept`, and the small results among what would be run again."""
    operations = passes.graph.operations
    found = set(kept)
    for i in run_again(passes, kept):
        operation = operations[i]
        if operation.several or operation.kind not in ("cheap", "view"):
            continue
        # what is made of nothing is written in the kernels that read it
        made = operation.kind == "cheap" and operation.uses
        if made and i in passes.needed and _bytes(passes, i) <= NUMBER:
            found.add(i)
        sources = operation.uses
        if operation.kind == "view":  # one of several results; any other shows what it shows
            if not (len(sources) == 1 and operations[sources[0]].several):
                continue
            sources = operations[sources[0]].uses
        largest = max(map(passes.graph.shown_bytes, sources), default=0)
        if _bytes(passes, i) <= SMALL * largest:
            found.add(i)
    return frozenset(found)


def _bytes(passes: Passes, i: int) -> int:
    """What keeping it takes, which may be more than it shows."""
    return sum(passes.graph.storages[s] for s in passes.graph.operations[i].holds)
