"""Stacks whose layers run two at once on a GPU, against torch in float64 and against themselves one
layer after the other; captured, repeated, and beside other work."""

from __future__ import annotations

import copy
import gc
import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ecornn
from ecornn.backends import overlap
from ecornn.kernels.jit import compiled
from ecornn.kernels.persistent import device
from ecornn.kernels.persistent.choose import Request, ranked
from ecornn.kernels.persistent.launch import architecture
from ecornn.nn import overlapped, plain
from ecornn.ops import pair
from support.tolerances import ONE_STEP, assert_matches, tolerance

pytestmark = pytest.mark.gpu

CELLS = ("LSTM", "GRU", "RNN")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NUMBERS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "tf32"}
SIZES = tuple(itertools.product((64, 128, 256, 512), (1, 4, 16)))
#: Every cell in every dtype, each at another size; and every size of one of them.
CASES = [
    *((*which, *SIZES[at]) for at, which in enumerate(itertools.product(CELLS, DTYPES))),
    *(("LSTM", torch.bfloat16, *size) for size in SIZES),
]


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """All that the cases need, compiled side by side."""
    chip, arch, tiles = device.chip(0), architecture(0), set()
    for cell, dtype, hidden, batch in {*CASES, *MORE}:
        name = {"RNN": "rnn_tanh"}.get(cell, cell.lower())
        for kernel, share in itertools.product(("forward", "backward"), (1, 2)):
            ask = Request(kernel, name, NUMBERS[dtype], hidden, batch, share=share)
            tiles |= {g.tile for g in ranked(ask, chip)[:1]}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda tile: compiled(tile.variant(arch)), tiles))


#: Of the tests below that are not in `CASES`.
MORE = [("LSTM", torch.bfloat16, 1024, 4), ("GRU", torch.bfloat16, 256, 4)]


def forget() -> None:
    overlapped._FOUND.clear()
    plain._ROUTES.clear()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Layers run two at once wherever they fit; one for each pair that ran."""
    monkeypatch.setattr(overlap, "WORTH", 100.0)
    runs: list[int] = []
    run = pair.PlainPair.forward
    monkeypatch.setattr(pair.PlainPair, "forward", lambda self, *a: runs.append(0) or run(self, *a))
    forget()
    yield runs
    forget()
    torch.cuda.synchronize()
    device.failure_flag().check()


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], Any]:
    """Run something with the layers one after the other."""

    def run(what: Callable[[], Any]) -> Any:
        before, overlap.WORTH = overlap.WORTH, 0.0
        forget()
        try:
            return what()
        finally:
            overlap.WORTH = before
            forget()

    return run


def made(cell: str, hidden: int, dtype: torch.dtype, layers: int = 2, **options: Any) -> Any:
    torch.manual_seed(hidden)
    return getattr(ecornn, cell)(48, hidden, layers, device="cuda", dtype=dtype, **options)


def drawn(layer: Any, batch: int, steps: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(steps)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    states = 2 if isinstance(layer, nn.LSTM) else 1
    shape = (layer.num_layers, batch, layer.hidden_size)
    return [draw(steps, batch, layer.input_size), *(draw(*shape) * 0.5 for _ in range(states))]


def results(layer: Any, tensors: list[Tensor]) -> list[Tensor]:
    x, *states = tensors
    output, left = layer(x, tuple(states) if len(states) == 2 else states[0])
    return [output, *(left if isinstance(left, tuple) else (left,))]


def trained(layer: Any, tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Results and gradients of a loss to which every result counts."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    found = results(layer, leaves)
    grads = [(3 * y.detach()).cos() for y in found]  # nothing random: it may be captured
    return found, list(torch.autograd.grad(found, [*leaves, *layer.parameters()], grads))


def widened(layer: Any) -> Any:
    kind = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}[type(layer).__name__]
    found = kind(layer.input_size, layer.hidden_size, layer.num_layers).cuda().double()
    found.load_state_dict({name: p.double() for name, p in layer.state_dict().items()})
    return found


def bound(dtype: torch.dtype, steps: int) -> float:
    """Of two layers; TF32 has half precision's eleven bits."""
    one = ONE_STEP[torch.float16] if dtype == torch.float32 else ONE_STEP[dtype]
    return 2 * one * steps**0.5


@pytest.mark.parametrize(("cell", "dtype", "hidden", "batch"), CASES)
def test_all_is_as_in_float64_and_as_one_by_one(
    cell: str,
    dtype: torch.dtype,
    hidden: int,
    batch: int,
    taken: list[int],
    one_by_one: Callable[[Callable[[], Any]], Any],
) -> None:
    steps = {1: 64, 4: 129, 16: 300}[batch]
    layer = made(cell, hidden, dtype)
    tensors = drawn(layer, batch, steps, dtype)
    found = trained(layer, tensors)
    assert len(taken) == 1
    apart = one_by_one(lambda: trained(layer, tensors))
    assert len(taken) == 1
    wide = trained(widened(layer), [t.double() for t in tensors])
    for factor, ours, theirs, wanted in zip((1, 2), found, apart, wide, strict=True):
        for a, b, c in zip(ours, theirs, wanted, strict=True):
            assert_matches(a, c, factor * bound(dtype, steps))
            assert_matches(a, b.double(), factor * bound(dtype, steps))
    with torch.no_grad():
        for a, b in zip(results(layer, tensors), found[0], strict=True):
            assert_matches(a, b.double(), bound(dtype, steps))
    assert len(taken) == 2


