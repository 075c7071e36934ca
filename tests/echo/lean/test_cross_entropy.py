"""The same bits as torch's cross entropy, held in fewer bytes, and nothing overwritten that could
still be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ecornn.echo.lean import alone, cross_entropy
from ecornn.echo.lean.mode import LeanFunctions, Replaced
from ecornn.kernels.losses import RowSums
from support.alive import Alive

ROWS, CLASSES = 211, 37


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "FEWEST_BYTES", 0)
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 3 * 16 * CLASSES * 4)


class Lean:
    """Calls a function as `ecornn.compile` calls a model."""

    def __init__(self) -> None:
        self.replaced = Replaced()

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        functions = LeanFunctions(self.replaced)
        try:
            with functions:
                return function(*args, **kwargs)
        finally:
            functions.end_of_call()


def same(found: Tensor, expected: Tensor) -> bool:
    """NaN included."""
    forms = {(one.dtype, one.shape, one.stride()) for one in (found, expected)}
    return len(forms) == 1 and torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


def problem(dtype: torch.dtype = torch.float32, ignored: int = -100) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    scores = (torch.randn(ROWS, CLASSES, generator=generator) * 4).to(dtype).requires_grad_()
    target = torch.randint(CLASSES, (ROWS,), generator=generator)
    target[::5] = ignored
    return scores, target


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "as made": lambda x: x * 1,
    "transposed": lambda x: x.t().contiguous().t(),
    "every second column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "some rows of more": lambda x: torch.cat([x, x])[3 : 3 + ROWS],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_every_bit_is_torch_s(dtype: torch.dtype, reduction: str, layout: str) -> None:
    for ignored, everything in ((-100, False), (0, False), (3, False), (3, True)):
        leaf, target = problem(dtype, ignored)
        if everything:
            target[:] = ignored

        def losses(x: Tensor, target: Tensor = target, ignored: int = ignored) -> Tensor:
            return F.cross_entropy(
                LAYOUTS[layout](x), target, ignore_index=ignored, reduction=reduction
            )

        lean = Lean()
        expected, found = losses(leaf), lean(losses, leaf)
        assert lean.replaced.calls == 1
        assert same(found, expected)
        assert bool(expected.isnan().any()) == (everything and reduction == "mean")
        with_respect_to = torch.randn_like(expected)
        (gradient,) = torch.autograd.grad(expected, leaf, with_respect_to)
        assert same(torch.autograd.grad(found, leaf, with_respect_to)[0], gradient)


def test_the_module_and_all_ways_to_write_the_arguments() -> None:
    leaf, target = problem()
    expected = F.cross_entropy(leaf * 1, target, reduction="sum")
    ways: tuple[Callable[[], Tensor], ...] = (
        lambda: torch.nn.CrossEntropyLoss(reduction="sum")(leaf * 1, target),
        lambda: F.cross_entropy(input=leaf * 1, target=target, reduction="sum"),
        lambda: F.cross_entropy(leaf * 1, target, None, None, -100, None, "sum", 0.0),
    )
    for way in ways:
        lean = Lean()
        assert same(lean(way), expected)
        assert lean.replaced.calls == 1
    with pytest.raises(TypeError, match="cross_entropy"):
        Lean()(lambda: F.cross_entropy(leaf, target, words="many"))
    with pytest.raises(IndexError, match="out of bounds"):
        Lean()(lambda: F.cross_entropy(leaf * 1, target + CLASSES))


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y: F.cross_entropy(x, y, torch.rand(CLASSES)),
        lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
        lambda x, y: F.cross_entropy(x, x.softmax(-1)),
        lambda x, y: F.cross_entropy(x.t()[None], y[None, :CLASSES].repeat(1, 6)[:, :ROWS]),
        lambda x, y: F.cross_entropy(x[0], y[1]),
        lambda x, y: F.cross_entropy(x, y, size_average=False),
        lambda x, y: F.cross_entropy(x.detach(), y) + x.sum(),
        lambda x, y: F.cross_entropy(x.to_sparse().to_dense(), y.byte(), ignore_index=-1),
    ],
)
@pytest.mark.filterwarnings("ignore:size_average")
def test_other_calls_are_torch_s_own(call: Callable[..., Tensor]) -> None:
    leaf, target = problem(ignored=1)
    lean = Lean()

    def run() -> Tensor:
        torch.manual_seed(0)
        try:
            return call(leaf * 1, target)
        except (RuntimeError, ValueError) as error:
            return torch.tensor(len(str(error)))

    assert same(lean(run), run())
    assert lean.replaced.calls == 0


def test_few_scores_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    leaf, target = problem()
    monkeypatch.setattr(cross_entropy, "FEWEST_BYTES", leaf.nbytes + 1)
    lean = Lean()
    lean(lambda: F.cross_entropy(leaf * 1, target))
    assert lean.replaced.calls == 0


def test_differentiated_again_forwards_and_by_transforms() -> None:
    leaf, target = problem(torch.float64)

    def curvature(run: Callable[..., Tensor]) -> Tensor:
        loss = run(lambda: F.cross_entropy(leaf * leaf, target))
        (slope,) = torch.autograd.grad(loss, leaf, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), leaf)[0]

    lean = Lean()
    assert same(curvature(lean), curvature(lambda call: call()))
    assert lean.replaced.calls == 1

    lean = Lean()
    direction = torch.randn_like(leaf)

    def loss_of(x: Tensor) -> Tensor:
        return F.cross_entropy(x * x, target)

    _, expected = torch.func.jvp(loss_of, (leaf,), (direction,))
    assert same(lean(torch.func.jvp, loss_of, (leaf,), (direction,))[1], expected)
    assert same(lean(torch.func.grad(loss_of), leaf), torch.func.grad(loss_of)(leaf))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(leaf, direction)
        found = torch.autograd.forward_ad.unpack_dual(lean(loss_of, dual)).tangent
    assert same(found, expected)
    assert lean.replaced.calls == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(dtype: torch.dtype) -> None:
    leaf, target = problem(dtype)
    lean = Lean()

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(leaf * 1, target)

    found, expected = lean(loss), loss()
    assert same(found, expected)
    assert same(*(torch.autograd.grad(one, leaf)[0] for one in (found, expected)))
    assert lean.replaced.calls == (dtype is torch.float32)


def test_backward_twice_and_gradients_that_add_up() -> None:
    leaf, target = problem()
    expected = torch.autograd.grad(F.cross_entropy(leaf * 2, target), leaf)[0]
    found = Lean()(lambda: F.cross_entropy(leaf * 2, target))
    for times in (1, 2, 3):
        found.backward(retain_graph=times < 3)
        assert same(leaf.grad, expected * times)
    with pytest.raises(RuntimeError, match="second time"):
        found.backward()


class NoReads(TorchDispatchMode):
    """Nothing waits for the device, so that the call can be captured in a CUDA graph."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
            torch.ops.aten.masked_select.default,
        )
        return func(*args, **(kwargs or {}))


