"""Nobody notices that a loop's first states were handed over as if a gradient of them were asked
for: neither the caller's lists and dicts, nor what is written to, kept, frozen or returned."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import ecornn
from ecornn.echo.starts import StateWritten
from support.called_often import gradients, in_any_order, same

B, H = 3, 5


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def data(*, grad: bool = False, steps: int = 6) -> Tensor:
    made = torch.linspace(-1, 1, steps * B * H, dtype=torch.float64)
    return made.view(steps, B, H).requires_grad_(grad)


class Step(nn.Module):
    """`does`: what a call makes of x and the state; it has a product at hand."""

    def __init__(self, does: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.does = nn.Linear(2 * H, H), does

    def next(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.linear(torch.cat((x, h), -1)))

    def forward(self, x: Tensor, state: Any, *more: Any) -> Any:
        return self.does(self, x, state, *more)


class Loop(nn.Module):
    def __init__(self, does: Callable[..., Any], course: Callable[..., Any]) -> None:
        super().__init__()
        self.step, self.course = Step(does), course

    def forward(self, x_TBH: Tensor) -> Any:
        return self.course(self, x_TBH, torch.zeros_like(x_TBH[0]))


def loss_of(run: Any, model: nn.Module, turn: int) -> list[Tensor | None]:
    x = data(grad=True)
    loss = run(x)
    loss.backward()
    return [loss.detach(), x.grad]


def compare(
    model: nn.Module,
    use: Any = loss_of,
    *,
    graphs: int | None = None,
    several: bool = False,
    memory: str = "auto",
) -> None:
    """To the bit, and to rounding where gradients of many calls are made at once, or `several`
    graphs have a sum each."""
    model = model.double()
    for in_order in (True, False):
        torch._dynamo.reset()
        bits = in_order and not several
        mine, twin = copy.deepcopy(model), copy.deepcopy(model)
        with pytest.MonkeyPatch.context() if in_order else in_any_order():
            run = ecornn.compile(mine, memory=memory, codegen="eager")
            for turn in range(3):
                found = []
                for one, own in ((run, mine), (twin, twin)):
                    own.zero_grad()
                    more = use(one, own, turn)
                    found.append([*gradients(own), *more])
                same(*found, bits=bits)
        assert graphs is None or len(run.explain().graphs) == graphs


def replaces_in_dict(step: Step, x: Tensor, state: dict[str, Tensor]) -> Tensor:
    state["h"] = step.next(x, state["h"])
    return state["h"]


def replaces_in_list(step: Step, x: Tensor, state: list[Tensor]) -> Tensor:
    state[0] = step.next(x, state[0])
    return state[0]


@pytest.mark.parametrize(
    ("does", "make", "read"),
    [
        (replaces_in_dict, lambda h: {"h": h}, lambda s: s["h"]),
        (replaces_in_dict, lambda h: OrderedDict(h=h, n=3), lambda s: s["h"]),
        (replaces_in_list, lambda h: [h], lambda s: s[0]),
    ],
)
def test_states_that_a_part_writes_into_what_it_is_given(does: Any, make: Any, read: Any) -> None:
    """A copy of the list would take them away from the caller, in silence."""

    def course(loop: Loop, x_TBH: Tensor, zeros: Tensor) -> Tensor:
        state = make(zeros)
        for x in x_TBH:
            found = loop.step(x, state)
            assert read(state) is found
        return read(state).square().sum()

    compare(Loop(does, course), graphs=1)


class State(NamedTuple):
    h: Tensor
    stack: list[Tensor]
    steps: int


def named(step: Step, x: Tensor, state: State, extra: Tensor | None = None) -> State:
    h = step.next(x, state.h + state.stack[0] if extra is None else state.h + extra)
    return State(h, [h + state.stack[0], *state.stack[1:]], state.steps)


def test_states_of_many_kinds() -> None:
    """What is returned as it came is the caller's own."""

    def course(loop: Loop, x_TBH: Tensor, zeros: Tensor) -> Tensor:
        last = zeros + 1
        state = State(zeros, [zeros, last], 7)
        for x in x_TBH:
            state = loop.step(x, state)
        assert state.stack[1] is last
        assert state.steps == 7
        return (state.h * state.stack[0]).sum()

    compare(Loop(named, course), graphs=1)