def test_equal_bits_where_the_tile_is_the_same(
    taken: list[int], one_by_one: Callable[[Callable[[], Any]], Any]
) -> None:
    ask = Request("forward", "lstm", "bf16", 128, 4)
    alone, shared = device.geometry(ask, 0), device.geometry(replace(ask, share=2), 0)
    if alone != shared:
        pytest.skip("another tile serves on half of this GPU")
    layer = made("LSTM", 128, torch.bfloat16)
    tensors = drawn(layer, 4, 129, torch.bfloat16)
    with torch.no_grad():
        found, apart = results(layer, tensors), one_by_one(lambda: results(layer, tensors))
    # by the same kernel; only the second layer's product may be rounded otherwise
    assert torch.equal(found[1][0], apart[1][0])
    assert torch.equal(found[2][0], apart[2][0])
    assert_matches(found[0], apart[0].double(), bound(torch.bfloat16, 1))


@pytest.mark.parametrize("layers", [3, 4])
def test_more_than_two_layers(layers: int, taken: list[int]) -> None:
    layer = made("LSTM", 128, torch.bfloat16, layers)
    tensors = drawn(layer, 4, 129, torch.bfloat16)
    found, wide = trained(layer, tensors), trained(widened(layer), [t.double() for t in tensors])
    for a, c in zip(found[0] + found[1], wide[0] + wide[1], strict=True):
        assert_matches(a, c, layers * bound(torch.bfloat16, 129))
    assert len(taken) == layers // 2


@pytest.mark.parametrize("cell", CELLS)
def test_second_derivatives(cell: str, taken: list[int]) -> None:
    layer = made(cell, 64, torch.float32)
    tensors = drawn(layer, 4, 64, torch.float32)
    sides = []
    on_cpu = widened(layer).cpu()  # cuDNN has no second derivative
    for one, given in ((layer, tensors), (on_cpu, [t.double().cpu() for t in tensors])):
        leaves = [t.detach().requires_grad_() for t in given]
        loss = sum(y.sin().sum() for y in results(one, leaves))
        wanted = [*leaves, *one.parameters()]
        first = torch.autograd.grad(loss, wanted, create_graph=True)
        sides.append(torch.autograd.grad(sum(g.sin().sum() for g in first), wanted))
    for a, b in zip(*sides, strict=True):
        assert_matches(a, b, 10 * bound(torch.float32, 64))
    assert taken


@pytest.mark.parametrize(
    ("cell", "hidden"), [("LSTM", 128), ("LSTM", 512), ("LSTM", 1024), ("GRU", 256)]
)
@pytest.mark.parametrize("train", [False, True])
def test_a_graph_replayed_with_new_data(
    cell: str, hidden: int, train: bool, taken: list[int]
) -> None:
    layer = made(cell, hidden, torch.bfloat16)
    first, second = (drawn(layer, 4, steps, torch.bfloat16) for steps in (256, 256))
    second = [t.flip(-1) for t in second]
    held = [t.clone() for t in first]

    def step() -> list[Tensor]:
        if not train:
            with torch.no_grad():
                return results(layer, held)
        found, grads = trained(layer, held)
        return [*found, *grads]

    def plainly(tensors: list[Tensor]) -> list[Tensor]:
        for place, value in zip(held, tensors, strict=True):
            place.copy_(value)
        return [t.detach().clone() for t in step()]

    wanted = [plainly(first), plainly(second)]
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        step()
    torch.cuda.current_stream().wait_stream(other)
    before, graph = len(taken), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    assert len(taken) == before + 1, "it must be captured as a pair"
    for tensors, want in zip((first, second, first), (*wanted, wanted[0]), strict=True):
        for place, value in zip(held, tensors, strict=True):
            place.copy_(value)
        graph.replay()
        for a, b in zip(captured, want, strict=True):
            assert_matches(a, b.double(), bound(torch.bfloat16, 256))


