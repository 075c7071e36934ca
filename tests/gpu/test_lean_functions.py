"""On a GPU: the bits of torch's cross entropy, what is held, and a capture in a CUDA graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ecornn.echo.lean import cross_entropy, layers
from ecornn.echo.lean.mode import LeanFunctions, Replaced

pytestmark = pytest.mark.gpu

MIB = 2**20


def lean(scores: Tensor, target: Tensor, replaced: Replaced, **kwargs: object) -> Tensor:
    functions = LeanFunctions(replaced)
    try:
        with functions:
            return F.cross_entropy(scores * 1, target, **kwargs)
    finally:
        functions.end_of_call()


# Rows that begin anywhere in 16 bytes, and sizes for each of torch's kernels.
@pytest.mark.parametrize("classes", [37, 1000, 1024, 7709, 7712, 50257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_every_bit_is_torch_s(
    classes: int, dtype: torch.dtype, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "FEWEST_BYTES", 0)
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 3 * 16 * classes * dtype.itemsize)
    for first in (0, 1, 3):  # of rows of more: their memory begins elsewhere in 16 bytes
        made = 4 * torch.randn(211, classes, device="cuda")
        leaf = made.to(dtype).requires_grad_()
        target = torch.randint(classes, (211 - first,), device="cuda")
        target[::5] = 3
        replaced = Replaced()
        asked = {"reduction": reduction, "ignore_index": 3}
        expected = F.cross_entropy((leaf * 1)[first:], target, **asked)
        functions = LeanFunctions(replaced)
        with functions:
            found = F.cross_entropy((leaf * 1)[first:], target, **asked)
        functions.end_of_call()
        assert torch.equal(found, expected)
        slope = torch.randn_like(expected)
        one, other = (torch.autograd.grad(loss, leaf, slope)[0] for loss in (found, expected))
        assert torch.equal(one, other)
        assert replaced.calls == 1


def test_scores_are_held_once() -> None:
    """The backward pass runs in a thread of torch's own: the counts are the same there."""
    rows, classes = 4096, 8192
    hidden = torch.randn(rows, 8, device="cuda", requires_grad=True)
    weight = torch.randn(8, classes, device="cuda", requires_grad=True)
    target = torch.randint(classes, (rows,), device="cuda")
    scores_bytes = 4 * rows * classes

    def step(replaced: Replaced) -> None:
        functions = LeanFunctions(replaced)
        with functions:
            loss = F.cross_entropy(hidden @ weight, target)
        functions.end_of_call()
        loss.backward()

    replaced = Replaced()
    step(replaced)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(replaced)
    held = torch.cuda.max_memory_allocated() - before
    assert replaced.private == 2
    assert scores_bytes <= held <= scores_bytes + cross_entropy.CHUNK_BYTES + 2 * MIB


def test_it_can_be_captured() -> None:
    leaf = torch.randn(4096, 2048, device="cuda", requires_grad=True)
    target = torch.randint(2048, (4096,), device="cuda")
    replaced = Replaced()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        lean(leaf, target, replaced).backward()
    torch.cuda.current_stream().wait_stream(side)
    leaf.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lean(leaf, target, replaced).backward()
    with torch.no_grad():
        leaf.copy_(torch.randn_like(leaf))
    graph.replay()
    (expected,) = torch.autograd.grad(F.cross_entropy(leaf * 1, target), leaf)
    assert replaced.private == 2
    assert torch.equal(leaf.grad, expected)


def test_a_layer_that_is_run_again_keeps_nothing_and_has_the_same_bits() -> None:
    layer = torch.nn.LSTM(256, 256).cuda()
    x = torch.randn(64, 128, 256, device="cuda", requires_grad=True)
    results = 4 * 64 * 128 * 256
    found, kept = [], []
    for rerun in (False, True):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with LeanFunctions(Replaced(), again=layers.EVERY_CALL if rerun else layers.NO_CALL):
            loss = layer(x)[0].sum()
        kept.append(torch.cuda.memory_allocated() - before)
        found.append(torch.autograd.grad(loss, [x, *layer.parameters()]))
        del loss
    assert kept[0] > 4 * results
    assert kept[1] < results
    assert all(map(torch.equal, *found))