def test_another_number_of_tensors() -> None:
    """Then nobody knows which is which."""

    def course(loop: Loop, x_TBH: Tensor, zeros: Tensor) -> Tensor:
        state = State(zeros, [zeros], 0)
        for x in x_TBH:
            state = loop.step(x, state, *loop.extra)
        return state.h.sum()

    def use(run: Any, model: Any, turn: int) -> list[Tensor | None]:
        model.extra = [torch.ones(B, H, dtype=torch.float64)] * (turn % 2)
        return loss_of(run, model, turn)

    model = Loop(named, course)
    model.extra = []
    compare(model, use)


def as_it_came(step: Step, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    return torch.tanh(step.linear(torch.cat((x, x), -1) + memory.repeat(1, 2))), memory


def a_view(step: Step, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    return torch.tanh(step.linear(torch.cat((x, x), -1) + memory.repeat(1, 2))), memory[:]


@pytest.mark.parametrize("does", [as_it_came, a_view])
@pytest.mark.parametrize("detached", [True, False])
@pytest.mark.parametrize("memory", ["auto", "min"])
@pytest.mark.filterwarnings("ignore:.*writes to what it was given")
def test_a_state_that_comes_back_and_is_written_to(does: Any, detached: bool, memory: str) -> None:
    """Between the calls, by the model, which reads it by its first name. A plan that keeps it, to
    make results of it again, would find it changed."""

    def course(loop: Loop, x_TBH: Tensor, zeros: Tensor) -> Tensor:
        memory = first = zeros.clone()
        total = zeros.sum()
        for x in x_TBH:
            out, memory = loop.step(x, memory)
            memory += out.detach() if detached else out
            total = total + out.sum()
        return total + first.square().sum()

    compare(Loop(does, course), memory=memory)


def counts(step: Step, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return step.next(x, state[0]), state[1] + (x > 0).double()


def detaches(step: Step, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    found = step.next(x, state[0])
    return found, found.detach() + state[1].detach()


@pytest.mark.parametrize("does", [counts, detaches])
def test_what_has_no_gradient_has_none(does: Any) -> None:
    """A counter, or a state that is cut off: whoever adds it up would keep all graphs."""

    def course(loop: Loop, x_TBH: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
        state = zeros, zeros + 1
        for x in x_TBH:
            state = loop.step(x, state)
        return state

    def use(run: Any, model: nn.Module, turn: int) -> list[Tensor | None]:
        h, counted = run(data())
        assert not counted.requires_grad
        (h * counted).sum().backward()
        return [h.detach(), torch.from_numpy(counted.numpy())]

    compare(Loop(does, course), use)


def plain(step: Step, x: Tensor, h: Tensor) -> Tensor:
    return step.next(x, h)


def around(loop: Loop, x_TBH: Tensor, h: Tensor) -> Tensor:
    for x in x_TBH:
        h = loop.step(x, h)
    return h


@pytest.mark.parametrize("order", [(True, False, True), (False, True, True)])
def test_weights_are_frozen_and_trained_later(order: tuple[bool, ...]) -> None:
    def use(run: Any, model: nn.Module, turn: int) -> list[Tensor | None]:
        model.requires_grad_(order[turn])
        h = run(data())
        assert h.requires_grad is order[turn]
        if order[turn]:
            h.square().sum().backward()
        return [h.detach()]

    compare(Loop(plain, around), use)


def writes_in_evaluation(step: Step, x: Tensor, h: Tensor) -> Tensor:
    found = step.next(x, h * 1)
    return found + h if step.training else h.add_(found)


def test_a_part_writes_to_its_state_in_one_mode_only() -> None:
    """And the model reads what it has begun with."""

    def course(loop: Loop, x_TBH: Tensor, zeros: Tensor) -> Tensor:
        first = zeros + 1
        return around(loop, x_TBH, first).sum() + first.square().sum()

    def use(run: Any, model: nn.Module, turn: int) -> list[Tensor | None]:
        model.train(turn != 1)
        return loss_of(run, model, turn)

    compare(Loop(writes_in_evaluation, course), use)


def test_a_write_that_nobody_could_foresee_is_an_error_once() -> None:
    def does(step: Any, x: Tensor, h: Tensor) -> Tensor:
        found = step.next(x, h * 1)
        return h.add_(found) if step.writes else found + h

    def course(loop: Loop, x_TBH: Tensor, zeros: Tensor) -> Tensor:
        first = zeros + 1
        return around(loop, x_TBH, first).sum() + first.square().sum()

    model: Any = Loop(does, course).double()
    twin, run = copy.deepcopy(model), ecornn.compile(model, codegen="eager")
    for turn, writes in enumerate((False, True, True, False)):
        model.step.writes = twin.step.writes = writes
        if turn == 1:
            with pytest.raises(StateWritten, match="run this step once more"):
                run(data())
        for one, own in ((run, model), (twin, twin)):
            own.zero_grad()
            one(data()).backward()
        same(gradients(model), gradients(twin), bits=False)


def test_an_evaluation_comes_first() -> None:
    """What a loop begins with is seen at its first call with gradients."""

    def use(run: Any, model: nn.Module, turn: int) -> list[Tensor | None]:
        with torch.no_grad():
            calm = run(data())
        h = run(data())
        h.sum().backward()
        return [calm, h.detach()]

    compare(Loop(plain, around), use, graphs=2)


def test_a_loss_that_is_kept_keeps_no_state() -> None:
    """As those do who write losses down; nor a gradient of one."""
    model, seen = Loop(plain, around).double(), []

    def hook(part: nn.Module, args: Any) -> None:
        seen.append(weakref.ref(args[1].untyped_storage()))

    model.step.register_forward_pre_hook(hook)
    run, losses = ecornn.compile(model, codegen="eager"), []
    for _ in range(2):
        losses.append(run(data()).sum())
        losses[-1].backward()
    gc.collect()
    assert len(seen) == 12
    assert all(ref() is None for ref in seen)


def test_a_first_state_is_a_buffer_expanded_or_of_a_parameter() -> None:
    def course(loop: Any, x_TBH: Tensor, zeros: Tensor) -> Tensor:
        frozen = around(loop, x_TBH, loop.buffer.expand(B, H))
        learned = around(loop, x_TBH, loop.learned.expand(B, H))
        turned = around(loop, x_TBH, zeros.t().contiguous().t())
        return (frozen * learned * turned).sum()

    model = Loop(plain, course)
    model.register_buffer("buffer", torch.randn(H))
    model.learned = nn.Parameter(torch.randn(H))
    compare(model, several=True)


def test_derivatives_forward_are_not_lost_in_silence() -> None:
    """Of the first state alone: torch's compiled code refuses these, from 2.15 on it runs the model
    as it is written; neither is asked for less."""

    def course(loop: Any, x_TBH: Tensor, zeros: Tensor) -> Tensor:
        return around(loop, x_TBH, loop.first)

    model: Any = Loop(plain, course).double()
    model.first = torch.zeros(B, H, dtype=torch.float64)
    run = ecornn.compile(model, codegen="eager")
    run(data()).sum().backward()
    with forward_ad.dual_level():
        model.first = forward_ad.make_dual(model.first, torch.ones_like(model.first))
        refused, found = "", None
        try:
            found = forward_ad.unpack_dual(run(data())).tangent
        except RuntimeError as error:
            refused = str(error)
        if "forward" not in refused:
            torch.testing.assert_close(found, forward_ad.unpack_dual(model(data())).tangent)
