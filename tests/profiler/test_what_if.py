"""What making feature maps again would free and cost, against steps that do so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ecornn.bench.models.step import make_step
from ecornn.echo.analysis.machine import machine_of
from ecornn.profiler import MemoryReport, WhatIf, profile


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.act = nn.Linear(width, 4 * width), nn.GELU()
        self.narrow, self.drop = nn.Linear(4 * width, width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.drop(self.narrow(self.act(self.wide(x))))
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.wrapped: tuple[str, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            if f"blocks.{i}" in self.wrapped:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return x.square().mean()


def observed(model: nn.Module, x: Tensor) -> MemoryReport:
    return profile(lambda: model(x).backward(), model, what_if=True)


def by_module(report: MemoryReport) -> dict[str, WhatIf]:
    return {one.module: one for one in report.what_if}


def between_the_passes(report: MemoryReport) -> int:
    """Of what the step has made."""
    time = report.timeline.phase.index("backward") - 1
    return sum(held.bytes for held in report.at(time) if held.born)


@pytest.mark.parametrize("wrapped", ["blocks.0", "blocks.1", "blocks.2"])
def test_a_checkpoint_frees_what_was_said(wrapped: str) -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(64, 8)
    plain = observed(model, x)
    told = by_module(plain)[wrapped]
    model.wrapped = (wrapped,)
    again = observed(model, x)
    assert 0 < told.whole_frees == between_the_passes(plain) - between_the_passes(again)
    assert told.whole_frees < told.kept_bytes, "what goes in stays"


def test_products_and_draws_stay_and_the_rest_is_made_again() -> None:
    model, x = Model(), torch.randn(64, 8)
    report = observed(model, x)
    found = by_module(report)
    wide = 64 * 64 * 4
    for name in ("blocks.0", "blocks.1"):
        # what GELU made follows from what it read, a product's result
        assert found[f"{name}.act"].cheap_frees == wide
        assert found[f"{name}.wide"].cheap_frees == 0
        assert found[f"{name}.drop"].cheap_frees == 0, "a mask is a draw"
        inside = sum(found[f"{name}.{part}"].cheap_frees for part in ("act", "wide", "drop"))
        assert found[name].cheap_frees == inside, "a module has what is inside it"
    # reads and writes as much, and launches one kernel
    machine = machine_of(torch.device("cpu"))
    seconds = 2 * wide / machine.bandwidth + machine.launch_s
    assert found["blocks.0.act"].cheap_seconds == pytest.approx(seconds)
    assert found["blocks.0"].whole_seconds > found["blocks.0.act"].whole_seconds
    assert found[""].kept_bytes == max(report.timeline.bytes["feature maps"])


@pytest.mark.parametrize("overwritten", [False, True])
def test_what_reads_memory_that_is_overwritten_is_not_run_again(overwritten: bool) -> None:
    model, x = nn.Linear(8, 8), torch.randn(16, 8)

    def step() -> None:
        y = model(x)
        both = y.sigmoid() * y.tanh()
        if overwritten:
            y.add_(1)
        (both.sum() + y.sum()).backward()

    found = by_module(profile(step, model, what_if=True))[""]
    # of two results one product's would do, were it still there
    assert found.cheap_frees == (0 if overwritten else found.kept_bytes // 2)


def test_attention_frees_most_for_least() -> None:
    """Echo's finding."""
    step = make_step("nmt", size="tiny", device="cpu", batch=32, length=12)
    step()
    report = profile(step, step.model, step.optimizer, what_if=True)
    leaves = [one for one in report.what_if if one.module and not one.module.endswith("decoder")]
    best = max(leaves, key=lambda one: one.cheap_frees)
    assert best.module == "decoder.attention"
    assert best.cheap_frees > 0.8 * best.kept_bytes
    assert best.cheap_seconds < best.whole_seconds
    assert MemoryReport.from_json(report.to_json()) == report
    text, page = str(report), report.to_html()
    assert "if they were made again" in text
    assert "decoder.attention" in text.split("if they were made again")[1]
    assert 'id="what-if"' in page
    assert "what-if" not in profile(step, step.model, step.optimizer).to_html()
