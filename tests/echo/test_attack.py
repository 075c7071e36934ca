"""Small models made to catch a compiler out: draws, writes, aliases, odd types and orders.

Each is trained for two steps and evaluated for one, beside its twin in eager mode; outputs, every
gradient, weights, buffers, inputs and the generator must be the twin's to the last bit.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import ecornn
import ecornn.echo

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Model(nn.Module):
    """A small end, a wide middle, and then what is asked for."""

    def __init__(self, then: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.table = nn.BatchNorm1d(8, momentum=0.3), nn.Embedding(7, 8, max_norm=1.0)
        self.register_buffer("seen", torch.linspace(0, 1, 8))
        self.then = then

    def forward(self, x: Tensor, other: Tensor) -> Any:
        wide = torch.tanh(self.first(x).unsqueeze(1) + x.unsqueeze(0))
        return self.then(self, wide, other)


class Squared(torch.autograd.Function):
    """Its gradient is not that of what it computes, and draws."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x * 3 * torch.rand_like(grad)


def draws(model: Model, wide: Tensor, _: Tensor) -> Tensor:
    dropped = F.alpha_dropout(F.dropout(wide, 0.3, model.training).sin(), 0.3, model.training)
    noisy = F.rrelu(dropped, training=model.training) * torch.rand_like(wide)
    picked = noisy * torch.bernoulli(torch.sigmoid(wide.detach()))
    shuffled = picked[:, torch.randperm(wide.shape[1])]
    return F.feature_alpha_dropout(shuffled, 0.3, model.training).mean(1) @ model.second.weight


def moves_statistics(model: Model, wide: Tensor, _: Tensor) -> Tensor:
    """The same layer twice."""
    once = model.norm(wide.transpose(1, 2)).tanh()
    return model.norm(once.exp()).sin().mean(2) @ model.second.weight


def reads_and_writes_a_buffer(model: Model, wide: Tensor, _: Tensor) -> Tensor:
    """torch's own min-cut reads it again in the backward pass, when it is another."""
    wide = wide * model.seen.cos()
    model.seen.add_(wide.detach().mean((0, 1)))
    wide = wide.exp() * model.seen.sin()
    model.seen.mul_(0.5)
    return wide.mean(1)


def writes_to_an_input(_: Model, wide: Tensor, other: Tensor) -> Tensor:
    result = (wide * other.sin().exp()).cos()
    other[1:5].mul_(3)
    result = result * other.tanh()
    other.zero_()
    return result.mean(1)


def writes_in_place(_: Model, wide: Tensor, other: Tensor) -> Tensor:
    copied = wide.clone()
    copied[:, 1:3] = wide[:, 3:5] * 2
    copied[0] = 1.0
    copied[..., 2] += wide[..., 3]
    return copied.masked_fill_(wide > 0.5, 0.25).sin().mul_(other).mean(1)


def returns_aliases(model: Model, wide: Tensor, other: Tensor) -> Any:
    kept = wide.sin()
    again = torch.tanh(kept).exp().mean(1) @ model.second.weight
    return {"a": kept, "b": (kept, None, 3), "c": [kept.transpose(0, 1), again, other, kept > 0]}


def orders_and_scatters(_: Model, wide: Tensor, __: Tensor) -> Tensor:
    values, places = torch.sort(wide, -1)
    best = torch.topk(wide, 3, -1)[0].sum(-1, keepdim=True)
    spread = torch.zeros_like(wide).scatter_add(-1, places % 4, values * wide)
    return (spread.cos() * best - wide.median(-1, keepdim=True)[0]).mean(1)


def views(_: Model, wide: Tensor, __: Tensor) -> Tensor:
    strided = wide.contiguous().as_strided((6, 6, 8), (8, 8, 1)).cos()
    parts = torch.cat([part.sin() * part for part in wide.chunk(4, -1)][::-1], -1)
    return (strided * parts * wide[:1].expand(6, 6, 8).exp()).unfold(-1, 3, 1).sin().sum((1, 3))


