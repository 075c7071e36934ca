"""Times of operations: the arithmetic of the roofline, and where a figure came from."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch.aot_autograd import aot_export_joint_simple

from ecornn.echo.analysis.cost import CostModel
from ecornn.echo.analysis.machine import REACHED, Machine, _from_attributes, _from_sheet, machine_of
from ecornn.echo.graph import Graph, Operation, read_graph
from ecornn.echo.work import Work
from support.joints import joint_of, leaf


def graph_of(function: Callable[..., Any], *inputs: Tensor) -> Graph:
    return read_graph(aot_export_joint_simple(function, inputs, trace_joint=False))


def only(graph: Graph, part: str) -> Operation:
    (found,) = [op for op in graph.operations if part in op.target]
    return found


def test_what_an_operation_reads_writes_and_computes() -> None:
    graph = graph_of(
        lambda a, b, row: ((a @ b).tanh() + row.expand(3, 7),),
        *(torch.randn(3, 5), torch.randn(5, 7), torch.randn(1, 7)),
    )
    product = only(graph, "mm").work
    assert (product.read_bytes, product.written_bytes) == (4 * (15 + 35), 4 * 21)
    assert product.flops == 2 * 3 * 5 * 7
    assert (product.dtype, product.device) == (torch.float32, torch.device("cpu"))
    add = only(graph, "add.Tensor").work
    # an expanded tensor is read once
    assert (add.read_bytes, add.written_bytes, add.flops) == (4 * (21 + 7), 4 * 21, 21)
    assert only(graph, "expand").kind == "view"


def test_a_comparison_counts_its_booleans_as_bytes() -> None:
    work = only(graph_of(lambda a: (a > 0,), torch.randn(6, dtype=torch.float64)), "gt").work
    assert (work.read_bytes, work.written_bytes, work.dtype) == (48, 6, torch.float64)


def test_the_roofline_is_the_slower_of_memory_and_arithmetic() -> None:
    machine = Machine("toy", 100.0, {torch.float32: 1000.0}, 10.0, 0.5, 0.7, "made up")
    moving = Work(None, 300, 100, 40, torch.float32)
    assert machine.seconds(moving, product=True) == 4.0 + 0.5
    assert machine.seconds(moving, product=False) == 4.0 + 0.5
    computing = Work(None, 300, 100, 8000, torch.float32)
    assert machine.seconds(computing, product=True) == 8.0 / REACHED + 0.5
    assert machine.seconds(computing, product=False) == 800.0 + 0.5


@pytest.mark.parametrize(
    ("channels", "groups", "slow"), [(16, 1, False), (3, 1, True), (16, 16, True)]
)
def test_convolutions_of_few_channels_have_no_tensor_cores(
    channels: int, groups: int, slow: bool
) -> None:
    machine = Machine("toy", 1e30, {torch.float32: 1000.0}, 10.0, 0.0, 0.0, "made up")

    def convolved(x: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(x, weight, groups=groups)

    shapes = (1, channels, 8, 8), (16, channels // groups, 3, 3)
    graph = read_graph(joint_of(convolved, *map(leaf, shapes)))
    found = [op.work for op in graph.operations if op.kind == "product"]
    assert len(found) == 2  # that of its gradients too
    for work in found:
        rate = 10.0 if slow else 1000.0
        assert machine.seconds(work, product=True) == work.flops / (rate * REACHED)


def test_tf32_counts_only_where_it_is_allowed() -> None:
    machine = _from_sheet("NVIDIA H200", "data sheet")
    assert machine is not None
    work = Work(None, 0, 0, 10**15, torch.float32)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        exact = machine.seconds(work, product=True)
        torch.set_float32_matmul_precision("high")
        assert machine.seconds(work, product=True) < exact / 5
    finally:
        torch.set_float32_matmul_precision(before)


def test_tf32_may_be_allowed_by_the_newer_settings() -> None:
    """Since which torch's older question about them raises."""
    machine = _from_sheet("NVIDIA H200", "data sheet")
    assert machine is not None
    work = Work(None, 0, 0, 10**15, torch.float32)
    matmul, exact = torch.backends.cuda.matmul, machine.seconds(work, product=True)
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        assert machine.seconds(work, product=True) < exact / 5
    finally:
        matmul.fp32_precision = before


def test_views_and_inputs_are_free_and_a_copy_is_not() -> None:
    graph = graph_of(lambda a: (a.t().contiguous(),), torch.randn(30, 40))
    model = CostModel.of(graph)
    figures = {op.kind: model.figure(op) for op in graph.operations}
    assert figures["input"].seconds == figures["view"].seconds == 0
    assert figures["view"].source == "free"
    assert figures["cheap"].source == "roofline"
    assert figures["cheap"].seconds > 0


def test_a_larger_operator_takes_longer() -> None:
    def seconds(size: int) -> float:
        graph = graph_of(lambda a: (a.tanh(),), torch.empty(size, size))
        return CostModel.of(graph).seconds(only(graph, "tanh"))

    assert seconds(64) < seconds(640) < seconds(6400)


def test_every_figure_says_where_it_comes_from() -> None:
    graph = graph_of(lambda a: (a.tanh().tanh() @ a,), torch.randn(8, 8))
    model = CostModel.of(graph)
    told = model.explain(graph.operations)
    assert "2 × aten.tanh.default: roofline (CPU, plain figures; not asked to measure)" in told
    assert "1 × aten.mm.default" in told
    total = sum(model.seconds(op) for op in graph.operations)
    assert told.splitlines()[0] == f"{total * 1e6:12.1f} µs in all"


def test_equal_calls_are_one_and_others_are_not() -> None:
    graph = graph_of(lambda a: (a.tanh().tanh(), a.sum(0), a.sum(1)), torch.randn(8, 8))
    keys = [op.work.call.key for op in graph.operations if op.work.call is not None]
    assert len(keys) == 4
    assert len(set(keys)) == 3


@pytest.mark.parametrize(
    ("name", "bandwidth"), [("NVIDIA H200", 4.8e12), ("NVIDIA GH200 480GB", 4.0e12)]
)
def test_known_devices_are_known_by_name(name: str, bandwidth: float) -> None:
    machine = _from_sheet(name, "data sheet")
    assert machine is not None
    assert machine.bandwidth == bandwidth


def test_other_devices_are_estimated_and_say_so() -> None:
    assert _from_sheet("NVIDIA Something", "data sheet") is None
    told = SimpleNamespace(
        name="NVIDIA Something",
        multi_processor_count=100,
        clock_rate=1_000_000,  # kHz
        memory_clock_rate=2_000_000,
        memory_bus_width=512,
    )
    machine = _from_attributes(told)
    assert machine.bandwidth == 2 * 2e9 * 64
    assert machine.vector_rate == 100 * 128 * 2 * 1e9
    assert "estimated" in machine.source
    assert machine.compiled_launch_s == machine_of(torch.device("cuda")).compiled_launch_s
    silent = SimpleNamespace(name="NVIDIA Something", multi_processor_count=100)
    assert "guessed" in _from_attributes(silent).source


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_a_gpu_that_is_not_here_is_said_to_be() -> None:
    assert "for want of" in machine_of(torch.device("cuda")).source
