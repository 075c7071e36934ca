"""Products of many calls made one, in models of many shapes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ecornn
from ecornn.bench.models.step import make_step
from ecornn.echo import weight_products
from support.called_often import gradients, in_any_order, same, watched
from support.process_group import process_group

aten = torch.ops.aten
H = 5


pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture(params=["in order", "in any order"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    with nullcontext() if request.param == "in order" else in_any_order():
        yield request.param


class Twice(nn.Module):
    """A weight that is read twice in a call, one that is read transposed and as a factor of
    another's gradient, one that is not read, and results of many kinds: an input as it came, a
    number, none, a view."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.unread = (nn.Linear(H, H) for _ in range(3))
        self.scale = nn.Parameter(torch.randn(H))

    def forward(self, x: Tensor, h: Tensor) -> dict[str, Any]:
        both = self.one.weight @ self.other.weight.t()
        h = torch.tanh(self.one(x) + self.one(h) * self.scale + h @ both)
        return {"x": x, "steps": 1, "nothing": None, "view": h.view(-1), "state": (h, [x * h])}


class Tied(nn.Module):
    """Two parts of one weight, which the model itself reads too; one part's bias is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, H)
        self.step, self.next = Twice(), nn.Sequential(nn.Linear(H, 7), nn.Tanh(), nn.Linear(7, H))
        self.next.get_submodule("0").weight = self.words.weight
        self.next.get_submodule("2").bias.requires_grad_(False)
        self.step.other.weight = self.step.one.weight

    def forward(self, words_TB: Tensor) -> Tensor:
        h, total = self.words(words_TB[0]), self.words.weight.square().mean()
        for words in words_TB:
            found = self.step(self.words(words), h)
            assert found["steps"] == 1
            assert found["nothing"] is None
            h = found["state"][0] + found["view"].view_as(h) * 0.5 + found["x"]
            h = self.next(h) + found["state"][1][0]
            total = total + (h @ self.words.weight.t()).logsumexp(-1).mean()
        return total


class Stateful(nn.Module):
    """Its state is a tensor of the module, as weights are, and another one at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.h = nn.Linear(2 * H, H), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.h = torch.tanh(self.one(torch.cat((x, self.h), -1)))
        return self.h


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.step = nn.Linear(H, H), Stateful()

    def forward(self, x_TBH: Tensor) -> Tensor:
        self.step.h = self.first(x_TBH[0])
        total = sum((self.step(x).square().sum() for x in x_TBH), torch.zeros(()))
        self.step.h = torch.zeros(())  # others could not be copied
        return total


def steps(run: Any, model: nn.Module, given: list[Any]) -> Iterator[list[Tensor | None]]:
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    for one in given:
        optimizer.zero_grad()
        loss = run(*one) if isinstance(one, tuple) else run(one)
        loss.backward()
        yield [loss.detach(), *gradients(model), *(p.detach().clone() for p in model.parameters())]
        optimizer.step()


def words(length: int, batch: int = 3) -> Tensor:
    return (torch.arange(length * batch) * 5 % 7).view(length, batch)


def states(length: int, batch: int = 3) -> Tensor:
    made = torch.linspace(-1, 1, length * batch * H, dtype=torch.float64)
    return made.view(length, batch, H)


@pytest.mark.parametrize(("make", "data"), [(Tied, words), (Remembering, states)])
def test_training(way: str, make: type[nn.Module], data: Callable[..., Tensor]) -> None:
    """And a copy and a pickle, which are compiled anew, while the first goes on."""
    model = make().double()
    run = ecornn.compile(model, codegen="eager")
    given = [data(5), data(5), data(18), data(4, 2), data(6, 4), data(6, 4)]
    with watched() as seen:
        for _ in steps(run, model, given[:2]):
            pass
        assert seen.calls > 0
        others = [model, copy.deepcopy(run), pickle.loads(pickle.dumps(run))]
        twin = copy.deepcopy(model)
        expected = list(steps(twin, twin, given))
        for other in others:
            run = run if other is model else other
            before = seen.calls
            for found, right in zip(steps(run, other, given), expected, strict=True):
                same(found, right, bits=False)
            assert seen.calls - before >= 20
    told = str(run.explain())
    assert "weights are added up over its calls" in told
    assert ("by one product" in told) is (way == "in any order")


