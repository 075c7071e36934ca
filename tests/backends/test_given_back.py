"""What only the kernel of a backward pass reads is given back before gradients are made, which have
its memory then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ecornn.backends import persistent_backward
from ecornn.backends.persistent_gradients import GateGradients
from ecornn.backends.persistent_plain import PlainLayer
from ecornn.backends.registry import by_name
from ecornn.kernels.persistent import gradients
from ecornn.ops.direct import run_directly
from support.machine import Machine, make_call, routed, run_route


class Seen:
    """Memory that a call's backward pass reads, and how much of it was there when gradients were
    made."""

    def __init__(self) -> None:
        self.memory: list[StorageWeakRef] = []
        self.there: list[int] = []

    def note(self, *tensors: Tensor | None) -> None:
        self.memory += [StorageWeakRef(t.untyped_storage()) for t in tensors if t is not None]

    def look(self) -> None:
        self.there.append(sum(not one.expired() for one in self.memory))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found = Seen()

    def noting(owner: Any, name: str, note: Any) -> None:
        before = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = before(*args, **kwargs)
            note(args, result)
            return result

        monkeypatch.setattr(owner, name, wrapped)

    def looking(owner: Any, name: str) -> None:
        before = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            found.look()
            return before(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapped)

    noting(PlainLayer, "forward", lambda _, made: found.note(made.cells_TBE, made.kept))
    noting(PlainLayer, "_gates_again", lambda _, made: found.note(made))
    noting(persistent_backward._Layer, "recompute", lambda given, _: found.note(given[-1]))
    noting(type(by_name("persistent")), "forward", lambda _, made: found.note(*made.kept))
    looking(GateGradients, "__call__")
    looking(persistent_backward, "_weight_grads")
    monkeypatch.setattr(gradients, "MOST_WORK", {4: 1})  # no layer is small
    return found


@pytest.mark.parametrize("retained", [False, True])
@pytest.mark.parametrize("keep", ["gates", "states"])
@pytest.mark.parametrize("short", [True, False], ids=["short", "general"])
def test_it_is_unless_the_graph_is_retained(
    machine: Machine, seen: Seen, short: bool, keep: str, retained: bool
) -> None:
    machine.through_l2 = True  # gates' gradients are not in the gates' place
    route, leaves = routed(make_call("lstm", 80, keep=keep))

    def results() -> Any:
        if short:
            return run_route(route, leaves)
        x, h0, c0, *weights = leaves
        given = (x, h0, c0, weights, None, None, None, None, *route.constants)
        return run_directly(given, needs_grad=True)

    loss = results()[0].sin().sum()
    found = torch.autograd.grad(loss, leaves, retain_graph=retained)
    kept = {("gates", True): 2, ("states", True): 1, ("gates", False): 1, ("states", False): 0}
    assert seen.memory
    assert seen.there == [kept[keep, short] if retained else 0]
    if retained:
        for again, before in zip(torch.autograd.grad(loss, leaves), found, strict=True):
            assert torch.equal(again, before)
        assert seen.there[1:] == [0]
    else:
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(loss, leaves)


def test_a_caller_s_result_is_left_alone(machine: Machine, seen: Seen) -> None:
    """The operator's arguments are others'."""
    call = make_call("lstm", keep="gates")
    backend = by_name("persistent")
    result = backend.forward(call)
    grads = persistent_backward.ResultGrads(torch.ones_like(result.output_TBO), None, None, None)
    for _ in range(2):
        backend.backward(call, result, grads, persistent_backward.BackwardRequest())
    assert len(result.kept) == 1
    assert seen.there == [1, 1]
