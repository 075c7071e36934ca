"""What a backward pass runs again is run just before it is read, and as often as it pays."""

from __future__ import annotations

from ecornn.echo.analysis.liveness import simulate
from ecornn.echo.graph import Graph, Operation
from ecornn.echo.passes import Passes
from ecornn.echo.schedule import (
    FOR_ALL,
    Program,
    backward_program,
    forward_program,
    graph_of,
    saved,
)


def passes_of(*lines: tuple[str, str, tuple[str, ...]], outputs: tuple[str, ...]) -> Passes:
    """Each line: name, kind, names used; every result takes 8 bytes, views none."""
    names = [name for name, _, _ in lines]
    operations, storages = [], 0
    for name, kind, uses in lines:
        places = tuple(names.index(used) for used in uses)
        holds = operations[places[0]].holds if kind == "view" else (storages,)
        storages += kind != "view"
        operations.append(Operation(name, name, kind, places, holds))
    leaving = tuple(names.index(name) for name in outputs)
    return Passes(Graph(tuple(operations), (8,) * storages, leaving), 1)


def names(passes: Passes, program: Program) -> list[str]:
    return [passes.graph.operations[s.operation].name for s in program.steps[program.given :]]


def two_readers(between: int) -> Passes:
    """`wave` is read by the first operation on the gradient and, some later, by the last."""
    chain = [("tangents_1", "input", ())]
    lines = [("primals_1", "input", ()), ("wave", "cheap", ("primals_1",))]
    lines += [("seen", "view", ("wave",)), ("result", "cheap", ("wave",)), *chain]
    lines.append(("first", "cheap", ("tangents_1", "seen")))
    before = "first"
    for k in range(between):
        lines.append((f"on_{k}", "cheap", (before,)))
        before = f"on_{k}"
    lines.append(("last", "cheap", (before, "wave")))
    return passes_of(*lines, outputs=("result", "last"))


def test_one_copy_serves_all() -> None:
    passes = two_readers(3)
    program = backward_program(passes, saved(passes, frozenset()), FOR_ALL)
    assert names(passes, program) == ["wave", "seen", "first", "on_0", "on_1", "on_2", "last"]


def test_a_distant_reader_gets_its_own() -> None:
    passes = two_readers(3)
    program = backward_program(passes, saved(passes, frozenset()), 2)
    again = ["wave", "seen", "first", "on_0", "on_1", "on_2", "wave", "last"]
    assert names(passes, program) == again
    one, two = (
        simulate(graph_of(passes, p), (0,)).bytes_at
        for p in (backward_program(passes, saved(passes, frozenset()), FOR_ALL), program)
    )
    # while the gradient goes on, nothing but it and the input is there
    assert two[program.given + 4] == one[program.given + 4] - 8
    near = backward_program(passes, saved(passes, frozenset()), 4)
    assert names(passes, near).count("wave") == 1


def test_what_is_kept_is_not_run_again() -> None:
    passes = two_readers(1)
    wave = 1
    program = backward_program(passes, saved(passes, frozenset({wave})), 0)
    # the view is made again of what is kept: it takes nothing
    assert names(passes, program).count("wave") == 0
    forward = forward_program(passes, saved(passes, frozenset({wave})))
    assert names(passes, forward) == ["wave", "result"]


def test_a_draw_of_the_forward_pass_is_never_run_again() -> None:
    passes = passes_of(
        ("primals_1", "input", ()),
        ("mask", "random", ("primals_1",)),
        ("result", "cheap", ("mask",)),
        ("tangents_1", "input", ()),
        ("grad", "cheap", ("tangents_1", "mask")),
        outputs=("result", "grad"),
    )
    kept = saved(passes, frozenset({1}))
    assert kept == [1]
    assert names(passes, backward_program(passes, kept, 0)) == ["grad"]
    assert names(passes, forward_program(passes, kept)) == ["mask", "result"]


def test_the_parts_of_a_result_are_taken_at_once() -> None:
    """Else the whole would be held for the part that is read last."""
    lines = [
        ("primals_1", "input", ()),
        ("pair", "cheap", ("primals_1",)),
        ("left", "view", ("pair",)),
        ("right", "view", ("pair",)),
        ("result", "cheap", ("left",)),
        ("tangents_1", "input", ()),
        ("first", "cheap", ("tangents_1", "left")),
        ("last", "cheap", ("first", "right")),
    ]
    plain = passes_of(*lines, outputs=("result", "last"))
    operations = list(plain.graph.operations)
    operations[1] = Operation("pair", "pair", "cheap", (0,), (1,), several=True)
    passes = Passes(Graph(tuple(operations), plain.graph.storages, plain.graph.outputs), 1)
    program = backward_program(passes, saved(passes, frozenset()))
    assert names(passes, program) == ["pair", "left", "right", "first", "last"]
