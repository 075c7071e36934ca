"""What compiled code keeps is told by the modules it was compiled from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ecornn
from ecornn.profiler import MemoryReport, collect, compiled, profile
from ecornn.profiler.compiled import Value, _of_text


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.narrow(self.wide(x).exp())
        return y.sin()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.top = nn.ModuleList([Block(), Block()]), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.top(x).square().mean()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def whole(model: Model) -> Callable[[Tensor], Tensor]:
    return torch.compile(model, backend="aot_eager")


def blocks(model: Model) -> Callable[[Tensor], Tensor]:
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


def echo(model: Model) -> Any:
    return ecornn.compile(model, memory="min", codegen="eager")


def observed(model: Model, make: Callable[[Model], Any]) -> MemoryReport:
    run, x = make(model), torch.randn(4, 8)
    run(x).backward()
    model.zero_grad()
    return profile(lambda: run(x).backward(), model)


def kept_by_compiled(report: MemoryReport) -> dict[tuple[str, str], str]:
    return {
        (one.module, one.operator): one.line
        for one in report.held
        if any("compiled code" in name for name in one.kept_by) and one.kind == "feature maps"
    }


@pytest.mark.parametrize("make", [whole, blocks, echo])
def test_modules_operators_and_lines_are_those_of_the_model(
    make: Callable[[Model], Any],
) -> None:
    report = observed(Model(), make)
    kept = kept_by_compiled(report)
    for number in (0, 1):
        assert any(module.startswith(f"blocks.{number}") for module, _ in kept)
    assert all("test_compiled.py:" in line and "in forward" in line for line in kept.values())
    if make is not echo:
        assert ("blocks.1.wide", "aten.exp") not in kept
        assert ("blocks.1", "aten.exp") in kept, "not of the product inside it"
    assert not any("could not be read" in note for note in report.notes)
    assert report.peak_bytes == report.timeline.total(report.peak_time)


def test_a_part_that_is_compiled_by_itself_keeps_under_its_name() -> None:
    report = observed(Model(), blocks)
    names = {name for one in report.held for name in one.kept_by if "compiled" in name}
    assert names == {"blocks.0: compiled code", "blocks.1: compiled code"}


def test_what_cannot_be_read_is_attributed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    for broken in (
        lambda *_: [],  # no graph
        lambda _, count: [Value("aten.mm", "top", shape=(3, 3, 3))] * count,  # another's
    ):
        monkeypatch.setattr(compiled, "_results", broken)
        report = observed(Model(), whole)
        assert {module for module, _ in kept_by_compiled(report)} == {""}
        assert any("1 parts of compiled code could not be read" in one for one in report.notes)
        torch._dynamo.reset()
    assert collect.COMPILED == "compiled code"


#: In the form of inductor's graphs, with a size that is no number.
TEXT = """
class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[16, 8][8, 1]cpu", primals_2: "f32[s0, 8][8, 1]cpu"):
        # File: /a/model.py:7 in forward, code: y = self.wide(x)
        permute: "f32[8, 16][1, 8]cpu" = torch.ops.aten.permute.default(primals_1, [1, 0])
        mm: "f32[s0, 16][16, 1]cpu" = torch.ops.aten.mm.default(primals_2, permute);  permute = None
        # File: /a/model.py:9 in forward, code: return y.max(0)
        max_1 = torch.ops.aten.max.dim(mm, 0)
        getitem: "f32[16][1]cpu" = max_1[0];  max_1 = None
        return (getitem, primals_2, mm)
"""


def test_the_text_of_a_graph_is_read() -> None:
    first, given, product = _of_text(TEXT)
    assert (first.operator, first.line, first.shape, first.own) == ("aten.max", 9, (16,), ())
    assert (given.operator, given.shape) == ("", (None, 8))
    assert (product.operator, product.file, product.line) == ("aten.mm", "/a/model.py", 7)
    assert product.own == (1, 0), "the weight through its view"
    assert first.read == product.own, "the weights that were read last"
    assert _of_text("no graph") == []
