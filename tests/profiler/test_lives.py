"""Histories written by hand: who lay where, since when, and what adds up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ecornn.profiler import history
from ecornn.profiler.assemble import assemble
from ecornn.profiler.history import ENTRIES, History, Recorder, hush, missing
from ecornn.profiler.lives import FIRST, Lives, Mark, Marks
from ecornn.profiler.model import MemoryReport
from ecornn.profiler.observation import Observation
from ecornn.profiler.places import _TORCH
from ecornn.profiler.recorded import HistoryCounts
from ecornn.profiler.sightings import LAST, Keeper, Sightings

MIB = 1 << 20
FRAMES = [
    {"filename": f"{_TORCH}nn/functional.py", "line": 9, "name": "relu"},
    {"filename": f"{_TORCH}nn/modules/module.py", "line": 1, "name": "_call_impl"},
    {"filename": "/home/me/model.py", "line": 42, "name": "forward"},
    {"filename": "/home/me/train.py", "line": 7, "name": "step"},
]


def event(action: str, address: int, size: int, said: int | str = "", frames: Any = ()) -> Any:
    told = {"action": action, "addr": address, "size": size, "stream": 0, "time_us": 0}
    return {**told, "user_metadata": str(said), "frames": frames}


@pytest.fixture
def marks() -> Marks:
    return Marks(lambda _: None)


def test_an_address_is_lent_again_and_again(marks: Marks) -> None:
    """Three lie at 4096, one after the other, the first since before."""
    numbers = []
    for module in ("a", "b"):
        marks.set(Mark("forward", module))
        numbers.append(marks.last)
    before = numbers[0] - 1
    done = History(
        [
            event("free_requested", 4096, 100),
            event("alloc", 4096, 200, numbers[0], FRAMES),
            event("alloc", 8192, 50, "who said that?"),
            event("free_requested", 4096, 200),
            event("alloc", 4096, 300, numbers[1]),
        ],
        {4096: 300, 8192: 50, 512: 10},
        reserved=2 * MIB,
        allocated_before=1024,
        peak=2048,
    )
    lives = Lives(done, marks.said, [4096, 12288])
    told = [(one.bytes, one.module, one.born, one.freed) for one in lives.records]
    assert told == [
        (100, "", 0, 1),
        (10, "", 0, None),
        (200, "a", 1, 3),
        (50, "", 2, None),
        (300, "b", 3, None),
    ]
    found = [lives.find(4096, number) for number in (-1, before, *numbers, LAST)]
    assert [one.bytes if one else 0 for one in found] == [100, 100, 200, 300, 300]
    assert lives.find(12288, LAST) is None
    assert lives.times[0] == ("functional.relu", "a", "forward")
    assert lives.records[2].line_text.endswith("me/model.py:42 in forward")


def test_nothing_lies_at_an_address_between_its_loans(marks: Marks) -> None:
    """Memory of others' may: what is told of it must not be told of what lay there before."""
    numbers = []
    for _ in range(6):
        numbers.append(marks.last)
        marks.set(Mark("forward", ""))
    before, lent, ended, between, again, last = numbers
    done = History(
        [
            event("alloc", 4096, 100, lent),
            event("free_requested", 512, 10, ended),  # since before
            event("free_requested", 4096, 100, ended),
            event("alloc", 4096, 200, again),
            event("free_requested", 4096, 200, "who said that?"),
        ],
        {},
        reserved=0,
        allocated_before=0,
        peak=512,
    )
    lives = Lives(done, marks.said, [512, 4096])
    found = [[lives.find(at, number) for number in numbers] for at in (512, 4096)]
    first, second = ([one.bytes if one else 0 for one in each] for each in found)
    assert first == [10, 10, 0, 0, 0, 0]
    assert second == [0, 100, 0, 0, 200, 200], "to the end where nobody knows when that was"
    assert before < lent < ended < between < again < last


def test_nodes_that_are_alike_say_one_text_until_a_number_is_passed() -> None:
    """What is seen in the midst of a backward pass lies where it lay then, not what came after."""
    said: list[str] = []
    marks = Marks(said.append)
    marks.set(Mark("backward", ""))
    hooks = marks.hooks_for("a", "TanhBackward0")
    assert marks.hooks_for("a", "TanhBackward0") is hooks
    (tanh,), (add,) = hooks.values(), marks.hooks_for("a", "AddBackward0").values()
    for hook in (tanh, add, tanh):
        hook(None)
    start, first, other, again = said
    assert first == again != other
    seen = marks.passed()
    tanh(None)  # after what was seen, so that it must say a number of its own
    assert said[-1] not in (first, other, start)
    events = [event("alloc", 512, 8, again), event("free_requested", 512, 8)]
    events.append(event("alloc", 512, 8, said[-1]))
    lives = Lives(History(events, {512: 8}, 0, 0, 512), marks.said, [512])
    assert lives.times == [("TanhBackward0", "a", "backward")] * 2
    assert lives.find(512, seen) is lives.records[0]
    assert lives.find(512, LAST) is lives.records[1]
    later = marks.hooks_for("a", "TanhBackward0")
    assert later is not hooks
    marks.close()
    assert hooks == later == {}, "those of before as well: nodes that live on have none"


