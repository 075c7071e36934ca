"""However autograd is used, a part's weights have the gradients of the model as it is written."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils.checkpoint import checkpoint

import ecornn
from ecornn.echo.calls_noted import BY_KIND
from ecornn.echo.weight_sums import CALLS_AT_ONCE, SumsLeftOver, WeightSums
from support.called_often import (
    WIDTH,
    Seen,
    Speaker,
    gradients,
    in_any_order,
    same,
    watched,
)

Run = Callable[..., list[Tensor]]
Found = list[Tensor | None]


def inputs(steps: int = 6, batch: int = 3, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(steps, batch, WIDTH, dtype=torch.float64, generator=generator)
    return made.requires_grad_()


class Both:
    """A model and its twin, which is not compiled. Compiled once for all tests: torch has seen all
    sizes when they begin, and the sums know their nodes."""

    def __init__(self, *, bits: bool) -> None:
        torch._dynamo.reset()
        torch.use_deterministic_algorithms(True, warn_only=True)  # as in each test: torch guards it
        self.bits = bits
        torch.manual_seed(1)
        self.model = Speaker().double()
        self.start = copy.deepcopy(self.model.state_dict())
        self.twin = copy.deepcopy(self.model)
        self.run = ecornn.compile(self.model, codegen="eager")
        others = set(BY_KIND.values())  # of other tests' models, perhaps alive
        for _ in range(2):
            for x in (inputs(), inputs(batch=5), inputs(batch=2)):
                self.run(x, (1, 4))[-1].sum().backward()
                self.run(x)[-1].sum().backward()
                self.run(x.detach())[-1].sum().backward()
        self.sums = set(BY_KIND.values()) - others

    def check(
        self, use: Callable[[Run, nn.Module], Found], *, at_least: int, bits: bool = True
    ) -> Seen:
        """`use` calls a model and returns what is compared beside the weights' gradients.
        `at_least`: calls that must have been added up. `bits`: by the bit, if order is kept."""
        found = []
        for run, model in ((self.run, self.model), (self.twin, self.twin)):
            model.load_state_dict(self.start)
            model.zero_grad()
            with watched() if run is self.run else nullcontext(Seen()) as seen:
                more = use(run, model)
            found.append([*gradients(model), *more])
            if run is self.run:
                ours = seen
        assert ours.calls >= at_least
        same(*found, bits=bits and self.bits)
        assert any(g is not None and g.abs().sum() > 0 for g in found[0])
        return ours


@pytest.fixture(scope="module", params=["in order", "in any order"])
def both(request: pytest.FixtureRequest) -> Iterator[Both]:
    ways = nullcontext() if request.param == "in order" else in_any_order()
    # torch refuses retain_graph otherwise
    with ways, functorch_config.patch(donated_buffer=False):
        yield Both(bits=request.param == "in order")
    torch._dynamo.reset()


@pytest.mark.parametrize("steps", [1, 2, CALLS_AT_ONCE, CALLS_AT_ONCE + 1, 2 * CALLS_AT_ONCE + 3])
def test_any_number_of_calls(both: Both, steps: int) -> None:
    def use(run: Run, model: nn.Module) -> Found:
        x = inputs(steps)
        states = run(x)
        (states[-1] * 3).sum().backward()
        return [x.grad, *states]

    seen = both.check(use, at_least=steps)
    assert seen.largest == (0 if both.bits else min(steps, CALLS_AT_ONCE))


def test_a_graph_that_is_kept_runs_twice(both: Both) -> None:
    def use(run: Run, model: nn.Module) -> Found:
        x = inputs()
        states = run(x)
        states[-1].sum().backward(retain_graph=True)
        kept = gradients(model)
        states[2].square().sum().backward(retain_graph=True)
        torch.stack(states).sum().backward()
        return [x.grad, *kept]

    both.check(use, at_least=6 + 3 + 6)


def test_gradients_of_some_things_only(both: Both) -> None:
    """Of inputs, states in the middle and single weights: torch says of a state's call that it will
    be run, and does not run it."""

    def use(run: Run, model: nn.Module) -> Found:
        x = inputs()
        states = run(x)
        loss = torch.stack(states[3:]).square().sum()
        found = [*torch.autograd.grad(loss, [x], retain_graph=True)]
        found += torch.autograd.grad(loss, [states[1]], retain_graph=True)
        found += torch.autograd.grad(loss, [states[4], states[1], x], retain_graph=True)
        found += torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        one = model.step.across.weight
        found += torch.autograd.grad(loss, [one, states[2]], retain_graph=True)
        states[2].retain_grad()
        loss.backward(retain_graph=True, inputs=[states[2]])
        loss.backward(retain_graph=True, inputs=[one, x])
        loss.backward()
        return [*found, x.grad, states[2].grad]

    both.check(use, at_least=4 * 6)


def test_some_calls_are_no_part_of_the_loss(both: Both) -> None:
    def use(run: Run, model: nn.Module) -> Found:
        x = inputs()
        (run(x)[3].sum() + run(x, (1, 3))[-1].square().sum()).backward()
        states = run(x, (0, 1, 2, 3, 4))
        (states[0] * states[2] * states[5]).sum().backward()
        return [x.grad]

    # steps from a detached state are another graph, whose sum is added to that of the first
    both.check(use, at_least=4 + 2 + 3, bits=False)


def test_a_pass_may_begin_at_a_call_and_at_several(both: Both) -> None:
    def use(run: Run, model: nn.Module) -> Found:
        x = inputs()
        states = run(x)
        ones = torch.ones_like(states[0])
        states[-1].backward(ones, retain_graph=True)
        torch.autograd.backward([states[1], states[4]], [ones, 2 * ones], retain_graph=True)
        torch.autograd.backward([states[1], states[4]], [ones, 2 * ones], inputs=[x])
        return [x.grad]

    both.check(use, at_least=6 + 5)


@pytest.mark.parametrize("order", ["together", "first", "second", "one within the other's"])
def test_two_calls_of_the_model(both: Both, order: str) -> None:
    def use(run: Run, model: nn.Module) -> Found:
        x, y = inputs(), inputs(batch=5, seed=1)
        one, other = (run(z)[-1].square().sum() for z in (x, y))
        if order == "together":
            (one + 2 * other).backward()
        elif order == "one within the other's":
            states = run(x)
            states[3].register_hook(lambda g: other.backward())
            states[-1].sum().backward()
        else:
            for loss in (one, other) if order == "first" else (other, one):
                loss.backward()
        return [x.grad, y.grad]

    both.check(use, at_least=12)


def test_other_calls_in_between(both: Both) -> None:
    """Without gradients, in evaluation, and with gradients that nobody asks for."""

    def use(run: Run, model: nn.Module) -> Found:
        x = inputs()
        states = run(x)
        with torch.no_grad():
            calm = run(x)[-1]
        model.eval()
        evaluated = run(x)[-1]
        model.train()
        unasked = run(x)
        states[-1].square().sum().backward()
        del unasked
        run(x.detach())[-1].sum().backward()
        return [x.grad, calm, evaluated]

    both.check(use, at_least=12)


def test_micro_batches_and_an_optimizer(both: Both) -> None:
    def use(run: Run, model: nn.Module) -> Found:
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        for k in range(6):
            if k % 3 == 0:
                optimizer.zero_grad(set_to_none=k == 0)
            run(inputs(batch=(2, 3, 5)[k % 3], seed=k))[-1].square().sum().backward()
            if k % 3 == 2:
                optimizer.step()
        return [p.detach() for p in model.parameters()]

    both.check(use, at_least=36)


def test_hooks_see_whole_gradients_once(both: Both) -> None:
    def use(run: Run, model: nn.Module) -> Found:
        seen: Found = []
        weights = list(model.parameters())
        hooks = [w.register_hook(lambda g: (seen.append(g.clone()), 2 * g)[1]) for w in weights]
        run(inputs())[-1].square().sum().backward()
        for hook in hooks:
            hook.remove()
        assert len(seen) == len(weights)
        return sorted(seen, key=lambda g: (g.shape, g.flatten()[0]))

    both.check(use, at_least=6)


def test_an_optimizer_that_steps_within_the_backward_pass(both: Both) -> None:
    def use(run: Run, model: nn.Module) -> Found:
        def step(weight: Tensor) -> None:
            with torch.no_grad():
                weight -= 0.1 * weight.grad
            weight.grad = None

        hooks = [w.register_post_accumulate_grad_hook(step) for w in model.parameters()]
        for k in range(3):
            run(inputs(seed=k))[-1].square().sum().backward()
        for hook in hooks:
            hook.remove()
        run(inputs())[-1].square().sum().backward()
        return [p.detach().clone() for p in model.parameters()]

    both.check(use, at_least=24)


def test_what_raised_leaves_nothing(both: Both) -> None:
    def use(run: Run, model: nn.Module) -> Found:
        def raising(g: Tensor) -> None:
            raise ValueError("stop")

        for k in range(12):
            states = run(inputs(seed=k))
            states[2].register_hook(raising)
            with pytest.raises(ValueError, match="stop"):
                states[-1].sum().backward()
        del states
        gc.collect()
        assert both.sums
        for sums in both.sums:
            assert not len(sums._under_way)
            assert not len(sums._calls)
        run(inputs())[-1].sum().backward()
        return []

    both.check(use, at_least=12 * 3 + 6)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_in_a_checkpoint(both: Both) -> None:
    """One within another, too: deeper than any number of passes that one could reckon with."""

    def use(run: Run, model: nn.Module) -> Found:
        x = inputs()
        for reentrant in (False, True):
            state = checkpoint(lambda y: run(y)[-1], x, use_reentrant=reentrant)
            state.square().sum().backward()

        def deeper(depth: int, y: Tensor) -> Tensor:
            y = y * 0.9 + run(y)[-1]
            if depth:
                y = checkpoint(deeper, depth - 1, y, use_reentrant=True)
            return y + run(y)[-1]  # begun before what is within, and ended after it

        deeper(11, x).sum().backward()
        return [x.grad]

    both.check(use, at_least=6 + 6 + 12 * 12)


def test_in_threads(both: Both) -> None:
    """Each in one of its own, and several at once."""

    def use(run: Run, model: nn.Module) -> Found:
        given = [inputs(seed=k, batch=(2, 3, 5)[k % 3]) for k in range(6)]
        losses = [run(x)[-1].square().sum() for x in given]
        threads = [threading.Thread(target=loss.backward) for loss in losses[:1]]
        for thread in threads:
            thread.start()
            thread.join()
        wait, errors = threading.Barrier(5), []

        def work(k: int) -> None:
            try:
                wait.wait()
                for _ in range(4):
                    # not into `.grad`: threads would add to it in any order
                    loss = run(given[k])[-1].square().sum()
                    found = torch.autograd.grad(loss, [given[k], *model.parameters()])
                    same(found, found_by.setdefault(k, found), bits=True)
            except BaseException as error:
                errors.append(error)

        found_by: dict[int, Any] = {}
        threads = [threading.Thread(target=work, args=(k,)) for k in range(1, 6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        return [g for k in range(1, 6) for g in found_by[k]]

    both.check(use, at_least=6 + 5 * 4 * 6)


def test_other_weights_for_some_calls(both: Both) -> None:
    """One compiled graph serves whatever weights the part has: each has its own gradients."""

    def use(run: Run, model: nn.Module) -> Found:
        x = inputs()
        others = {name: nn.Parameter(p.detach() * 0.5) for name, p in model.named_parameters()}
        mine = dict(model.named_parameters())
        del others["step.across.weight"]  # some are the same
        one = run(x)[-1].square().sum()
        with _reparametrize_module(model, others):
            other = run(x)[-1].square().sum()
        assert all(p is mine[name] for name, p in model.named_parameters())
        (one + other).backward()
        return [x.grad, *(p.grad for p in others.values())]

    # the weight that is the same has one sum of each, where eager mode has one of all
    both.check(use, at_least=12, bits=False)


def test_anomaly_mode_and_module_hooks(both: Both) -> None:
    def use(run: Run, model: nn.Module) -> Found:
        seen: Found = []
        hook = model.step.register_full_backward_hook(lambda m, g, go: seen.extend(go))
        x = inputs()
        with torch.autograd.set_detect_anomaly(True):
            run(x)[-1].square().sum().backward()
        hook.remove()
        return [x.grad, *seen]

    both.check(use, at_least=6)


def test_what_torch_refuses_is_still_refused(both: Both) -> None:
    x = inputs()
    weights = list(both.model.step.parameters())
    both.model.load_state_dict(both.start)
    with watched() as seen:
        loss = both.run(x)[-1].square().sum()
        found = torch.autograd.grad(loss, [x, *weights], create_graph=True)
        for one in found:
            with pytest.raises(RuntimeError, match="double backward"):
                one.sum().backward(retain_graph=True)
        loss = both.run(x)[-1].square().sum()
        with torch.no_grad():
            both.model.step.across.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        loss = both.run(x)[-1].square().sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    assert seen.calls >= 12


def test_gradients_are_handed_over_without_a_copy(both: Both) -> None:
    """And nobody writes to them afterwards."""
    weight, seen_at = both.model.step.norm.bias, []
    hook = weight.register_hook(lambda g: seen_at.append(g.data_ptr()))
    both.model.zero_grad()
    with watched() as seen:
        both.run(inputs())[-1].sum().backward()
        hook.remove()
        first, before = weight.grad, weight.grad.clone()
        assert seen_at == [first.data_ptr()]
        weight.grad = None
        both.run(inputs(seed=4))[-1].sum().backward()
    assert seen.calls >= 12
    assert torch.equal(first, before)
    assert first.data_ptr() != weight.grad.data_ptr()


def test_calls_that_never_run_are_an_error(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should torch be wrong about what it will run, that is not lost in silence."""
    run = WeightSums._begun

    def one_too_many(self: Any, *args: Any) -> Any:
        begun = run(self, *args)
        begun.waiting.add(-1)
        return begun

    monkeypatch.setattr(WeightSums, "_begun", one_too_many)
    with pytest.raises(SumsLeftOver, match="1 calls of a compiled part"):
        both.run(inputs())[-1].sum().backward()


def test_nothing_is_kept_alive() -> None:
    model = Speaker().double()
    run = ecornn.compile(model, codegen="eager")
    with watched() as seen:
        for _ in range(2):
            run(inputs())[-1].sum().backward()
    assert seen.calls >= 5
    gone = weakref.ref(model.step.across.weight)
    torch._dynamo.reset()
    del run, model
    gc.collect()
    assert gone() is None