def test_sparse_gradients(way: str) -> None:
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            table = nn.Embedding(7, H, sparse=True)
            self.step = nn.Sequential(table, nn.Linear(H, H), nn.Tanh())

        def forward(self, words_TB: Tensor) -> Tensor:
            return sum((self.step(words).square().sum() for words in words_TB), torch.zeros(()))

    model = Looking().double()
    run, twin = ecornn.compile(model, codegen="eager"), copy.deepcopy(model)
    with watched() as seen:
        for _ in range(3):
            for one, own in ((run, model), (twin, twin)):
                own.zero_grad()
                one(words(5)).backward()
            assert model.step.get_submodule("0").weight.grad.is_sparse
            dense = [[g.to_dense() for g in gradients(own)] for own in (model, twin)]  # type: ignore[union-attr]
            same(*dense, bits=False)
    assert seen.calls >= 10


class Alike(nn.Module):
    """Gradients of two weights and two inputs are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.randn(H)) for _ in range(2))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return h + x + self.one + self.other


def test_gradients_that_are_one_tensor(way: str) -> None:
    """Nobody adds to what another holds: sums, states, inputs, and `.grad` of earlier passes."""

    class Adding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = Alike()

        def forward(self, h: Tensor, xs: list[Tensor]) -> Tensor:
            for x in xs:
                h = self.step(h, x) * 1.1
                self.last = h
            return self.step(h, x)

    model = Adding().double()
    run, twin = ecornn.compile(model, codegen="eager"), copy.deepcopy(model)
    found = []
    for one, own in ((run, model), (twin, twin)):
        made = torch.arange(6 * H, dtype=torch.float64).view(6, H)
        h, *xs = (row.clone().requires_grad_() for row in made)
        with watched() as seen:
            for _ in range(4):  # gradients of all passes are added
                out = one(h, xs)
                own.last.retain_grad()
                out.backward(made[0] + 1)
        assert seen.calls >= (15 if one is run else 0)
        found.append([*gradients(own), h.grad, *(x.grad for x in xs), own.last.grad])
    same(*found, bits=way == "in order")


@pytest.mark.parametrize("length", [16, 33])
def test_a_translator(way: str, length: int) -> None:
    """By the bit, where the order is kept; float32."""
    found = []
    for compiled in (True, False):
        step = make_step("nmt", size="tiny", batch=4, length=length, device="cpu")
        if compiled:
            step.run = ecornn.compile(step.model, codegen="eager")
        with watched() as seen:
            for _ in range(3):
                step()
        found.append([p.grad for p in step.model.parameters()])
        assert seen.calls >= (length if compiled else 0)
    if way == "in order":
        same(*found, bits=True)
        return
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert seen.largest <= 16


class Plain(nn.Module):
    """A loop over two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Sequential(nn.Linear(H, H), nn.Tanh(), nn.Linear(H, H), nn.LayerNorm(H))

    def forward(self, x: Tensor, calls: int = 6) -> Tensor:
        for _ in range(calls):
            x = x + self.step(x)
        return x.square().sum()


