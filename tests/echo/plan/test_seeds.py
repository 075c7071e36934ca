"""Seeds are kept as they were drawn."""

from __future__ import annotations

from ecornn.echo.graph import Graph, Operation
from ecornn.echo.passes import Passes
from ecornn.echo.plan.seeds import with_whole_seeds


def test_all_seeds_stand_for_single_ones() -> None:
    look_up, mask = "prims.inductor_lookup_seed.default", "prims.inductor_random.default"
    operations = (
        Operation("x", "x", "input", (), (0,)),
        Operation("seeds", "prims.inductor_seeds.default", "random", (), (1,)),
        Operation("first", look_up, "cheap", (1,), (2,)),
        Operation("second", look_up, "cheap", (1,), (3,)),
        Operation("mask", mask, "cheap", (2,), (4,)),
    )
    passes = Passes(Graph(operations, (400, 16, 8, 8, 400), (4,)), 1)
    assert with_whole_seeds(passes, frozenset({2, 3, 4})) == {1, 4}
    assert with_whole_seeds(passes, frozenset({4})) == {4}
