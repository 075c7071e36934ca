"""Products of many calls made one, in models of many shapes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

import ecornn
from ecornn.bench.models.step import make_step
from ecornn.echo import weight_products
from ecornn.echo.gathered import Columns, Factor, Gathered, Product, RowSum, Small
from ecornn.echo.weight_products import Backward, views_of
from ecornn.echo.weight_sums import WeightSums
from support.called_often import gradients, in_any_order, same, watched
from support.process_group import process_group

aten = torch.ops.aten
H = 5


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


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


def graph_of(function: Callable[..., Any], *given: Tensor) -> fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, tracing_mode="fake")(*given)


@pytest.mark.parametrize("turned", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)])
def test_products_are_taken_out_however_they_are_turned(turned: tuple[int, int, int]) -> None:
    """Of two calls with other numbers of rows."""
    left, right, result = turned

    def backward(a: Tensor, b: Tensor) -> list[Tensor]:
        found = (a.t() if left else a) @ (b.t() if right else b)
        return [a.sum(), found.t() if result else found]

    def sized(rows: int) -> tuple[Tensor, Tensor]:
        a, b = torch.randn(40, rows), torch.randn(rows, 30)
        return (a.t().contiguous() if left else a), (b.t().contiguous() if right else b)

    given = sized(3), sized(4)
    expected = [backward(*one)[1] for one in given]
    module = graph_of(backward, *given[0])
    assert not products_of(copy.deepcopy(module), [0])
    sums = WeightSums([1], [(), tuple(expected[0].shape)], ())
    sums.in_any_order(module)
    (product,) = sums.gathered
    assert isinstance(product, Product)
    assert not module.graph.find_nodes(op="call_function", target=aten.mm.default)
    handed = [module(*one) for one in given]
    columns = columns_of(product.places, handed)
    made = product.of_calls(columns, None)
    torch.testing.assert_close(product.result(made), sum(expected))
    again = product.of_calls(columns, made)
    torch.testing.assert_close(product.result(again), 2 * sum(expected))
    for one, right_one in zip(handed, expected, strict=True):
        found = sums.of_one_call(one)
        assert len(found) == 2
        torch.testing.assert_close(found[1], right_one)


def products_of(
    module: fx.GraphModule, inputs: Collection[int], changing: Collection[str] = ()
) -> tuple[Gathered, ...]:
    backward = Backward(module, changing)
    backward.take_products(inputs)
    return backward.end()


def columns_of(places: Sequence[int], handed: Sequence[Any]) -> Columns:
    where = {place: i for i, place in enumerate(dict.fromkeys(places))}
    return Columns(where, [[one[place] for place in where] for one in handed])


def test_what_is_no_product_to_take_out() -> None:
    def backward(a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
        read_twice, rounded = a @ b, (a @ b).to(torch.bfloat16)
        twice = a @ (2 * b)
        # the last has factors of 50 columns, larger than half of the result
        return [read_twice, read_twice.sum(), rounded, twice, twice, c @ c.t()]

    given = torch.randn(40, 3), torch.randn(3, 40), torch.randn(40, 50)
    module = graph_of(backward, *given)
    before = module(*given)
    assert products_of(module, range(6)) == ()
    same(module(*given), before, bits=True)


def test_a_weight_is_no_factor_to_keep() -> None:
    """An optimizer may write to it before its turn comes."""

    def forward(weight: Tensor, x: Tensor) -> list[Tensor]:
        return [x @ weight.t(), weight[1:].view(-1), weight * 2, x.t()]

    module = graph_of(forward, torch.randn(40, 3), torch.randn(5, 3))
    shared = views_of(module, [0])
    kinds = {node.name: str(node.target) for node in module.graph.nodes}
    found = sorted(kinds[name] for name in shared)
    assert found == ["aten.slice.Tensor", "aten.t.default", "aten.view.default", "weight_1"]
    backward = graph_of(lambda w, g: [g @ w], torch.randn(2, 40), torch.randn(40, 2))
    first, _ = backward.graph.find_nodes(op="placeholder")
    assert not products_of(backward, [0], {first.name})
    assert products_of(backward, [0])


def test_small_results_and_factors() -> None:
    module = graph_of(lambda x: [x.sum(0), x, x[0]], torch.randn(200, 100, dtype=torch.float64))
    backward = Backward(module, ())
    backward.take_small([0, 1, 2])
    assert backward.end() == (Small(0, (100,)), Small(2, (100,)))
    columns = columns_of([0], [[torch.randn(2, 3)], [torch.randn(4, 3)]])
    assert Factor(0, turned=True).of_calls(columns, left=True).shape == (3, 6)
    assert Factor(0, turned=False).of_calls(columns, left=False).shape == (6, 3)


def test_a_bias_s_gradient_is_a_sum_of_a_factor_s_rows() -> None:
    """As torch writes that of a linear layer, and of a cell's two biases; a sum of something else
    is none."""

    def backward(g: Tensor, x: Tensor) -> list[Tensor]:
        g = g.tanh()
        bias = g.sum(0)
        return [g.t() @ x, g.sum(0, keepdim=True).view(40), bias, bias, x.sum(0), g.t() @ x.cos()]

    given = [(torch.randn(n, 40), torch.randn(n, 30)) for n in (3, 4)]
    expected = [backward(*one) for one in given]
    module = graph_of(backward, *given[0])
    sums = WeightSums(range(6), [tuple(one.shape) for one in expected[0]], ())
    sums.in_any_order(module)
    kinds = {one.weight: type(one) for one in sums.gathered}
    assert kinds == {0: Product, 5: Product, 1: RowSum, 2: RowSum, 3: RowSum, 4: RowSum}
    assert not module.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    handed = [list(module(*one)) for one in given]
    assert len({id(t) for t in handed[0]}) == len(sums._places) == 3, "one factor of both products"
    for one, right in zip(handed, expected, strict=True):
        torch.testing.assert_close(sums.of_one_call(one), right)
    columns = columns_of(tuple(sums._places), handed)
    for one in sums.gathered:
        total = sum(right[one.weight] for right in expected)
        found = one.of_calls(columns, None)
        torch.testing.assert_close(one.result(found), total)
        torch.testing.assert_close(one.result(one.of_calls(columns, found)), 2 * total)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sum_over_very_many_rows_is_left_half_done(flat: bool, dtype: torch.dtype) -> None:
    def backward(x: Tensor, y: Tensor) -> list[Tensor]:
        if not flat:
            return [(x * y).sum((0, 1)), y.sum((0, 1), keepdim=True).view(6), x.sum((1, 2))]
        rows = x.view(-1, 6) * y.view(-1, 6)
        return [rows.sum(0), y.view(-1, 6).cos().sum(0, keepdim=True), x.sum((1, 2))]

    given = [tuple(torch.randn(40, 50, 6, dtype=dtype) for _ in range(2)) for _ in range(3)]
    expected = [backward(*one) for one in given]
    module = graph_of(backward, *given[0])
    sums = WeightSums(range(3), [tuple(one.shape) for one in expected[0]], ())
    sums.in_any_order(module)
    assert {one.weight: one.rows for one in sums.gathered} == {0: 50, 1: 50, 2: None}  # type: ignore[attr-defined]
    handed = [list(module(*one)) for one in given]
    assert [tuple(one.shape) for one in handed[0]] == [(50, 6), (50, 6), (40,)]
    for one, right in zip(handed, expected, strict=True):
        torch.testing.assert_close(sums.of_one_call(one), right)
    columns = columns_of(range(3), handed)
    for one in sums.gathered:
        total = sum(right[one.weight] for right in expected)
        found = one.of_calls(columns, None)
        assert found.shape == total.shape
        torch.testing.assert_close(found, total)
        torch.testing.assert_close(one.of_calls(columns, found), 2 * total)


def test_sums_that_are_made_as_they_are() -> None:
    """Of few rows, of narrow numbers, of columns, read by others as well, or too large in half."""

    def backward(few: Tensor, narrow: Tensor, x: Tensor, wide: Tensor) -> list[Tensor]:
        read = x.sum((0, 1))
        return [
            few.sum((0, 1)),
            narrow.sum((0, 1)),
            x.sum((0, 2)),
            read,
            read * 2,
            wide.sum((0, 1)),
        ]

    x = torch.randn(40, 50, 6)
    given = x[:20], x.bfloat16(), x, torch.randn(2, 3000, 30)
    module = graph_of(backward, *given)
    before = module(*given)
    changed = Backward(module, ())
    changed.take_small(range(6))
    assert all(isinstance(one, Small) and one.rows is None for one in changed.end())
    same(module(*given), before, bits=True)


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
