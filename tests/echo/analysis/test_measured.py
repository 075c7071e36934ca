"""Measured times: kept, found again, never trusted blindly, never in the way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._subclasses import FakeTensorMode

from ecornn.echo.analysis import measured
from ecornn.echo.analysis.cost import CostModel
from ecornn.echo.analysis.measured import Measured, measure
from ecornn.echo.graph import Graph, Operation, read_graph
from ecornn.echo.work import Call, TensorLike


def graph_of(function: Callable[..., Any], *inputs: Tensor) -> Graph:
    return read_graph(aot_export_joint_simple(function, inputs, trace_joint=False))


def only(graph: Graph, part: str) -> Operation:
    (found,) = [op for op in graph.operations if part in op.target]
    return found


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("ECORNN_CACHE", str(tmp_path))
    return tmp_path / "echo-costs"


@pytest.fixture
def graph() -> Graph:
    return graph_of(lambda a: ((a @ a).t().tanh().tanh(),), torch.randn(16, 16))


def never(call: Call, device: torch.device) -> float:
    raise AssertionError(f"{call.key} was measured")


def test_nothing_is_measured_unless_asked_for(
    graph: Graph, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "measure", never)
    CostModel.of(graph)
    assert not cache.exists()


def test_what_was_measured_is_found_again(
    graph: Graph, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = CostModel.of(graph, measure=True)
    product = only(graph, "mm")
    assert first.figure(product).source == "measured"
    assert 0 < first.seconds(product) < 1
    (file,) = cache.iterdir()
    assert file.stat().st_mode & 0o077 == 0
    assert len(json.loads(file.read_bytes())["seconds"]) == 2  # mm, and tanh once
    monkeypatch.setattr(measured, "measure", never)
    again = CostModel.of(graph, measure=True)
    assert again.seconds(product) == first.seconds(product)
    assert "1 × aten.mm.default: measured" in again.explain(graph.operations)


def test_a_larger_product_takes_longer() -> None:
    small, large = (
        only(graph_of(lambda a: (a @ a,), torch.empty(size, size)), "mm").work.call
        for size in (8, 384)
    )
    assert small is not None
    assert large is not None
    seconds = [measure(call, torch.device("cpu")) for call in (small, large)]
    assert isinstance(seconds[0], float)
    assert isinstance(seconds[1], float)
    assert seconds[0] < seconds[1]


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"seconds": {}}',
        "WRONG FORM",
        "NO TIME",
    ],
)
def test_a_damaged_file_is_ignored_with_a_reason(graph: Graph, cache: Path, content: str) -> None:
    CostModel.of(graph, measure=True)
    (file,) = cache.iterdir()
    good = json.loads(file.read_bytes())
    if content == "WRONG FORM":
        content = json.dumps({**good, "form": 0})
    elif content == "NO TIME":
        content = json.dumps({**good, "seconds": {"mm": -1.0}})
    file.write_text(content)
    table = Measured(cache)
    assert isinstance(table.look_up(only(graph, "mm")), float)
    (reason,) = table.trouble
    assert "is not used" in reason
    table.save()  # replaces it
    fresh = Measured(cache)
    fresh.look_up(only(graph, "mm"))
    assert not fresh.trouble


def test_a_folder_that_others_can_write_is_not_used(graph: Graph, cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    model = CostModel.of(graph, measure=True)
    assert model.figure(only(graph, "mm")).source == "measured"  # for this process
    told = model.explain(graph.operations)
    assert "chmod 700" in told
    assert "measured times are not kept" in told
    assert not list(cache.iterdir())


def test_two_who_measure_at_once_keep_both(cache: Path) -> None:
    one, other = Measured(cache), Measured(cache)
    tanh = only(graph_of(lambda a: (a.tanh(),), torch.empty(4)), "tanh")
    exp = only(graph_of(lambda a: (a.exp(),), torch.empty(4)), "exp")
    one.look_up(tanh)
    other.look_up(exp)
    one.save()
    other.save()
    (file,) = cache.iterdir()
    assert len(json.loads(file.read_bytes())["seconds"]) == 2


def test_random_draws_are_not_measured_and_the_generator_stays() -> None:
    drawn = graph_of(lambda a: (torch.rand_like(a) * a.exp(),), torch.empty(4))
    before = torch.get_rng_state()
    model = CostModel.of(drawn, measure=True)
    assert torch.equal(before, torch.get_rng_state())
    random = next(op for op in drawn.operations if op.kind == "random")
    assert "never run again: random" in model.figure(random).why


def test_calls_are_real_while_tensors_are_fake(graph: Graph) -> None:
    call = only(graph, "mm").work.call
    assert call is not None
    with FakeTensorMode():
        assert isinstance(measure(call, torch.device("cpu")), float)


def test_what_cannot_be_run_says_why() -> None:
    like = TensorLike((2, 3), (3, 1), torch.float32, torch.device("cpu"))
    call = Call(torch.ops.aten.mm.default, (like, like), ())
    found = measure(call, torch.device("cpu"))
    assert isinstance(found, str)
    assert "could not be run" in found
    huge = TensorLike((1 << 20, 1 << 20), (1 << 20, 1), torch.float32, torch.device("cpu"))
    refused = measure(Call(torch.ops.aten.tanh.default, (huge,), ()), torch.device("cpu"))
    assert isinstance(refused, str)
    assert "are used to measure" in refused


def test_indices_and_lists_can_be_made_up(cache: Path) -> None:
    index = torch.zeros(3, dtype=torch.long)
    graph = graph_of(lambda a, i: (torch.cat([a[i], a], 0).sum([0, 1]),), torch.randn(5, 4), index)
    model = CostModel.of(graph, measure=True)
    for part in ("index", "cat", "sum"):
        assert model.figure(only(graph, part)).source == "measured"


@pytest.mark.gpu
def test_on_a_gpu_and_not_while_a_graph_is_captured() -> None:
    like = TensorLike((64, 64), (64, 1), torch.float32, torch.device("cuda", 0))
    call = Call(torch.ops.aten.mm.default, (like, like), ())
    device = torch.device("cuda", 0)
    assert isinstance(measure(call, device), float)
    x, graph = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = measure(call, device)
        x + 1
    assert found == "a CUDA graph is being captured"