def test_what_is_seen_in_a_node_leaves_its_mark() -> None:
    marks = Marks(lambda _: None)
    (hook,) = marks.hooks_for("a", "TanhBackward0").values()
    hook(None)
    marks.passed()
    assert list(marks.said.values())[-1] == (marks.last, Mark("backward", "a", "TanhBackward0"))


def test_numbers_of_an_earlier_profile_mean_nothing() -> None:
    first = Marks(lambda _: None)
    first.set(Mark("backward", "old", "TanhBackward0"))
    second = Marks(lambda _: None)
    number = second.passed()
    stale = first.last
    lives = Lives(History([event("alloc", 512, 8, stale)], {512: 8}, 0, 0, 512), second.said, [512])
    assert lives.times == [("", "", "forward")]
    assert lives.find(512, number) is lives.records[0]


def test_reserved_memory_is_counted_back_from_the_end(marks: Marks) -> None:
    events = [
        event("segment_alloc", 0, 2 * MIB),
        event("alloc", 0, 8),
        event("segment_free", 9 * MIB, 20 * MIB),
        event("segment_map", 9 * MIB, 4 * MIB),
        event("alloc", 9 * MIB, 4 * MIB),
        event("segment_unmap", 9 * MIB, 4 * MIB),
        event("oom", 0, 2**50),
    ]
    lives = Lives(History(events, {}, 2 * MIB, 0, 512), marks.said, [])
    assert [lives.reserved_at(time) // MIB for time in range(3)] == [20, 22, 6]


def report_of(done: History, marks: Marks) -> MemoryReport:
    lives = Lives(done, marks.said, [])
    count = HistoryCounts(done, lives.reserved_at, driver=99)
    seen = Observation(torch.device("meta"), lives.records, lives.times, count, [])
    return assemble(seen, None)


def test_the_sum_is_the_allocator_s_count(marks: Marks) -> None:
    """Blocks that are not split are known at the beginning and at the peak, and never lift another
    time above that."""
    events = [
        event("alloc", 4096, 1000 * 512),
        event("alloc", 1 << 20, 3000 * 512),
        event("free_requested", 1 << 20, 3000 * 512),
        event("alloc", 1 << 20, 2990 * 512),
    ]
    peak = 4100 * 512 + 7000
    done = History(
        events,
        {512: 100 * 512, 4096: 1000 * 512, 1 << 20: 2990 * 512},
        reserved=8 * MIB,
        allocated_before=100 * 512 + 9000,
        peak=peak,
    )
    report = report_of(done, marks)
    assert (report.peak_time, report.peak_bytes, report.notes) == (2, peak, ())
    totals = [report.timeline.total(time) for time in range(4)]
    assert totals == [100 * 512 + 9000, 1100 * 512 + 9000, peak, 4090 * 512 + 9000]
    assert report.by_kind()["reserved, unused"] == 8 * MIB - peak
    assert report.by_kind()["driver"] == 99


def test_what_does_not_add_up_is_said(marks: Marks) -> None:
    done = History([event("alloc", 512, 512 * 200)], {}, 0, 0, 512 * 300, cut_off=True)
    report = report_of(done, marks)
    assert report.peak_bytes == 512 * 300
    assert [note.split(":")[0] for note in report.notes] == [
        "the allocator did more than is kept of its history",
        "the allocator's history adds up to 102,400 bytes at most, its own count to 153,600",
    ]


def test_blocks_that_others_have_not_split_add_up(marks: Marks) -> None:
    """Half of what was there before is in none of the events, and is known."""
    done = History([event("alloc", 4096, 512)], {512: 512 * 100}, 0, 512 * 200, 512 * 201)
    report = report_of(done, marks)
    assert report.notes == ()
    assert (report.peak_time, report.peak_bytes) == (1, 512 * 201)
    assert report.by_kind()["rounding"] == 512 * 100


def test_an_empty_step(marks: Marks) -> None:
    report = report_of(History([], {512: 8}, 2 * MIB, 512, 512), marks)
    assert (report.peak_time, report.peak_bytes) == (0, 512)
    assert report.timeline.bytes["workspace"] == (8,), "until somebody says what it is"


def test_what_a_tensor_is_for_is_told_to_the_right_one(marks: Marks) -> None:
    """By the address of its storage and when it was seen."""
    device = torch.device("cpu")
    seen = Sightings(device, marks.passed)
    weight, part = torch.zeros(4), torch.zeros(8)[2:5]
    seen.mark([(weight, "weights", "the parameter w", "layer")], before=True)
    seen.begin()
    marks.set(Mark("forward", "layer"))
    number = marks.last
    seen.kept([part, part], marks.passed(), Keeper("layer: tanh", True, {}))
    seen.handed(torch.zeros(2, device="meta"))
    seen.end()
    at = [one.untyped_storage().data_ptr() for one in (weight, part)]
    done = History(
        [event("alloc", at[1], 32, number), event("alloc", 512, 7, number)],
        {at[0]: 16, at[1]: 32, 512: 7, 1024: 5},
        0,
        0,
        1,
    )
    lives = Lives(done, marks.said, seen.seen.addresses)
    seen.seen.apply(lives)
    told = {one.bytes: (one.role, one.kept_by, one.shape, one.dtype) for one in lives.records}
    assert told == {
        16: ("weights", (), (4,), torch.float32),
        5: ("other", (), (), None),
        32: ("", ("layer: tanh",), (), None),
        7: ("", (), (), None),
    }
    assert seen.elsewhere == {torch.device("meta")}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_a_shape_or_out_of_reach_are_seen_as_far_as_they_can_be() -> None:
    seen = Sightings(torch.device("cpu"), lambda: 0)
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])

    def look(one: torch.Tensor) -> torch.Tensor:
        seen.mark([(one, "weights", "", "")], before=True)
        return one

    look(nested)
    look(torch.zeros(0))
    torch.func.vmap(look)(torch.zeros(3, 2))
    ((sighting, *_),) = seen.seen.roles
    assert sighting == (FIRST, nested.data_ptr(), None, torch.float32)


