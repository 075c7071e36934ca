"""Seeds of inductor's random numbers are kept as they were drawn, all of a graph in one tensor.

Each is looked up where a mask is made, within the kernel that makes it. One that is kept by itself
has to be written by a kernel of its own: 25 of 186 in the forward pass of GPT-2.
"""

from __future__ import annotations

from ecornn.echo.passes import Passes

LOOKED_UP = "inductor_lookup_seed"


def with_whole_seeds(passes: Passes, kept: frozenset[int]) -> frozenset[int]:
    """`kept`, with the tensor of all seeds in place of single ones."""
    operations = passes.graph.operations
    single = {i for i in kept if LOOKED_UP in operations[i].target}
    return (kept - single) | {used for i in single for used in operations[i].uses}
