"""The allocator without memory, and steps that are played through on it."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from ecornn.profiler import fit
from ecornn.profiler.blocks import BLOCK, MIB, Blocks, OutOfBlocks, Steps, Story
from ecornn.profiler.curve import largest_running


def test_segments_are_as_large_as_the_allocator_s() -> None:
    for count, reserved in (
        (1, 2),
        (MIB, 2),
        (MIB + 1, 20),
        (10 * MIB - BLOCK, 20),
        (10 * MIB, 10),
        (10 * MIB + 1, 12),
        (31 * MIB, 32),
    ):
        blocks = Blocks(2**40)
        blocks.take(count)
        assert blocks.reserved == reserved * MIB, count


def test_the_smallest_block_serves_and_is_split_if_enough_is_left() -> None:
    blocks = Blocks(2**40)
    large, medium = blocks.take(40 * MIB), blocks.take(30 * MIB)
    keep = blocks.take(30 * MIB)
    blocks.give(large)
    blocks.give(medium)
    assert blocks.take(29 * MIB) == medium, "1 MiB is left, which is not split"
    first, second = blocks.take(20 * MIB), blocks.take(20 * MIB)
    assert (first, second) == (large, large + 20 * MIB)
    assert blocks.reserved == 100 * MIB
    blocks.give(second)
    blocks.give(first)  # joined again
    assert blocks.take(40 * MIB) == large
    blocks.give(keep)


def test_small_ones_have_a_pool_of_their_own() -> None:
    blocks = Blocks(22 * MIB)
    blocks.take(2 * MIB)  # leaves 18 of 20
    places = [blocks.take(MIB // 2) for _ in range(4)]
    assert blocks.reserved == 22 * MIB
    with pytest.raises(OutOfBlocks):
        blocks.take(1)
    blocks.give(places[1])
    assert blocks.take(BLOCK) == places[1]


def test_before_it_gives_up_free_segments_are_handed_back() -> None:
    blocks = Blocks(40 * MIB)
    two = [blocks.take(12 * MIB), blocks.take(12 * MIB)]
    for address in two:
        blocks.give(address)
    blocks.take(30 * MIB)
    assert blocks.reserved == 30 * MIB
    held = Blocks(40 * MIB)
    two = [held.take(16 * MIB), held.take(16 * MIB)]
    for address in two:
        held.give(address)
    held.take(2 * MIB)  # keeps one of them from being handed back
    with pytest.raises(OutOfBlocks):
        held.take(30 * MIB)


def test_at_random_nothing_overlaps_and_nothing_is_lost() -> None:
    draw = random.Random(1)
    blocks, taken = Blocks(2**40), {}
    for _ in range(3000):
        if taken and draw.random() < 0.48:
            blocks.give(taken.pop(draw.choice(list(taken)))[0])
        else:
            size = int(2 ** draw.uniform(4, 26))
            taken[object()] = (blocks.take(size), size)
    ends = sorted((address, address + size) for address, size in taken.values())
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))
    for address, _ in taken.values():
        blocks.give(address)
    blocks._hand_back()
    assert (blocks.reserved, blocks._segments, blocks._size_at) == (0, {}, {})


def test_what_an_optimizer_makes_first_lies_in_the_way_afterwards() -> None:
    """A gap that a feature map left is taken by the state; the next step's needs another."""
    story = Story(
        (0, 0, 1), (None, None, 2), ("weights", "optimizer state", "workspace"), ("",) * 3
    )
    steps, sizes = Steps(story), (10 * MIB, 4 * MIB, 20 * MIB)
    assert not steps.run_within(34 * MIB, sizes, {}, 0), "the peak is 34 MiB"
    assert steps.run_within(50 * MIB, sizes, {}, 0)
    assert not steps.run_within(50 * MIB, sizes, {1: 32 * MIB}, 0), "scratch counts"
    assert not steps.run_within(50 * MIB, sizes, {}, 10 * MIB), "and what libraries hold"


def test_gradients_are_carried_from_step_to_step() -> None:
    story = Story((0, 1), (1, None), ("gradients", "gradients"), ("of w", "of w"))
    assert Steps(story).run_within(20 * MIB, (20 * MIB, 20 * MIB), {}, 0)
    kept = Story((0, 1), (2, None), ("gradients", "gradients"), ("of w", "of w"))
    assert not Steps(kept).run_within(20 * MIB, (20 * MIB, 20 * MIB), {}, 0), "two at once"


def test_a_model_runs_with_somewhat_more_than_its_peak() -> None:
    def make(batch: int) -> tuple[Callable[[], None], nn.Module, torch.optim.Optimizer]:
        layers = [one for _ in range(6) for one in (nn.Linear(1024, 1024), nn.GELU(), nn.Tanh())]
        model = nn.Sequential(*layers, nn.Linear(1024, 2000)).to("meta")
        optimizer = torch.optim.Adam(model.parameters())
        x = torch.empty(batch, 1024, device="meta")

        def step() -> None:
            optimizer.zero_grad()
            model(x).log_softmax(-1).mean().backward()
            optimizer.step()

        return step, model, optimizer

    curve = fit(make, sizes=(1000, 2000)).curve
    assert curve.same_storages
    memory = 2 * 2**30
    largest = curve.largest_within(memory, 2**16)
    assert largest is not None
    running = largest_running(lambda batch: curve.runs_within(memory, batch), largest)
    assert running is not None
    assert 0.75 * largest < running <= largest
    assert curve.runs_within(memory, running)
    assert running == largest or not curve.runs_within(memory, running + 1)


def test_blocks_of_a_gpu_are_foretold_to_the_byte() -> None:
    """Every allocation of four steps on an H200: what the allocator had reserved after each."""
    path = Path(__file__).parent / "data" / "resnet50-64-h200.json.gz"
    recorded = json.loads(gzip.decompress(path.read_bytes()))
    reserved = dict(recorded["reserved"])
    blocks, at, expected = Blocks(2**40), {}, 0
    for number, event in enumerate(recorded["events"]):
        if event > 0:
            at[event] = blocks.take(recorded["sizes"][event - 1])
        else:
            blocks.give(at.pop(-event))
        expected = reserved.get(number, expected)
        assert blocks.reserved == expected, number
    assert expected > 3 * 2**30
