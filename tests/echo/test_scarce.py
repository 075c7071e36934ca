"""Layers of torch.nn on kernels of this package in more launches than are quick, where memory
counts more than time. As in `test_own_kernels`, torch's own kernels stand for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ecornn
from ecornn.backends.registry import by_name
from ecornn.echo import gpu_room, own_kernels, regions, scarce
from ecornn.echo.model_call import ModelCall
from ecornn.echo.rehearse import rehearsal_of
from ecornn.errors import InvalidInput
from ecornn.nn import base

pytestmark = pytest.mark.usefixtures("fresh_compiler")

TOO_MANY = "a batch of so many does not fit"


class Two(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.LSTM(6, 8)
        self.second = nn.GRU(8, 8, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)[0]))[0].square().mean()


class Looping(Two):
    """A part of it is called often, and compiled by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Sequential(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        state = self.second(self.first(x)[0])[0][-1]
        for _ in range(6):
            state = torch.tanh(self.step(state))
        return state.sum()


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a batch of three is too large for the GRU."""

    def refusal(layer: nn.Module, x: Tensor, *_: Any) -> str | None:
        return TOO_MANY if isinstance(layer, nn.GRU) and x[0].shape[1] > 2 else None

    monkeypatch.setattr(own_kernels, "KERNELS", "aten")
    monkeypatch.setattr(own_kernels, "refusal", refusal)
    monkeypatch.setattr(regions, "has_layers_of_torch", lambda _: True)
    monkeypatch.setattr(regions, "choose_codegen", lambda *_: ("inductor", "as on a GPU"))
    monkeypatch.setattr(regions, "start_compilers", lambda *_: None)


def step(model: nn.Module, **asked: Any) -> tuple[list[type], str]:
    """Of which classes the layers are then, and what is told of them."""
    x = torch.randn(5, 3, 6, generator=torch.Generator().manual_seed(1))
    expected = model(x)
    run = ecornn.compile(model, **asked)
    for _ in range(2):
        found = run(x)
        found.backward()
        torch.testing.assert_close(found, expected)
    kinds = [type(part) for part in model.children() if isinstance(part, nn.RNNBase)]
    return kinds, " ".join(str(run.explain()).split())


OURS, LEFT = [ecornn.LSTM, ecornn.GRU], [ecornn.LSTM, nn.GRU]
SLOWER = "of these, in more launches than are taken to be quick, for the sake of memory: second"


def test_as_little_as_can_be_is_held_by_our_kernels() -> None:
    kinds, told = step(Two(), memory="min")
    assert kinds == OURS
    assert SLOWER in told
    assert TOO_MANY not in told


@pytest.mark.parametrize(("room", "kinds"), [(1 << 30, LEFT), (100, OURS), (None, LEFT)])
def test_a_model_that_does_not_fit_the_gpu_is_held_by_our_kernels(
    room: int | None, kinds: list[type], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scarce, "room_on", lambda _: room)
    found, told = step(Two())
    assert found == kinds
    assert (SLOWER in told) == (kinds is OURS)
    assert (f"second is left to torch: {TOO_MANY}" in told) == (kinds is LEFT)


def test_the_room_is_beside_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of it is left free."""
    model, x = Two(), torch.randn(5, 3, 6)
    call = ModelCall.of((x,), {}, torch.device("cpu"))
    assert call is not None
    with rehearsal_of(model, call, {}) as rehearsal:
        most = rehearsal.step(None).most
    for room, kinds in {int(most / 0.89): LEFT, int(most / 0.91): OURS}.items():
        monkeypatch.setattr(scarce, "room_on", lambda _, room=room: room)
        assert step(Two())[0] == kinds


@pytest.mark.parametrize("memory", ["1GiB", 1.0])
def test_with_a_budget_none_becomes_ours(memory: str | float) -> None:
    """It is one of a divided model then, whose layers may be run again; and who is refused has the
    model that was given."""
    assert step(Two(), memory=memory)[0] == [nn.LSTM, nn.GRU]
    model = Two()
    with pytest.raises(InvalidInput, match="the smallest peak"):
        step(model, memory=3_000)
    assert type(model.first) is nn.LSTM


def test_what_no_number_of_launches_serves_stays_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_kernels, "serves_in_launches", lambda *_: False)
    kinds, told = step(Two(), memory="min")
    assert kinds == LEFT
    assert f"second is left to torch: {TOO_MANY}" in told