def test_no_number_is_read_on_the_way() -> None:
    leaf, target = problem()
    with NoReads():
        Lean()(lambda: F.cross_entropy(leaf * 1, target)).backward()


def scored(keep: bool) -> tuple[Tensor, ...]:
    _, target = problem()
    hidden = torch.ones(1, ROWS, 1, requires_grad=True)
    scores = hidden @ torch.linspace(-1, 1, CLASSES, requires_grad=True)[None]
    loss = F.cross_entropy(scores.flatten(0, 1), target)
    return (loss, scores) if keep else (loss,)


def backward_peak(run: Callable[..., Any], keep: bool) -> float:
    """In units of the scores."""
    with Alive() as alive:
        result = run(scored, keep)
        before = len(alive.bytes_at)
        result[0].backward()
    return max(alive.bytes_at[before:]) / (4 * ROWS * CLASSES)


def test_what_it_holds() -> None:
    chunk = 3 * 16 / ROWS  # the gradient of the log-softmax, which itself is in the scores' place
    small = 0.2  # the targets, and the losses of the rows
    for keep, torch_s, ours in ((True, 4, 2 + chunk), (False, 3, 1 + chunk)):
        assert torch_s <= backward_peak(lambda f, *args: f(*args), keep) < torch_s + small
        assert ours <= backward_peak(Lean(), keep) < ours + small


HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "the scores": lambda scores: scores,
    "a view": lambda scores: scores[3],
    "their base": lambda scores: scores._base,
    "without gradient": lambda scores: scores.detach(),
    "an array": lambda scores: scores.detach().numpy(),
    "the storage": lambda scores: scores.untyped_storage(),
    "a list of lists": lambda scores: [[scores]],
}


def numbers(held: Any) -> list[float]:
    if isinstance(held, list):
        held = held[0][0]
    if isinstance(held, torch.UntypedStorage):
        held = torch.tensor([], dtype=torch.float32).set_(held)
    return torch.as_tensor(held).detach().flatten().tolist()


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("returned", [True, False])
def test_what_somebody_holds_is_not_overwritten(holder: str, returned: bool) -> None:
    leaf, target = problem()
    kept: list[Any] = []

    def model() -> tuple[Tensor, Any]:
        scores = (leaf.view(1, ROWS, CLASSES) * 2).flatten(0, 1)
        held = HOLDERS[holder](scores)
        kept.extend([] if returned else [held])
        return F.cross_entropy(scores, target), held if returned else None

    lean = Lean()
    loss, held = lean(model)
    held = held if returned else kept[0]
    before = numbers(held)
    loss.backward()
    assert numbers(held) == before
    assert lean.replaced.private == 0


def test_what_is_got_hold_of_later_is_not_overwritten() -> None:
    lean = Lean()
    (loss,) = lean(scored, keep=False)
    assert lean.replaced.private == 1
    kept = loss.grad_fn.saved_tensors[0]
    before = kept.clone()
    loss.backward()
    assert torch.equal(kept, before)


@pytest.mark.parametrize("first", [False, True])
def test_while_the_compiler_looks_at_frames_and_while_it_does_not(first: bool) -> None:
    """Calls hold one reference more then. What was counted in one state must not be taken for the
    other: a holder would be overlooked, or memory not be saved."""
    alone._SOLE_OWNERS.clear()
    states = set()
    for watched in (first, not first):
        before = set_eval_frame(False if watched else None)
        states.add(alone._held_by_a_call())
        try:
            for keep, private in ((False, 1), (True, 0)):
                lean = Lean()
                loss, *scores = lean(scored, keep=keep)
                copies = [one.detach().clone() for one in scores]
                loss.backward()
                assert lean.replaced.private == private
                assert all(torch.equal(*pair) for pair in zip(scores, copies, strict=True))
        finally:
            set_eval_frame(before)
    # two, unless another thread of this process has frames looked at as well
    assert {state for _, state in alone._SOLE_OWNERS} == states


def test_what_another_operator_kept_is_not_overwritten() -> None:
    leaf, target = problem()

    def once() -> Tensor:
        return F.cross_entropy(leaf.tanh(), target)  # tanh's gradient is made of its result

    def twice() -> Tensor:
        scores = leaf * 2
        return F.cross_entropy(scores, target) + F.cross_entropy(scores, target, reduction="sum")

    for model in (once, twice):
        (expected,) = torch.autograd.grad(model(), leaf)
        assert same(torch.autograd.grad(Lean()(model), leaf)[0], expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_and_hooks_keep_what_they_know(reentrant: bool) -> None:
    """A checkpoint runs the loss again after the model's call: what it kept must be the same."""
    leaf, target = problem()
    lean = Lean()

    def loss() -> Tensor:
        return F.cross_entropy(leaf * 2, target)

    def by_checkpoint() -> Tensor:
        return checkpoint(lambda x: F.cross_entropy(x * 2, target), leaf, use_reentrant=reentrant)

    def by_hooks() -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (x,), lambda kept: kept[0]):
            return loss()

    (expected,) = torch.autograd.grad(loss(), leaf)
    for model in (by_checkpoint, by_hooks):
        leaf.grad = None
        lean(model).backward()
        assert same(leaf.grad, expected)
    assert lean.replaced.calls == 0


