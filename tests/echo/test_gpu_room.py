"""With "auto", what does not fit the GPU is planned for less. A CPU has no limit but one told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ecornn
from ecornn.echo import gpu_room

pytestmark = pytest.mark.usefixtures("fresh_compiler")

WIDTH, BATCH, LAYERS = 32, 256, 6
MAP = 4 * WIDTH * BATCH


class Deep(nn.Module):
    """Feature maps of gelu and of what it reads, some of which take a product to be made again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sigmoid(torch.sin(layer(x)) * x)
        return x.square().mean()


class Looping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = self.step(x)
        return x.square().mean()


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """What is told; the last one counts."""
    told: list[int | None] = [None]
    monkeypatch.setattr(gpu_room, "room_on", lambda device: told[-1])
    return told


def peak_of(model: nn.Module, **asked: Any) -> tuple[int, str]:
    """Of a step whose loss and gradients are eager's to the last bit."""
    torch._dynamo.reset()
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))

    def step(run: Any) -> list[Tensor]:
        model.zero_grad()
        loss = run(x)
        loss.backward()
        return [loss.detach(), *(w.grad.clone() for w in model.parameters() if w.grad is not None)]

    expected = step(model)
    run = ecornn.compile(model, codegen="eager", **asked)
    for found, wanted in zip(step(run), expected, strict=True):
        assert torch.equal(found, wanted)
    (graph,) = run.explain().graphs
    assert graph.chosen is not None
    return graph.chosen.peak_bytes, " ".join(str(run.explain()).split())


TOLD = "no plan of little time fits the GPU: more is taken, to stay within"


def test_what_fits_is_planned_as_ever(room: list[int | None]) -> None:
    unlimited, _ = peak_of(Deep())
    room.append(1 << 30)
    found, told = peak_of(Deep())
    assert found == unlimited
    assert TOLD not in told


def test_what_does_not_fit_takes_more_time_and_less_memory(room: list[int | None]) -> None:
    unlimited, _ = peak_of(Deep())
    least, _ = peak_of(Deep(), memory="min")
    assert least < unlimited - 2 * MAP
    inputs = MAP + LAYERS * 4 * WIDTH * (WIDTH + 1)
    between = (unlimited + least) // 2
    room.append(int((between - inputs) / gpu_room.FULL) + 64)
    found, told = peak_of(Deep())
    assert least <= found <= between
    assert TOLD in told
    assert "memory auto" in told
    assert "were asked for" not in told


def test_what_cannot_fit_takes_the_least(room: list[int | None]) -> None:
    least, _ = peak_of(Deep(), memory="min")
    room.append(MAP)
    found, told = peak_of(Deep())
    assert found == least
    assert TOLD in told


@pytest.mark.parametrize("memory", ["min", 0.9, "1GiB"])
def test_whoever_asks_for_some_memory_gets_that(
    memory: str | float, room: list[int | None]
) -> None:
    before, _ = peak_of(Deep(), memory=memory)
    room.append(MAP)
    found, told = peak_of(Deep(), memory=memory)
    assert found == before
    assert TOLD not in told


def test_parts_of_a_step_have_no_limit_of_their_own(room: list[int | None]) -> None:
    before, _ = peak_of(Looping())
    room.append(1)
    assert peak_of(Looping())[0] == before


def test_processes_that_work_together_make_one_plan(
    room: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, _ = peak_of(Deep())
    room.append(MAP)
    monkeypatch.setattr(gpu_room, "together", lambda: True)
    assert peak_of(Deep())[0] == before


def test_who_works_together(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not gpu_room.together()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for size in (1, 2):
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda size=size: size)
        assert gpu_room.together() == (size == 2)


def test_a_cpu_has_no_limit() -> None:
    assert gpu_room.room_on(torch.device("cpu")) is None


@pytest.mark.parametrize("memory", ["min", 0.9])
def test_plans_that_are_compiled_to_choose_among_have_no_limit_either(
    memory: str | float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of "auto" is one of them."""
    asked: list[torch.device] = []
    monkeypatch.setattr(gpu_room, "room_on", asked.append)
    run = ecornn.compile(Deep(), memory=memory, codegen="inductor")
    run(torch.randn(BATCH, WIDTH)).backward()
    assert not asked