@pytest.mark.parametrize("within", ["forward", "both"])
def test_autocast(within: str) -> None:
    """Beside the same part compiled by torch: eager mode casts a weight once for all calls."""
    model = Plain()
    twin, x = copy.deepcopy(model), torch.randn(3, H)
    found = []
    twin.step.forward = torch.compile(twin.step.forward, backend="aot_eager")  # type: ignore[method-assign]
    with in_any_order():
        run = ecornn.compile(model, codegen="eager")
        for one, own in ((run, model), (twin, twin)):
            with watched() as seen:
                for _ in range(2):
                    own.zero_grad()
                    with torch.autocast("cpu", torch.bfloat16):
                        loss = one(x)
                        if within == "both":
                            loss.backward()
                    if within == "forward":
                        loss.backward()
            assert seen.calls == (6 if one is run else 0)
            found.append([p.grad for p in own.parameters()])
    assert "those of 2 by one product" in str(run.explain())
    for mine, other in zip(*found, strict=True):
        assert mine.dtype == torch.float32
        # one rounding to bfloat16 of each call, or of all: 2^-8 of the largest entry
        torch.testing.assert_close(mine, other, rtol=0.0, atol=float(other.abs().max()) * 2**-7)


def test_inductor_s_code() -> None:
    """The real thing: factors that are saved, given or made, and memory that is used again."""
    model = Plain().double()
    twin = copy.deepcopy(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_products, "LARGEST_FACTORS", 1e9)
        run = ecornn.compile(model, codegen="inductor")
        with watched() as seen:
            for calls in (6, 6, 20):
                x = torch.randn(3, H, dtype=torch.float64)
                for one, own in ((run, model), (twin, twin)):
                    own.zero_grad()
                    one(x, calls).backward()
                same(gradients(model), gradients(twin), bits=False)
    assert seen.calls >= 25
    assert seen.largest == 16
    assert "those of 2 by one product" in str(run.explain())


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")
@pytest.mark.parametrize("outside", [True, False])
def test_data_parallel(way: str, outside: bool, tmp_path: Path) -> None:
    """One process: what DDP's hooks are handed, and when."""
    with process_group(tmp_path):
        _train_data_parallel(way, outside)


def _train_data_parallel(way: str, outside: bool) -> None:
    model = Plain().double()
    twin, x = copy.deepcopy(model), torch.randn(3, H, dtype=torch.float64)
    parallel = nn.parallel.DistributedDataParallel
    run: Any
    if outside:
        run = parallel(ecornn.compile(model, codegen="eager"))
    else:
        run = ecornn.compile(parallel(model), codegen="eager")
    with watched() as seen:
        for _ in range(3):
            for one, own in ((run, model), (twin, twin)):
                own.zero_grad()
                one(x).backward()
            same(gradients(model), gradients(twin), bits=way == "in order")
    assert seen.calls >= 10
    torch._dynamo.reset()  # it refers to what it has compiled


def test_compiled_autograd_has_the_whole_backward_pass() -> None:
    """It traces the passes itself: no call hands over a factor."""
    model, x = Plain().double(), torch.randn(3, H, dtype=torch.float64)
    twin = copy.deepcopy(model)
    with in_any_order(), watched() as seen:
        run = ecornn.compile(model, codegen="eager")
        for traced in (False, True, False):
            for one, own in ((run, model), (twin, twin)):
                own.zero_grad()
                loss = one(x)
                tracing = torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
                with tracing if traced and one is run else nullcontext():
                    loss.backward()
            same(gradients(model), gradients(twin), bits=False)
    assert seen.calls >= 5


def test_a_factor_that_is_written_to_meanwhile_is_an_error() -> None:
    class Handing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = nn.Sequential(nn.Linear(H, H, bias=False), nn.Identity())

        def forward(self, xs: list[Tensor]) -> list[Tensor]:
            return [self.step(x) for x in xs]

    with in_any_order():
        run = ecornn.compile(Handing(), codegen="eager")
        xs = [torch.randn(3, H) for _ in range(5)]
        for bad in (False, False, True, False):
            results = run(xs)
            kept = torch.stack([r * 2 for r in results]).sum()
            if bad:
                # its own call has read it by then
                results[0].register_hook(lambda g: (xs[4].zero_(), None)[1])
                with pytest.raises(RuntimeError, match="changed in place during the backward"):
                    kept.backward()
            else:
                kept.backward()