def test_two_hundred_calls_beside_another_stream(taken: list[int]) -> None:
    """Sizes in turn, each against its own first result."""
    layers = [
        (made("LSTM", hidden, torch.bfloat16), batch) for hidden, batch in SIZES if hidden > 64
    ]
    given = [drawn(layer, batch, 100, torch.bfloat16) for layer, batch in layers]
    first = [
        [t.clone() for t in trained(layer, t)[1]]
        for (layer, _), t in zip(layers, given, strict=True)
    ]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    other, busy = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    for call in range(200):
        index = call % len(layers)
        if call % 3 == 0:
            with torch.cuda.stream(other):
                busy = (busy @ busy).clamp(-1, 1)
        grads = trained(layers[index][0], given[index])[1]
        for a, b in zip(grads, first[index], strict=True):
            wrong += (a != b).any()
    torch.cuda.synchronize()
    device.failure_flag().check()
    assert wrong.item() == 0


@pytest.mark.parametrize("hidden", [256, 1024])
def test_two_stacks_on_two_streams(hidden: int, taken: list[int]) -> None:
    """Four kernels that each want half of the chip: they must take turns and not wait forever."""
    layers = [made("LSTM", hidden, torch.bfloat16) for _ in range(2)]
    given = [drawn(layers[0], 4, 100, torch.bfloat16) for _ in range(2)]
    want = [[t.clone() for t in trained(one, t)[1]] for one, t in zip(layers, given, strict=True)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        for one, tensors, stream in zip(layers, given, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(trained(one, tensors)[1])
        torch.cuda.synchronize()
        for ours, theirs in zip(found, want, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("train", [False, True])
def test_no_memory_is_left_behind(train: bool, taken: list[int]) -> None:
    layer = made("LSTM", 256, torch.bfloat16)
    tensors = drawn(layer, 4, 129, torch.bfloat16)

    def step() -> None:
        if train:
            trained(layer, tensors)
        else:
            with torch.no_grad():
                results(layer, tensors)

    step()
    torch.cuda.synchronize()
    gc.collect()  # what earlier tests have left would go meanwhile
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    # autograd's thread may give up the last gradients a little later than the call returns
    patience = time.monotonic() + 5
    while torch.cuda.memory_allocated() != before and time.monotonic() < patience:
        time.sleep(0.01)
    assert torch.cuda.memory_allocated() == before


def test_large_shares_of_the_gates_take_no_more_memory(
    taken: list[int], one_by_one: Callable[[Callable[[], Any]], Any]
) -> None:
    """More than 32 MiB of them, which are there in turns."""
    layer = made("LSTM", 512, torch.bfloat16)
    tensors = drawn(layer, 16, 1100, torch.bfloat16)

    def peak() -> tuple[list[Tensor], int]:
        with torch.no_grad():
            results(layer, tensors)
            torch.cuda.reset_peak_memory_stats()
            found = results(layer, tensors)
        return found, torch.cuda.max_memory_allocated()

    found, ours = peak()
    assert len(taken) == 2
    del taken[:]
    apart, theirs = one_by_one(peak)
    assert not taken
    for a, b in zip(found, apart, strict=True):
        assert_matches(a, b.double(), bound(torch.bfloat16, 1100))
    # the results of the first are still there when the second runs
    held = sum(t.nbytes for t in found)
    assert ours <= theirs - held + (1 << 20)


def test_the_batch_first_and_a_copy(taken: list[int]) -> None:
    layer = made("GRU", 256, torch.bfloat16, batch_first=True)
    x = torch.randn(4, 129, 48, device="cuda", dtype=torch.bfloat16)
    found = layer(x)[0]
    other = copy.deepcopy(layer)
    other.batch_first = False
    assert torch.equal(found, other(x.transpose(0, 1).contiguous())[0].transpose(0, 1))
    assert len(taken) == 2


def test_it_says_so_and_is_chosen_where_it_pays() -> None:
    forget()
    layer = made("LSTM", 256, torch.bfloat16)
    x = torch.randn(256, 1, 48, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        text = layer.explain(x).explain()
    if torch.cuda.get_device_properties(0).multi_processor_count == 132:
        assert "two layers run at once" in text
    # called and trained, small layers are bound by the host
    assert "one after the other" in layer.explain(x).explain()
    short = layer.explain(x[:16]).explain()
    assert "one after the other" in short
    layer.dropout = 0.5
    assert "dropout between" in layer.explain(x).explain()


@pytest.mark.parametrize("numbers", ["tf32x3", "ieee"])
def test_float32_that_is_not_tf32(numbers: str, taken: list[int]) -> None:
    rnn = torch.backends.cudnn.rnn
    before = rnn.fp32_precision
    rnn.fp32_precision = "none" if numbers == "tf32x3" else numbers
    assert device.numbers_of(torch.float32) == numbers
    try:
        layer = made("LSTM", 128, torch.float32)
        tensors = drawn(layer, 4, 65, torch.float32)
        found, wide = (
            trained(layer, tensors),
            trained(widened(layer), [t.double() for t in tensors]),
        )
        for a, c in zip(found[0] + found[1], wide[0] + wide[1], strict=True):
            assert_matches(a, c, 4 * tolerance(torch.float32, 65, order=1))
        assert taken
    finally:
        rnn.fp32_precision = before