def test_around_a_loop_they_stay_torch_s() -> None:
    """There they are not traced, and asked again at every call."""
    kinds, told = step(Looping(), memory="min")
    assert kinds == LEFT
    assert f"second is left to torch: {TOO_MANY}" in told


def test_whole_batches_are_asked_of_the_kernels_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not whether torch would be quicker, but all that would be launched."""
    asked: list[Any] = []
    layer, x = ecornn.GRU(8, 8), torch.randn(5, 3, 8)
    aten = by_name("aten")
    monkeypatch.setattr(aten, "refuse", lambda spec: asked.append(spec))
    assert own_kernels.serves_in_launches(layer, (x,), {})
    assert asked[-1].backend == "aten"
    assert asked[-1].needs_grad
    monkeypatch.setattr(aten, "refuse", lambda spec: "it does not fit" if spec.backend else None)
    assert not own_kernels.serves_in_launches(layer, (x,), {})
    monkeypatch.setattr(aten, "refuse", lambda spec: None)
    monkeypatch.setattr(aten, "unavailable", lambda: "not installed")
    assert not own_kernels.serves_in_launches(layer, (x,), {})
    monkeypatch.setattr(aten, "unavailable", lambda: None)
    monkeypatch.setattr(base, "is_short", lambda *_: True)
    assert not own_kernels.serves_in_launches(layer, (x,), {})


class Dividing(Two):
    """By a layer that is called in a loop, or one that is not called at all."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.third, self.times = nn.GRU(8, 8), times

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x)[0])[0]
        for _ in range(self.times):
            x = self.third(x)[0]
        return x.square().mean()


@pytest.mark.parametrize("times", [5, 0])
def test_of_a_model_that_stays_divided_they_stay_torch_s(times: int) -> None:
    model = Dividing(times)
    kinds, told = step(model, memory="min")
    assert kinds == [ecornn.LSTM, nn.GRU, nn.GRU]
    assert SLOWER not in told


@pytest.mark.parametrize(("memory", "kinds"), [("min", OURS), ("auto", [nn.LSTM, nn.GRU])])
def test_layers_that_draw_run_without_numbers_as_ours(
    memory: str, kinds: list[type], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they do not become ours, none does: torch's would draw inside cuDNN."""
    monkeypatch.setattr(gpu_room, "room_on", lambda _: 1)
    model, x = Two(num_layers=2, dropout=0.5), torch.randn(5, 3, 6)
    run = ecornn.compile(model, memory=memory)
    run(x).backward()
    assert [type(part) for part in model.children()] == kinds
    told = " ".join(str(run.explain()).split())
    assert (SLOWER in told) == (kinds is OURS)
    assert ("second draws inside cuDNN" in told) == (kinds is not OURS)


def test_processes_that_work_together_ask_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scarce, "room_on", lambda _: 100)
    monkeypatch.setattr(scarce, "together", lambda: True)
    assert step(Two())[0] == LEFT
    assert step(Two(), memory="min")[0] == OURS


def test_an_input_that_asks_for_gradients_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scarce, "room_on", lambda _: 100)
    model = Two().requires_grad_(False)
    x = torch.randn(5, 3, 6, requires_grad=True)
    ecornn.compile(model)(x).backward()
    assert type(model.second) is ecornn.GRU


def test_without_gradients_nothing_is_scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scarce, "room_on", lambda _: 1)
    model, x = Two(), torch.randn(5, 3, 6)
    with torch.no_grad():
        ecornn.compile(model)(x)
    assert type(model.second) is nn.GRU
