"""Small results of large ones are kept in fused code; one state in some where that is smaller."""

from __future__ import annotations

import torch
from torch import Tensor

from ecornn.echo.analysis.repetition import repetition
from ecornn.echo.graph import read_graph
from ecornn.echo.passes import Passes
from ecornn.echo.plan.bidirectional import bidirectional
from ecornn.echo.plan.groups import run_again
from ecornn.echo.plan.prices import fused
from ecornn.echo.plan.sums import with_sums
from ecornn.echo.schedule import forward_program, saved
from support.joints import joint_of, leaf


def normalized(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    return torch.nn.functional.layer_norm(y, (64,)).tanh() @ w


def test_a_row_s_mean_is_kept_and_what_is_as_large_as_the_row_is_not() -> None:
    joint = joint_of(normalized, leaf((32, 64)), leaf((64, 64)))
    passes = Passes(read_graph(joint), 1)
    kept = frozenset(i for i, op in enumerate(passes.graph.operations) if op.kind == "product")
    kept -= passes.backward
    more = with_sums(passes, kept) - kept
    operations = passes.graph.operations
    assert more
    assert {passes.bytes_of(frozenset({i})) for i in more} == {32 * 4}
    again = run_again(passes, kept | more)
    assert any("tanh" in operations[i].target for i in again)


def averaged(x: Tensor, w: Tensor, mask: Tensor) -> Tensor:
    """Divided by how many there are: one number, made of another and of a number that is given."""
    scores = torch.where(mask, (x @ w).tanh(), 0.5)
    return (scores / mask.sum().float()).exp() @ w


def test_a_single_number_is_kept_and_a_constant_is_not() -> None:
    mask = torch.ones(32, 64, dtype=torch.bool)
    joint = joint_of(averaged, leaf((32, 64)), leaf((64, 64)), mask)
    passes = Passes(read_graph(joint), 1)
    operations = passes.graph.operations
    products = frozenset(i for i, op in enumerate(operations) if op.kind == "product")
    kept = products - passes.backward
    again = run_again(passes, kept)
    (number,) = (i for i in again & passes.needed if "_to_copy" in operations[i].target)
    constants = {i for i in again if not operations[i].uses}
    more = with_sums(passes, kept)
    assert number in more
    assert constants
    assert not constants & more


def fed(word: Tensor, state: Tensor, w: Tensor) -> Tensor:
    return torch.cat([word, state], dim=-1).mul(2.0) @ w


def test_what_is_made_of_a_row_of_a_large_tensor_is_not_small() -> None:
    """A word of a sentence, of which the storage has all words: its size is the word's."""
    words = torch.zeros(64, 4, 8)
    joint = joint_of(fed, words[3].requires_grad_(), leaf((4, 8)), leaf((16, 4)))
    passes = Passes(read_graph(joint), 1)
    operations, graph = passes.graph.operations, passes.graph
    word = graph.inputs[0]
    assert passes.graph.storages[operations[word].holds[0]] == words.nbytes
    assert graph.shown_bytes(word) == words[3].nbytes
    assert with_sums(passes, frozenset()) == frozenset()
    nothing = [0.0] * len(operations)
    moved = fused(passes, nothing, bandwidth=1.0, launch=0.0)
    forward = forward_program(passes, saved(passes, passes.needed))
    assert moved.of(forward) == 2 * words[3].nbytes + 2 * words[3].nbytes


def residual(x: Tensor, w: Tensor) -> Tensor:
    """What is added has half of the state's bytes, as under autocast."""
    for _ in range(12):
        x = x + (x.tanh().to(torch.bfloat16) @ w.to(torch.bfloat16)).float() * 2.0
    return x


def test_fewer_states_where_what_is_added_is_smaller() -> None:
    passes = Passes(read_graph(joint_of(residual, leaf((16, 16)), leaf((16, 16)))), 1)
    every, fourth = (passes.bytes_of(bidirectional(passes, one_state_in=n)) for n in (1, 4))
    assert fourth < 0.8 * every


def test_of_so_many_states_the_last_is_kept() -> None:
    """The first follows from the input: to keep it would save nobody anything."""
    passes = Passes(read_graph(joint_of(residual, leaf((16, 16)), leaf((16, 16)))), 1)
    states = sorted(repetition(passes).states)
    assert len(states) > 8
    kept = bidirectional(passes, one_state_in=4)
    assert {states[3], states[7]} <= kept
    assert not kept & {states[0], states[1], states[2], states[4]}


def two_streams(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    for _ in range(12):
        x = x + (x.bfloat16() @ w.bfloat16()).tanh()
        y = y + (y.bfloat16() @ w.bfloat16()).tanh()
    return x * y


def test_streams_that_take_turns_keep_states_of_both() -> None:
    passes = Passes(read_graph(joint_of(two_streams, *(leaf((16, 16)) for _ in range(3)))), 1)
    states = sorted(repetition(passes).states)
    assert len(states) == 24
    kept = bidirectional(passes, one_state_in=4)
    assert [i for i, state in enumerate(states) if state in kept] == [6, 7, 14, 15, 22, 23]
