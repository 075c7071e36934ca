"""One step of many. Lightning and Transformers are stood in for by the classes that callbacks
derive from, and called in the order in which their trainers call them."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from ecornn.errors import InvalidInput
from ecornn.profiler import MemoryReport, NotObserved, ProfileAt
from ecornn.profiler.callbacks import MissingPackage, lightning_callback, transformers_callback


class Loop:
    def __init__(self) -> None:
        self.model = nn.Linear(8, 8)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.modes: list[int] = []

    def step(self, fails: bool = False) -> None:
        self.modes.append(torch._C._len_torch_dispatch_stack())
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 8)).sum().backward()
        if fails:
            raise KeyError("a step")
        self.optimizer.step()


def test_a_plain_loop_is_observed_at_one_step_alone() -> None:
    loop, told = Loop(), []
    watch = ProfileAt(2, loop.model, loop.optimizer, then=told.append)
    with pytest.raises(NotObserved, match="step 2 has not been taken; 0 have"):
        _ = watch.report
    for _ in range(5):
        with watch:
            loop.step()
    assert loop.modes == [0, 0, 1, 0, 0]
    assert told == [watch.report]
    assert watch.report.by_kind()["optimizer state"] == 288
    with pytest.raises(InvalidInput, match="the first step is 0"):
        ProfileAt(-1, loop.model)


def test_a_model_that_counts_as_empty_is_still_the_model() -> None:
    """A container without layers has the length 0, and weights all the same."""
    model = nn.Sequential()
    model.register_parameter("scale", nn.Parameter(torch.ones(3)))
    with ProfileAt(0, model) as watch:
        (model.scale * 2).sum().backward()
    assert watch.report.by_kind()["weights"] == 12


def test_a_step_of_a_loop_that_breaks() -> None:
    loop = Loop()
    watch = ProfileAt(0, loop.model)
    with pytest.raises(KeyError), watch:
        loop.step(fails=True)
    assert watch.report.error == "KeyError: 'a step'"
    assert torch._C._len_torch_dispatch_stack() == 0


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, base: str) -> None:
    module = ModuleType(name)
    setattr(module, base, type(base, (), {}))
    for depth in range(name.count(".") + 1):
        part = ".".join(name.split(".")[: depth + 1])
        monkeypatch.setitem(sys.modules, part, module)


@pytest.mark.parametrize("fails", [False, True])
def test_lightning_s_order_of_calls(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    stand_in(monkeypatch, "lightning.pytorch", "Callback")
    loop = Loop()
    callback = lightning_callback(1)
    trainer = SimpleNamespace(optimizers=[loop.optimizer])
    try:
        for index in range(3):
            callback.on_train_batch_start(trainer, loop.model, None, index)
            loop.step(fails=fails and index == 1)
            callback.on_train_batch_end(trainer, loop.model, None, None, index)
    except KeyError as error:
        callback.on_exception(trainer, loop.model, error)
    assert loop.modes == ([0, 1] if fails else [0, 1, 0])
    assert isinstance(callback.watch.report, MemoryReport)
    assert (callback.watch.report.error is not None) == fails
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize("fails", [False, True])
def test_transformers_order_of_calls(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    stand_in(monkeypatch, "transformers", "TrainerCallback")
    loop = Loop()
    callback = transformers_callback(1)
    given = {"model": loop.model, "optimizer": SimpleNamespace(optimizer=loop.optimizer)}

    def train() -> None:
        for index in range(3):
            callback.on_step_begin(None, None, None, **given)
            loop.step(fails=fails and index == 1)
            callback.on_step_end(None, None, None, **given)

    if fails:
        with pytest.raises(KeyError), callback:
            train()
    else:
        with callback:
            train()
    states = [one for one in callback.watch.report.held if one.kind == "optimizer state"]
    assert len(states) == (0 if fails else 2)
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingPackage, match=r"lightning\.pytorch or pytorch_lightning is not"):
        lightning_callback(0)
    with pytest.raises(MissingPackage, match="transformers is not installed"):
        transformers_callback(0)
