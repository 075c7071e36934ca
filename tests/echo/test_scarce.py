"""Layers of torch.nn on kernels of this package in more launches than are quick, where memory
counts more than time. As in `test_own_kernels`, torch's own kernels stand for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ecornn
from ecornn.backends.registry import by_name
from ecornn.echo import own_kernels, regions, scarce
from ecornn.echo.model_call import ModelCall
from ecornn.echo.rehearse import rehearsal_of
from ecornn.errors import InvalidInput

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
SLOWER = "of these, in more launches than are as quick as torch's, since that holds less: second"


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


def test_a_budget_that_the_model_is_beyond_is_met_by_our_kernels() -> None:
    assert step(Two(), memory="1GiB")[0] == [nn.LSTM, nn.GRU], "a budget of a divided model"
    with pytest.raises(InvalidInput, match="the smallest peak"):
        step(Two(), memory=3_000)
    kinds, told = step(Two(), memory=39_000)
    assert kinds == OURS
    assert SLOWER in told


def test_what_no_number_of_launches_serves_stays_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_name("aten"), "refuse", lambda spec: "no kernel", raising=True)
    kinds, told = step(Two(), memory="min")
    assert kinds == LEFT
    assert f"second is left to torch: {TOO_MANY}" in told


def test_around_a_loop_they_stay_torch_s() -> None:
    """There they are not traced, and asked again at every call."""
    kinds, told = step(Looping(), memory="min")
    assert kinds == LEFT
    assert f"second is left to torch: {TOO_MANY}" in told


def test_one_sequence_after_the_other_is_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refuse(spec: Any) -> str | None:
        asked.append(spec.batch)
        return None

    layer, x = ecornn.GRU(8, 8), torch.randn(5, 3, 8)
    monkeypatch.setattr(by_name("aten"), "refuse", refuse)
    assert own_kernels.in_launches(layer, (x,), {})
    assert asked[-1] == 0


def test_without_gradients_nothing_is_scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scarce, "room_on", lambda _: 1)
    model, x = Two(), torch.randn(5, 3, 6)
    with torch.no_grad():
        ecornn.compile(model)(x)
    assert type(model.second) is nn.GRU