class FakeCuda:
    """What `Recorder` calls of torch, without a device."""

    def __init__(self) -> None:
        self.said, self.enabled = "the program's own", False
        self.recorded: list[dict[str, Any]] = []
        self.hushed: list[torch.device] = []

    def record(self, enabled: Any, **given: Any) -> None:
        self.enabled = enabled is not None
        self.recorded.append(given)

    def snapshot(self) -> Any:
        blocks = [("active_allocated", 0, 512, 8), ("inactive", 512, 512, 0)]
        blocks += [("active_awaiting_free", 1024, 512, 9)]
        told = [
            dict(zip(("state", "address", "size", "requested_size"), block, strict=True))
            for block in blocks
        ]
        segments = [{"device": one, "total_size": 2 * MIB, "blocks": told} for one in (0, 1, 1)]
        return {"segments": segments, "device_traces": [[], [event("alloc", 0, 8, 1)]]}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    functions: dict[str, Callable[..., Any]] = {
        "_cuda_setMemoryMetadata": lambda text: setattr(fake, "said", text),
        "_cuda_getMemoryMetadata": lambda: fake.said,
        "_cuda_isHistoryEnabled": lambda: fake.enabled,
        "_cuda_record_memory_history": fake.record,
        "_cuda_memorySnapshot": fake.snapshot,
    }
    for name, function in functions.items():
        monkeypatch.setattr(torch._C, name, function, raising=False)
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", fake.record)
    monkeypatch.setattr(memory, "_snapshot", fake.snapshot)
    monkeypatch.setattr(memory, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(history, "hush", lambda _, device: fake.hushed.append(device))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    told = {"allocated_bytes": {"all": {"current": 512, "peak": 1024}}}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: told)
    return fake


def test_the_recorder_leaves_things_as_they_were(cuda: FakeCuda) -> None:
    assert missing() is None
    recorder = Recorder(torch.device("cuda", 1))
    recorder.start()
    reason = missing()
    assert reason is not None
    assert "somebody else" in reason
    recorder.say("7")
    found = recorder.stop()
    assert not cuda.enabled
    recorder.close()
    assert cuda.said == "the program's own"
    assert cuda.hushed == [torch.device("cuda", 1)], "autograd's thread too"
    assert cuda.recorded[0]["max_entries"] == ENTRIES
    assert cuda.recorded[-1]["clear_history"], "nor is what was recorded"
    assert (found.in_use, found.reserved) == ({0: 8}, 4 * MIB), "of its own device"
    assert (found.allocated_before, found.peak, found.cut_off) == (512, 1024, False)
    recorder.close()
    assert (len(cuda.recorded), len(cuda.hushed)) == (2, 1), "nothing to do"


def test_a_thread_of_autograd_s_is_told_to_be_silent() -> None:
    said: list[str] = []
    with torch.inference_mode():
        hush(said.append, torch.device("cpu"))
    assert said == [""]


def test_why_there_is_no_history(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert missing() == "the allocator 'cudaMallocAsync' writes down no history"
    monkeypatch.delattr(torch._C, "_cuda_setMemoryMetadata")
    assert str(missing()).endswith("has no _cuda_setMemoryMetadata")


def test_columns_are_sums_over_what_is_alive(marks: Marks) -> None:
    """Beside a count of its own, at every time."""
    draw = np.random.default_rng(0)
    events, alive = [], {}
    truth = [0]
    for number in range(300):
        if alive and draw.random() < 0.4:
            address = int(draw.choice(list(alive)))
            events.append(event("free_requested", address, alive.pop(address)))
        else:
            size = int(draw.integers(1, 5000))
            alive[number * 8192] = size
            events.append(event("alloc", number * 8192, size))
            truth.append(sum(alive.values()))
    most = max(sum(-(-size // 512) * 512 for size in alive.values()), 1)
    report = report_of(History(events, alive, 0, 0, 10 * most), marks)
    assert report.timeline.bytes["workspace"] == tuple(truth)