def test_scores_that_another_stream_may_read_are_not_overwritten() -> None:
    leaf, target = problem()

    def model() -> Tensor:
        scores = leaf * 2
        with pytest.raises((RuntimeError, NotImplementedError, TypeError)):
            scores.record_stream(torch.Stream(device="cpu"))  # there is none on a CPU
        return F.cross_entropy(scores, target)

    lean = Lean()
    lean(model).backward()
    assert (lean.replaced.calls, lean.replaced.private) == (1, 0)


@pytest.mark.parametrize(
    ("rows", "classes", "chunks"),
    [(5600, 33278, 16), (600, 33278, 10), (40, 33278, 1), (5, 10**8, 1), (64, 10**8, 4)],
)
def test_chunks_are_neither_small_nor_many(
    rows: int, classes: int, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 8 * 2**20)
    scores = torch.empty(rows, classes, device="meta")
    at_once = cross_entropy.rows_at_once(scores)
    assert at_once % cross_entropy.ROWS_ALIGNED == 0
    assert -(-rows // at_once) == chunks <= cross_entropy.MOST_CHUNKS


class InOnePass:
    """Stands for the kernel on a GPU; counts its launches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches = 0
        monkeypatch.setattr(cross_entropy, "cross_entropy_launcher", lambda _: self)
        monkeypatch.setattr(cross_entropy, "cross_entropy_gradient", self.gradient)

    def gradient(
        self, launcher: Any, scores: Tensor, target: Tensor, rows: RowSums, out: Tensor
    ) -> None:
        assert launcher is self
        self.launches += 1
        largest, log_sum, slope = (values.unsqueeze(1) for values in rows)
        arrived = torch.zeros_like(scores).scatter_(1, target.clamp(min=0).unsqueeze(1), slope)
        out.copy_(arrived - (scores - largest - log_sum).exp() * slope)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [-100, 3])
def test_in_one_pass_where_there_is_a_kernel(
    reduction: str, ignored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, lean = InOnePass(monkeypatch), Lean()
    leaf, target = problem(ignored=ignored)
    asked = {"reduction": reduction, "ignore_index": ignored}
    expected = F.cross_entropy(leaf * 1, target, **asked)
    found = lean(lambda: F.cross_entropy(leaf * 1, target, **asked))
    assert same(found.detach(), expected.detach())
    slope = torch.randn_like(expected)
    one, other = (torch.autograd.grad(loss, leaf, slope)[0] for loss in (found, expected))
    torch.testing.assert_close(one, other, rtol=2e-6, atol=1e-8)
    assert (kernel.launches, lean.replaced.private) == (1, 1)


def test_in_one_pass_nothing_is_overwritten_that_somebody_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel, lean = InOnePass(monkeypatch), Lean()
    leaf, target = problem()
    scores = leaf * 1
    before = scores.detach().clone()
    lean(F.cross_entropy, scores, target).backward()
    assert same(scores.detach(), before)
    assert kernel.launches == 1


def test_a_second_derivative_is_by_torch_s_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, lean = InOnePass(monkeypatch), Lean()
    leaf, target = problem()
    both = []
    for run in (lean, lambda f, *args: f(*args)):
        (slope,) = torch.autograd.grad(
            run(lambda: F.cross_entropy(leaf * 1, target)), leaf, create_graph=True
        )
        both.append(torch.autograd.grad(slope.square().sum(), leaf)[0])
    assert same(*both)
    assert kernel.launches == 0
