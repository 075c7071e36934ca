"""Output layers that are one operator with their losses, in compiled models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.tolerances import assert_matches, tolerance
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

import ecornn
from ecornn.echo import output_losses
from ecornn.echo.backend import EchoBackend
from ecornn.echo.options import Options
from ecornn.errors import NotDifferentiableTwice

pytestmark = pytest.mark.usefixtures("fresh_compiler")

BATCH, STEPS, WIDTH, CLASSES = 5, 7, 8, 50
SAID = "are one operator"


@pytest.fixture(autouse=True)
def _any_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_losses, "DEVICES", ("cpu",))
    monkeypatch.setattr(output_losses, "FEWEST_BYTES", 0)
    monkeypatch.setattr(output_losses, "LEAST_GAIN", 0)


class Model(nn.Module):
    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.hidden, self.output = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.loss = loss

    def forward(self, x_BTH: Tensor, target_BT: Tensor) -> Any:
        return self.loss(self.output(torch.tanh(self.hidden(x_BTH))), target_BT)


def flat(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


def viewed(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.view(-1, scores.size(-1)), target.reshape(-1), reduction="sum")


def widened(scores: Tensor, target: Tensor) -> Tensor:
    smooth = nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=3)
    return smooth(scores.float().contiguous().reshape(-1, CLASSES), target.view(-1))


def exchanged(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.transpose(1, 2), target)


def permuted(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.permute(0, 2, 1), target)


def scaled_afterwards(scores: Tensor, target: Tensor) -> Tensor:
    return 3 * flat(scores, target) + target.float().mean()


SERVED = [flat, viewed, widened, exchanged, permuted, scaled_afterwards]


def returned(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return flat(scores, target), scores


def of_other_scores(scores: Tensor, target: Tensor) -> Tensor:
    return flat(scores * 2, target)


def of_classes(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), target.flatten(), scores.new_ones(CLASSES))


def row_by_row(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), target.flatten(), reduction="none").square().sum()


def of_parts(scores: Tensor, target: Tensor) -> Tensor:
    parts = F.one_hot(target, CLASSES).float()
    return F.cross_entropy(scores.flatten(0, 1), parts.flatten(0, 1))


def other_rows(scores: Tensor, target: Tensor) -> Tensor:
    """Classes are last again, but rows in another order."""
    return F.cross_entropy(scores.transpose(0, 1).flatten(0, 1), target.t().flatten())


def without_the_first(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores[:, 1:].flatten(0, 1), target[:, 1:].flatten())


def written_to(scores: Tensor, target: Tensor) -> Tensor:
    target = target.clone()
    target.add_(1).remainder_(CLASSES)
    return flat(scores, target)


def in_wider_numbers(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.to(torch.float64).flatten(0, 1), target.flatten())


LEFT = [returned, of_other_scores, of_classes, row_by_row, of_parts, other_rows]
LEFT += [without_the_first, written_to, in_wider_numbers]


def drawn(batch: int = BATCH) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(batch, STEPS, WIDTH), torch.randint(CLASSES, (batch, STEPS))


def gradients(model: nn.Module, run: Callable[..., Any], *given: Tensor) -> list[Tensor]:
    model.zero_grad()
    found = run(*given)
    loss = found[0] if isinstance(found, tuple) else found
    loss.backward()
    return [loss.detach(), *(w.grad for w in model.parameters() if w.grad is not None)]


def assert_trains_as(model: nn.Module, run: Callable[..., Any], *given: Tensor) -> None:
    exact = Model(model.loss).double()  # type: ignore[arg-type]
    exact.load_state_dict(model.state_dict())
    for mine, weight in zip(exact.parameters(), model.parameters(), strict=True):
        mine.requires_grad_(weight.requires_grad)
    expected = gradients(exact, exact, given[0].double(), given[1])
    for mine, theirs in zip(gradients(model, run, *given), expected, strict=True):
        assert_matches(mine, theirs, tolerance(torch.float32, order=1))


@pytest.mark.parametrize(
    ("loss", "memory"),
    [*((loss, "auto") for loss in SERVED), *((loss, "min") for loss in (flat, widened))],
)
def test_served(loss: Callable[..., Tensor], memory: str) -> None:
    model = Model(loss)
    run = ecornn.compile(model, memory=memory, codegen="inductor")
    assert_trains_as(model, run, *drawn())
    assert SAID in str(run.explain())


def test_torch_still_tells_weights_from_other_inputs() -> None:
    """The graph is a copy: of one that does not say where its inputs are from, torch would take
    weights for inputs that may be others at every call."""
    model = Model(flat)
    run = ecornn.compile(model, codegen="inductor")
    gradients(model, run, *drawn())
    (told,) = run.explain().graphs
    assert told.output_losses
    assert told.foretold is not None
    assert told.foretold.gradients == sum(w.nbytes for w in model.parameters())


@pytest.mark.parametrize("loss", LEFT)
def test_left_as_they_are(loss: Callable[..., Any]) -> None:
    met: list[str | None] = []

    def looked_at(module: torch.fx.GraphModule, _: Any) -> Any:
        same, said = output_losses.with_output_losses(module)
        assert same is module
        met.extend(said or [None])
        return module.forward

    torch.compile(Model(loss), backend=looked_at)(*drawn())
    assert met
    assert not any(met)


@pytest.mark.parametrize("loss", [other_rows, written_to])
def test_what_is_left_trains_as_ever(loss: Callable[..., Any]) -> None:
    model = Model(loss)
    run = ecornn.compile(model, codegen="inductor")
    assert_trains_as(model, run, *drawn())
    assert SAID not in str(run.explain())


def test_operators_one_by_one_have_eager_s_bits() -> None:
    model = Model(flat)
    run = ecornn.compile(model, codegen="eager")
    given = drawn()
    found, expected = gradients(model, run, *given), gradients(model, model, *given)
    assert all(map(torch.equal, found, expected))
    assert SAID not in str(run.explain())


def test_the_same_bits_read_as_other_numbers_are_left() -> None:
    graph = torch.fx.Graph()
    scores = graph.call_method("view", (graph.placeholder("scores"), torch.bfloat16))
    for node, dtype in zip(graph.nodes, (torch.float16, torch.bfloat16), strict=True):
        node.meta["example_value"] = torch.empty(BATCH, CLASSES, dtype=dtype)
    assert not output_losses._keeps_rows(scores)
    scores.args = (*scores.args[:1], BATCH, CLASSES)
    scores.meta["example_value"] = torch.empty(BATCH, CLASSES, dtype=torch.float16)
    assert output_losses._keeps_rows(scores)


class Overwritten(nn.Module):
    """What the layer was given is written to before the loss: eager has the scores by then."""

    def __init__(self, write: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.write, self.bias = write, nn.Parameter(torch.randn(CLASSES))
        self.weight = nn.Parameter(torch.randn(CLASSES, WIDTH), requires_grad=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        hidden = torch.tanh(x)
        scores = F.linear(hidden, self.weight, self.bias)
        with torch.no_grad():
            self.write(hidden)
        return flat(scores, target)


@pytest.mark.parametrize(
    "write",
    [
        lambda h: h.mul_(2),
        lambda h: F.relu(h, inplace=True),
        lambda h: torch.neg(h, out=h),
        lambda h: h.__imul__(3),
        lambda h: torch.ops.aten.add_.Tensor(h, h),
        lambda h: h.view(-1).zero_(),
    ],
)
def test_what_is_written_to_in_between_is_left(write: Callable[[Tensor], Any]) -> None:
    torch.manual_seed(3)
    model = Overwritten(write)
    run = ecornn.compile(model, codegen="inductor")
    given = drawn()
    found, expected = gradients(model, run, *given), gradients(model, model, *given)
    torch.testing.assert_close(found, expected)
    assert SAID not in str(run.explain())


@pytest.mark.parametrize("shape", [(1, CLASSES), (BATCH, STEPS, CLASSES), (1,)])
def test_biases_of_other_shapes_are_left(shape: tuple[int, ...]) -> None:
    bias = torch.randn(shape, requires_grad=True)
    weight = torch.randn(CLASSES, WIDTH, requires_grad=True)

    def loss(x: Tensor, target: Tensor) -> Tensor:
        return flat(F.linear(x, weight, bias), target)

    compiled = torch.compile(loss, backend=EchoBackend(Options(codegen="inductor")))
    given = drawn()
    found, expected = (torch.autograd.grad(f(*given), (weight, bias)) for f in (compiled, loss))
    torch.testing.assert_close(found, expected)


def test_transforms_are_left() -> None:
    weight = torch.randn(CLASSES, WIDTH)
    given = drawn()

    def gradient(weight: Tensor) -> Tensor:
        found: Tensor = torch.func.grad(lambda w: flat(F.linear(given[0], w), given[1]))(weight)
        return found

    compiled = torch.compile(gradient, backend=EchoBackend(Options(codegen="inductor")))
    torch.testing.assert_close(compiled(weight), gradient(weight))


def test_few_scores_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_losses, "FEWEST_BYTES", 4 * BATCH * STEPS * CLASSES + 1)
    run = ecornn.compile(Model(flat), codegen="inductor")
    run(*drawn()).backward()
    assert SAID not in str(run.explain())


def test_scores_that_are_hardly_more_than_what_it_takes_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(output_losses, "LEAST_GAIN", 2)  # all of these rows are a chunk
    run = ecornn.compile(Model(flat), codegen="inductor")
    run(*drawn()).backward()
    assert SAID not in str(run.explain())


@pytest.mark.parametrize(
    ("classes", "are_many"), [(30_001, False), (98_001, False), (110_001, True)]
)
def test_how_many_scores_are_many_on_cuda(
    monkeypatch: pytest.MonkeyPatch, classes: int, are_many: bool
) -> None:
    """Those of a chunk, of three chunks and of four; filled up weights count as well."""
    monkeypatch.setattr(output_losses, "DEVICES", ("cuda",))
    monkeypatch.setattr(output_losses, "FEWEST_BYTES", 64 * 2**20)
    monkeypatch.setattr(output_losses, "LEAST_GAIN", 2)
    graph = torch.fx.Graph()
    hidden, weight, target = map(graph.placeholder, ("hidden", "weight", "target"))
    layer = graph.call_function(F.linear, (hidden, weight))
    loss = graph.call_function(F.cross_entropy, (layer, target))
    sizes = (1536, 256), (classes, 256), (1536,), (1536, classes), ()
    with FakeTensorMode():
        for node, size in zip(graph.nodes, sizes, strict=True):
            node.meta["example_value"] = torch.empty(size, device="cuda", requires_grad=True)
    output = output_losses.Output(loss, layer, (), target, {})
    assert output_losses._is_large(output) == are_many


def test_scores_on_other_devices_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_losses, "DEVICES", ("cuda",))
    run = ecornn.compile(Model(flat), codegen="inductor")
    run(*drawn()).backward()
    assert SAID not in str(run.explain())


def test_a_loss_that_is_only_looked_at() -> None:
    model = Model(flat)
    run = ecornn.compile(model, codegen="inductor")
    given = drawn()
    with torch.no_grad():
        assert_matches(run(*given), model(*given), tolerance(torch.float32))
    assert SAID not in str(run.explain())


def test_any_batch() -> None:
    model = Model(flat)
    run = ecornn.compile(model, codegen="inductor", dynamic=True)
    for batch in (BATCH, BATCH + 3, 2 * BATCH):
        assert_trains_as(model, run, *drawn(batch))
    assert SAID in str(run.explain())


def test_frozen_weights_have_no_gradients() -> None:
    model = Model(flat)
    model.output.requires_grad_(False)
    run = ecornn.compile(model, codegen="inductor")
    assert_trains_as(model, run, *drawn())
    assert model.output.weight.grad is None
    assert SAID in str(run.explain())


def test_weights_that_are_frozen_when_compiled_and_trained_later() -> None:
    model = Model(flat)
    model.output.requires_grad_(False)
    run = ecornn.compile(model, codegen="inductor")
    given = drawn()
    run(*given).backward()
    model.output.requires_grad_(True)
    assert_trains_as(model, run, *given)


@pytest.mark.parametrize("inside", [True, False], ids=["of the layer alone", "of all"])
def test_autocast(inside: bool) -> None:
    """In 16 bits as eager is, and as near to what is exact."""

    class Cast(Model):
        def forward(self, x_BTH: Tensor, target_BT: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                scores = self.output(torch.tanh(self.hidden(x_BTH)))
                if not inside:
                    return self.loss(scores, target_BT)
            return self.loss(scores, target_BT)

    model, given = Cast(flat), drawn()
    run = ecornn.compile(model, codegen="inductor")
    found, eager = gradients(model, run, *given), gradients(model, model, *given)
    assert [one.dtype for one in found] == [one.dtype for one in eager]
    exact = Model(flat).double()
    exact.load_state_dict(model.state_dict())
    expected = gradients(exact, exact, given[0].double(), given[1])
    for mine, theirs in zip(found, expected, strict=True):
        assert_matches(mine, theirs, tolerance(torch.bfloat16, order=1))
    assert SAID in str(run.explain())


def test_tied_weights_and_accumulated_gradients() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(CLASSES, WIDTH)
            self.output = nn.Linear(WIDTH, CLASSES, bias=False)
            self.output.weight = self.embedding.weight

        def forward(self, words: Tensor) -> Tensor:
            return flat(self.output(torch.tanh(self.embedding(words[:, :-1]))), words[:, 1:])

    torch.manual_seed(2)
    model = Tied()
    run = ecornn.compile(model, codegen="inductor")
    words = [torch.randint(CLASSES, (BATCH, STEPS)) for _ in range(2)]
    for one in words:
        run(one).backward()
    assert SAID in str(run.explain())
    assert model.embedding.weight.grad is not None
    found = model.embedding.weight.grad.clone()
    model.double().zero_grad()
    for one in words:
        model(one).backward()
    assert_matches(found, model.embedding.weight.grad, tolerance(torch.float32, order=1))


def test_its_scratch_is_foretold() -> None:
    """The peak of a model of many classes is that of its weights' gradients and some scores."""
    rows, classes = 1024, 4096
    model = nn.Linear(WIDTH, classes)

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.output = model

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(self.output(x), target)

    run = ecornn.compile(Wide(), codegen="inductor")
    run(torch.randn(rows, WIDTH), torch.randint(classes, (rows,))).backward()
    predicted = run.explain().predicted_peak_bytes(0)
    assert predicted is not None
    scores = 4 * rows * classes  # all of them fit into a chunk here
    assert scores < predicted < 1.2 * scores