def is_complex(_: Model, wide: Tensor, __: Tensor) -> Tensor:
    turned = torch.polar(wide.exp(), wide) * torch.complex(wide, wide.sin())
    return (torch.fft.fft(turned).abs() * wide).mean(1)


def has_a_constant(_: Model, wide: Tensor, __: Tensor) -> Tensor:
    return (torch.tanh(wide) * torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8])).exp().tanh().mean(1)


def has_its_own_gradient(_: Model, wide: Tensor, __: Tensor) -> Tensor:
    return Squared.apply(wide.sin()).cos().mean(1)


def renormalizes(model: Model, wide: Tensor, __: Tensor) -> Tensor:
    """An embedding with `max_norm` writes to its weight."""
    rows = model.table(torch.arange(6) % 5)
    return (torch.tanh(rows.unsqueeze(1) + wide).sin() * rows.unsqueeze(0)).mean(1)


def stops_gradients(_: Model, wide: Tensor, other: Tensor) -> Any:
    with torch.no_grad():
        scale = torch.tanh(wide).sin()
    return (scale * wide.detach().exp() * wide).mean(1), wide.argmax(-1), (wide * other).detach()


def breaks_the_graph(model: Model, wide: Tensor, _: Tensor) -> Tensor:
    wide = wide.sin() if wide.sum().item() > 1e6 else wide.cos()
    torch._dynamo.graph_break()
    return torch.tanh(wide).mean(1) @ model.second.weight


def has_empty_and_single_values(_: Model, wide: Tensor, other: Tensor) -> Any:
    return wide[:, :0].sin(), (wide * other.mean().sin()).mean().tanh().exp()


def trained(run: Any, model: nn.Module) -> list[Tensor]:
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    record: list[Tensor] = []
    for step in range(3):
        model.train(step < 2)
        x = torch.linspace(-2, 2 + step, 48).view(6, 8).requires_grad_()
        other = torch.linspace(-1, 1 + step, 8)
        results = [leaf for leaf in tree_leaves(run(x, other)) if isinstance(leaf, Tensor)]
        loss = torch.zeros((), dtype=torch.float64)
        for result in results:
            if result.requires_grad:
                loss = loss + result.double().add(0.3).square().sum()
        if step != 1:  # gradients of two steps are added
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record += [t.detach().clone() for t in (*results, x.grad, other, torch.get_rng_state())]
        record += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [*record, *(t.clone() for t in model.state_dict().values())]


CASES = (
    *(draws, moves_statistics, reads_and_writes_a_buffer, writes_to_an_input, writes_in_place),
    *(returns_aliases, orders_and_scatters, views, is_complex, has_a_constant),
    *(has_its_own_gradient, renormalizes, stops_gradients, breaks_the_graph),
    has_empty_and_single_values,
)


@pytest.mark.parametrize("memory", ["auto", "min"])
@pytest.mark.parametrize("then", CASES, ids=lambda case: case.__name__)
def test_it_trains_as_its_twin_does(then: Callable[..., Any], memory: str) -> None:
    torch.manual_seed(0)
    model = Model(then)
    twin = copy.deepcopy(model)
    compiled = ecornn.compile(model, memory=memory)
    found, expected = trained(compiled, model), trained(twin, twin)
    assert len(found) == len(expected)
    for k, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.dtype == other.dtype
        assert torch.equal(one, other), (k, one, other)
    assert all(graph.fallback is None for graph in compiled.explain().graphs)


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, state: Tensor, x: Tensor) -> Tensor:
        wide = torch.tanh(self.first(state).unsqueeze(1) + x)
        return self.second(F.dropout(wide, 0.3, self.training).sin().mean(1))


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = Step()

    def forward(self, x: Tensor) -> Tensor:
        state = x
        for _ in range(5):
            state = self.step(state, x)
        return state


