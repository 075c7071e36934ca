"""Kernels are compiled before their cases come, each once."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from ecornn.bench import ahead
from ecornn.bench.ahead import build_ahead, requests, variants
from ecornn.bench.cases import Case
from ecornn.bench.grids import GRIDS
from ecornn.kernels.jit import CompileError, Variant
from support.machine import HOPPER

CUDA = torch.device("cuda", 0)


def quiet() -> Console:
    return Console(file=io.StringIO())


def test_every_case_of_the_grid_has_both_its_kernels() -> None:
    cases = GRIDS["rnn"].cases
    found = variants(cases, HOPPER, "sm_90a")
    assert len(found) == len(set(found)) > len(cases) / 2
    assert {variant.source for variant in found} == {"forward.cu", "backward.cu"}


def test_a_stack_may_want_half_of_the_chip_and_lengths_a_kernel_of_their_own() -> None:
    stack = Case("lstm", hidden=256, batch=4, steps=9, dtype="bf16", layers=2)
    assert [(ask.kernel, ask.share) for ask in requests(stack)] == [
        *(("forward", 1), ("forward", 2)),
        *(("backward", 1), ("backward", 2)),
    ]
    mixed = Case("gru", hidden=256, batch=4, steps=9, dtype="bf16", lengths=True)
    assert [(ask.features, ask.share) for ask in requests(mixed)] == [(True, 1)] * 2
    both = Case("lstm", hidden=256, batch=4, steps=9, dtype="fp16", bidirectional=True)
    assert {ask.directions for ask in requests(both)} == {2}
    assert list(requests(Case("lstm", hidden=8, batch=1, steps=2, dtype="fp64"))) == []


def test_they_are_compiled_and_one_that_does_not_compile_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[Variant] = []

    def compiled(variant: Variant) -> bytes:
        built.append(variant)
        if variant.source == "backward.cu":
            raise CompileError("no")
        return b""

    monkeypatch.setattr(ahead, "compiled", compiled)
    monkeypatch.setattr(ahead, "unavailable", lambda: None)
    monkeypatch.setattr(ahead, "chip", lambda _: HOPPER)
    monkeypatch.setattr(ahead, "architecture", lambda _: "sm_90a")
    cases = [Case("lstm", hidden=h, batch=2, steps=4, dtype="bf16") for h in (64, 128, 64)]
    assert build_ahead(cases, CUDA, quiet()) == len(built) == 4
    built.clear()
    assert build_ahead(cases, torch.device("cpu"), quiet()) == 0
    monkeypatch.setattr(ahead, "unavailable", lambda: "there is no CUDA device")
    assert build_ahead(cases, CUDA, quiet()) == 0
    assert built == []


def test_another_error_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(_: Variant) -> bytes:
        raise OSError("the cache cannot be written")

    monkeypatch.setattr(ahead, "compiled", compiled)
    monkeypatch.setattr(ahead, "unavailable", lambda: None)
    monkeypatch.setattr(ahead, "chip", lambda _: HOPPER)
    monkeypatch.setattr(ahead, "architecture", lambda _: "sm_90a")
    case = Case("lstm", hidden=64, batch=2, steps=4, dtype="bf16")
    with pytest.raises(OSError, match="cannot be written"):
        build_ahead([case], CUDA, quiet())