def as_a_view(scores: Tensor, target: Tensor) -> Tensor:
    return flat(scores, target).view(1)


@pytest.mark.parametrize("loss", [flat, scaled_afterwards, as_a_view])
def test_second_derivatives_raise(loss: Callable[..., Tensor]) -> None:
    """By whatever they are taken, also where a part of them is known; first ones are as before."""
    model, (x, target) = Model(loss), drawn()
    x.requires_grad_()
    run = ecornn.compile(model, codegen="inductor")
    sources = [x, *model.parameters()]
    expected = torch.autograd.grad(run(x, target), sources, retain_graph=True)
    first = torch.autograd.grad(run(x, target), sources, create_graph=True)
    assert SAID in str(run.explain())
    assert all(map(torch.equal, first, expected))
    for one in first:
        for source in sources:
            penalty = one.square().sum() + source.square().sum()
            with pytest.raises(NotDifferentiableTwice, match="as it is written, not compiled"):
                torch.autograd.grad(penalty, source, retain_graph=True)
        with pytest.raises(NotDifferentiableTwice):
            one.sum().backward(retain_graph=True)


class Alone(nn.Module):
    """Nothing that has a gradient of its own need be kept for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return flat(self.output(x), target)


def test_second_derivatives_raise_of_a_layer_alone() -> None:
    model, given = Alone(), drawn()
    run = ecornn.compile(model, codegen="inductor")
    weight = model.output.weight
    (first,) = torch.autograd.grad(run(*given), weight, create_graph=True)
    assert SAID in str(run.explain())
    with pytest.raises(NotDifferentiableTwice):
        torch.autograd.grad((first * weight).sum(), weight)
    (first,) = torch.autograd.grad(run(*given), weight, create_graph=True)
    with pytest.raises(NotDifferentiableTwice):
        (weight.sum() + first.sum()).backward()


def test_second_derivatives_of_what_is_beside_the_loss() -> None:
    class Beside(Model):
        def forward(self, x_BTH: Tensor, target_BT: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x_BTH, target_BT), x_BTH.view(-1)

    class Cube(torch.autograd.Function):
        """Written in Python, as torch's function for compiled code is."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, d_y: Any) -> Any:
            (x,) = ctx.saved_tensors
            return 3 * x**2 * d_y

    run = ecornn.compile(Beside(flat), codegen="inductor")
    (start, target) = drawn()
    start.requires_grad_()
    beside = run(Cube.apply(start), target)[1]
    assert SAID in str(run.explain())
    (first,) = torch.autograd.grad(beside.sum(), start, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), start)
    torch.testing.assert_close(second, 6 * start.detach())


def test_inputs_are_not_held_for_second_derivatives() -> None:
    run = ecornn.compile(Alone(), codegen="inductor")
    start, target = drawn()
    start.requires_grad_()

    def called() -> tuple[Tensor, StorageWeakRef]:
        x = start * 1
        return run(x, target), StorageWeakRef(x.untyped_storage())

    loss, of_input = called()
    assert SAID in str(run.explain())
    assert of_input.expired()
    loss.backward()
    assert start.grad is not None