def grads(run: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    (run(x) * torch.linspace(-1, 1, 6)).sum().backward()
    return [*(p.grad.clone() for p in model.parameters()), torch.get_rng_state().double()]


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_a_region_follows_its_model() -> None:
    """Another mode, fixed weights, another size, another part in its place, another forward."""
    model, x = Loop().double(), torch.randn(3, 6, dtype=torch.float64)
    compiled = ecornn.compile(model, memory="min")
    for change in (
        lambda: None,
        lambda: compiled.eval(),
        lambda: compiled.train(),
        lambda: setattr(model, "step", Step().double()),
        lambda: setattr(model.step, "first", nn.Linear(6, 6).double()),
        lambda: setattr(model.step, "forward", lambda s, x: model.step.first(model.step.second(s))),
    ):
        change()
        assert_close(grads(compiled, model, x), grads(model, model, x))
    assert_close(grads(compiled, model, x[:2]), grads(model, model, x[:2]))


def test_backward_passes_in_any_order_and_twice() -> None:
    model = Loop().double()
    compiled = ecornn.compile(model, memory="min")
    found = []
    for run in (compiled, model):
        torch.manual_seed(0)
        model.zero_grad()
        losses = [run(torch.full((3, 6), 0.2 * k, dtype=torch.float64)).sum() for k in range(3)]
        for k in (1, 0, 2):
            losses[k].backward(retain_graph=True)
        losses[1].backward()
        found.append([p.grad.clone() for p in model.parameters()])
    assert_close(*found)


def test_a_region_that_raises_leaves_the_model_as_it_was() -> None:
    model = Loop()
    compiled = ecornn.compile(model)
    compiled(torch.randn(3, 6))
    with pytest.raises(RuntimeError):
        compiled(torch.randn(3, 7))
    assert "forward" not in vars(model.step)


def test_double_backward_is_refused() -> None:
    compiled, x = ecornn.compile(Loop(), memory="min"), torch.randn(3, 6, requires_grad=True)
    (grad,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        grad.sum().backward()


class Counting(nn.Module):
    """Reads a buffer and then writes to it: torch's min-cut (2.13) reads it again afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        result = x * self.weight * self.seen.cos()
        self.seen.add_(1.0)
        return result


class CountingLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = Counting()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.step(x)
        return x


@pytest.mark.parametrize("regions", ["auto", ()], ids=["region", "whole"])
@pytest.mark.parametrize("memory", ["auto", "min"])
def test_torchs_splits_are_checked_as_well(memory: str, regions: Any) -> None:
    model = CountingLoop().double()
    twin = copy.deepcopy(model)
    compiled = ecornn.compile(model, memory=memory, regions=regions)
    for _ in range(3):
        grads = []
        for run, plain in ((compiled, model), (twin, twin)):
            plain.zero_grad()
            run(torch.ones(50, 8, dtype=torch.float64)).sum().backward()
            grads.append(plain.step.weight.grad.clone())
        torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-14)


class CountingWords(Counting):
    """A sparse gradient, which Echo leaves to torch."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 8, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.words(torch.zeros(x.shape[0], dtype=torch.long))
        for _ in range(4):
            x = super().forward(x)
        return x


@pytest.mark.parametrize("memory", ["auto", "min"])
def test_what_is_left_to_torch_is_right_too(memory: str) -> None:
    model = CountingWords().double()
    twin = copy.deepcopy(model)
    compiled = ecornn.compile(model, memory=memory)
    for run, plain in ((compiled, model), (twin, twin)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ecornn.echo.FellBack)
            run(torch.ones(50, 8, dtype=torch.float64)).sum().backward()
        assert plain.weight.grad is not None
    assert compiled.explain().graphs[0].fallback
    torch.testing.assert_close(model.weight.grad, twin.weight.grad, rtol=1e-12, atol=1e-14)
