"""The layers on CUDA: against torch.nn on the same device, and against float64 on the CPU."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import ecornn
from support.tolerances import assert_matches, tolerance

pytestmark = pytest.mark.gpu

CELLS = ("LSTM", "GRU", "RNN")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SHAPES: tuple[dict[str, Any], ...] = (
    {},
    {"num_layers": 2, "bidirectional": True},
    {"bias": False, "batch_first": True},
)


@pytest.fixture(autouse=True)
def _ieee_products() -> Any:
    """Without TF32, so that float32 can be held to float32's bounds."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    # filling every empty tensor and refusing atomics are for the CPU tests; cuDNN has neither
    torch.use_deterministic_algorithms(False)
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def leaves(result: Any) -> list[Tensor]:
    output, state, *rest = result
    return [output, *(state if isinstance(state, tuple) else (state,)), *rest]


def run(layer: nn.Module, x: Tensor, **kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """(outputs and states, gradients of the input and of every parameter)"""
    x = x.detach().clone().requires_grad_()
    found = leaves(layer(x, **kwargs))
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in found]
    loss = sum((t.double() * w.to(t.device)).sum() for t, w in zip(found, weights, strict=True))
    assert isinstance(loss, Tensor)
    grads = torch.autograd.grad(loss, [x, *layer.parameters()])
    return found, list(grads)


def in_float64(layer: nn.Module) -> nn.Module:
    return copy.deepcopy(layer).cpu().double()


def assert_like_float64(layer: nn.Module, x: Tensor, steps: int, **kwargs: Any) -> None:
    on_cpu = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in kwargs.items()}
    found, grads = run(layer, x, **kwargs)
    reference, reference_grads = run(in_float64(layer), x.double().cpu(), **on_cpu)
    bound = tolerance(x.dtype, steps, cudnn=True)
    for out, ref in zip(found, reference, strict=True):
        assert_matches(out, ref, bound, "output or state")
    bound = tolerance(x.dtype, steps, cudnn=True, order=1)
    for grad, ref in zip(grads, reference_grads, strict=True):
        assert_matches(grad, ref, bound, "gradient")


@pytest.mark.parametrize("options", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_equals_torch_nn_without_a_warning(
    cell: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    ours = getattr(ecornn, cell)(12, 20, **options, device="cuda", dtype=dtype)
    theirs = getattr(nn, cell)(12, 20, **options, device="cuda", dtype=dtype)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(9, 4, 12, device="cuda", dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, grads = run(ours, x)
    expected, expected_grads = run(theirs, x)
    for a, b in zip(found + grads, expected + expected_grads, strict=True):
        assert_matches(a, b, tolerance(dtype, 9, cudnn=True))


def test_projection_equals_torch_nn_without_a_warning() -> None:
    options = {"proj_size": 7, "num_layers": 2, "bidirectional": True}
    ours = ecornn.LSTM(12, 20, **options, device="cuda")
    theirs = nn.LSTM(12, 20, **options, device="cuda")
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(9, 4, 12, device="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, grads = run(ours, x)
    expected, expected_grads = run(theirs, x)
    for a, b in zip(found + grads, expected + expected_grads, strict=True):
        assert_matches(a, b, tolerance(torch.float32, 9))


@pytest.mark.parametrize("steps", [1, 63])
@pytest.mark.parametrize("hidden", [7, 500])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("backend", ["auto", "aten"])
def test_matches_float64(
    backend: str, cell: str, dtype: torch.dtype, hidden: int, steps: int
) -> None:
    make = getattr(ecornn, cell)
    layer = make(11, hidden, bidirectional=True, device="cuda", dtype=dtype, backend=backend)
    assert_like_float64(layer, torch.randn(steps, 3, 11, device="cuda", dtype=dtype), steps)


@pytest.mark.parametrize("after_end", ["zeros", "frozen"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("backend", ["auto", "aten"])
def test_lengths_match_float64(backend: str, cell: str, dtype: torch.dtype, after_end: str) -> None:
    make = getattr(ecornn, cell)
    layer = make(11, 30, 2, bidirectional=True, device="cuda", dtype=dtype, backend=backend)
    x = torch.randn(40, 5, 11, device="cuda", dtype=dtype)
    lengths = torch.tensor([40, 0, 7, 1, 33], device="cuda")
    own = backend == "auto" and dtype != torch.float64
    assert layer.explain(x, lengths=lengths).backend == ("persistent" if own else "aten")
    assert_like_float64(layer, x, 40, lengths=lengths, after_end=after_end)


@pytest.mark.parametrize("reset_to", ["zero", "initial"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("backend", ["auto", "aten"])
def test_resets_match_float64(backend: str, cell: str, dtype: torch.dtype, reset_to: str) -> None:
    make = getattr(ecornn, cell)
    layer = make(11, 30, 2, bidirectional=True, device="cuda", dtype=dtype, backend=backend)
    x = torch.randn(40, 5, 11, device="cuda", dtype=dtype)
    options = {
        "resets": torch.rand(40, 5, device="cuda") < 0.1,
        "lengths": torch.tensor([40, 0, 7, 1, 33], device="cuda"),
        "reset_to": reset_to,
    }
    own = backend == "auto" and dtype != torch.float64
    assert layer.explain(x, **options).backend == ("persistent" if own else "aten")
    assert_like_float64(layer, x, 40, **options)


@pytest.mark.parametrize("cell", CELLS)
def test_what_lies_beyond_the_end_has_no_influence(cell: str) -> None:
    layer = getattr(ecornn, cell)(11, 30, bidirectional=True, device="cuda")
    x = torch.randn(20, 3, 11, device="cuda")
    lengths = torch.tensor([20, 4, 11], device="cuda")
    spoiled = x.clone()
    spoiled[4:, 1] = float("nan")
    found, grads = run(layer, x, lengths=lengths)
    again, grads_again = run(layer, spoiled, lengths=lengths)
    for a, b in zip(found + grads, again + grads_again, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("cell", CELLS)
def test_packed_equals_torch_nn(cell: str) -> None:
    ours = getattr(ecornn, cell)(11, 30, 2, bidirectional=True, device="cuda")
    theirs = getattr(nn, cell)(11, 30, 2, bidirectional=True, device="cuda")
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(20, 4, 11, device="cuda")
    packed = pack_padded_sequence(x, torch.tensor([3, 20, 1, 9]), enforce_sorted=False)
    a, b = ours(packed), theirs(packed)
    assert_matches(a[0].data, b[0].data, tolerance(torch.float32, 20))
    for ours_state, their_state in zip(leaves(a)[1:], leaves(b)[1:], strict=True):
        assert_matches(ours_state, their_state, tolerance(torch.float32, 20))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_everything_at_once_matches_float64(cell: str, dtype: torch.dtype) -> None:
    layer = getattr(ecornn, cell)(
        11, 30, 2, bidirectional=True, layer_norm=True, zoneout=0.2, device="cuda", dtype=dtype
    ).eval()
    x = torch.randn(20, 5, 11, device="cuda", dtype=dtype)
    lengths = torch.tensor([20, 0, 7, 1, 13], device="cuda")
    resets = torch.rand(20, 5, device="cuda") < 0.2
    options = {"lengths": lengths, "resets": resets, "reset_to": "initial"}
    # layer norm divides by a deviation that may be small: allow ten times the plain bound
    assert_like_float64(layer, x, 20 * 100, **options)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("backend", ["auto", "aten"])
def test_more_steps_than_cudnn_takes(backend: str, cell: str) -> None:
    layer = getattr(ecornn, cell)(3, 8, bidirectional=True, device="cuda", backend=backend)
    x = torch.randn(70_000, 2, 3, device="cuda")
    assert layer.explain(x).backend == ("persistent" if backend == "auto" else "aten")
    assert_like_float64(layer, x, 70_000)


@pytest.mark.parametrize("backend", ["auto", "aten"])
@pytest.mark.parametrize("cell", CELLS)
def test_differentiates_twice(cell: str, backend: str) -> None:
    kinds = {"bidirectional": True, "bias": False} if backend == "aten" else {}
    layer = getattr(ecornn, cell)(5, 6, 2, device="cuda", backend=backend, **kinds)
    reference = in_float64(layer)

    def penalty(module: nn.Module, x: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        grads = torch.autograd.grad(
            module(x)[0].sin().sum(), [x, *module.parameters()], create_graph=True
        )
        return list(
            torch.autograd.grad(sum(g.square().sum() for g in grads), [x, *module.parameters()])
        )

    x = torch.randn(7, 3, 5, device="cuda")
    for a, b in zip(penalty(layer, x), penalty(reference, x.double().cpu()), strict=True):
        assert_matches(a, b, tolerance(torch.float32, 7, cudnn=True, order=2))


@pytest.mark.parametrize("frozen", ["bias_ih_l0", "weight_hh_l0"])
@pytest.mark.parametrize("cell", CELLS)
def test_differentiates_twice_with_a_frozen_weight(cell: str, frozen: str) -> None:
    """cuDNN gives all weights gradients where one of them wants one."""
    layer = getattr(ecornn, cell)(5, 6, device="cuda", backend="aten")
    getattr(layer, frozen).requires_grad_(False)
    found = []
    for module, device in ((layer, "cuda"), (in_float64(layer), "cpu")):
        x = torch.linspace(-1, 1, 105, dtype=torch.float64).view(7, 3, 5)
        x = x.to(device, next(module.parameters()).dtype).requires_grad_()
        free = [p for p in module.parameters() if p.requires_grad]
        grads = torch.autograd.grad(module(x)[0].sin().sum(), [x, *free], create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in grads), [x, *free]))
    for a, b in zip(*found, strict=True):
        assert_matches(a, b, tolerance(torch.float32, 7, cudnn=True, order=2))


@pytest.mark.parametrize("cell", CELLS)
def test_a_call_of_cudnn_has_no_function_around_it(cell: str) -> None:
    layer = getattr(ecornn, cell)(5, 6, 2, bidirectional=True, device="cuda", backend="aten")
    output = layer(torch.randn(7, 3, 5, device="cuda"))[0]
    assert output.grad_fn is not None
    assert output.grad_fn.name() == "CudnnRnnBackward0"


def test_states_of_zeros_stay_zeros() -> None:
    """All calls share them; writing to what a layer returns must not reach them."""
    layer = ecornn.LSTM(8, 8, device="cuda")
    x = torch.randn(9, 2, 8, device="cuda")
    with torch.inference_mode():  # the first call must not make them unfit for gradients
        before = layer(x)[0].clone()
    for backend in ("auto", "aten", "persistent", "reference"):
        layer.backend = backend
        output, (h, c) = layer(x)
        output.square().sum().backward()
        for result in (output, h, c):
            result.detach().fill_(7.0)
    layer.backend = "auto"
    with torch.inference_mode():
        assert torch.equal(layer(x)[0], before)


def test_second_derivative_through_drawn_masks_is_refused() -> None:
    layer = ecornn.LSTM(5, 6, 2, dropout=0.5, device="cuda")
    out = layer(torch.randn(7, 3, 5, device="cuda"))[0]
    with pytest.raises(ecornn.NotDifferentiableTwice, match="backend='reference'"):
        torch.autograd.grad(out.sum(), list(layer.parameters()), create_graph=True)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("cell", CELLS)
def test_compiles_to_one_graph(cell: str, backend: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Linear(6, 5)
            self.layer = getattr(ecornn, cell)(5, 8, 2, bidirectional=True)
            self.after = nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.after(self.layer(self.before(x))[0])
            return out

    model = Model().cuda()
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend=backend)
    x = torch.randn(9, 4, 6, device="cuda")
    compiled(x).sin().sum().backward()
    model(x).sin().sum().backward()
    for a, b in zip(compiled.parameters(), model.parameters(), strict=True):
        assert_matches(a.grad, b.grad, tolerance(torch.float32, 9))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    ours = ecornn.LSTM(12, 20, device="cuda")
    theirs = nn.LSTM(12, 20, device="cuda")
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(9, 4, 12, device="cuda")
    with torch.autocast("cuda", dtype=dtype):
        a, b = leaves(ours(x)), leaves(theirs(x))
        with_resets = leaves(ours(x, resets=torch.zeros(9, 4, dtype=torch.bool, device="cuda")))
    for out, other, ref in zip(a, with_resets, b, strict=True):
        # torch 2.11 takes float16 for cuDNN's layers whatever autocast was asked for
        assert out.dtype == other.dtype == dtype
        assert_matches(out, ref, tolerance(dtype, 9))
        assert_matches(other, ref, tolerance(dtype, 9))


def test_gradients_in_eval_mode() -> None:
    """torch.nn refuses them on cuDNN."""
    layer = ecornn.LSTM(5, 6, device="cuda").eval()
    assert_like_float64(layer, torch.randn(7, 3, 5, device="cuda"), 7)


def test_a_flattened_torch_layer_converts_and_runs_without_a_warning() -> None:
    theirs = nn.LSTM(5, 6, 2, bidirectional=True, device="cuda")
    x = torch.randn(7, 3, 5, device="cuda")
    expected = leaves(theirs(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = leaves(ecornn.convert(theirs)(x))
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("feature", ["plain", "lengths", "resets", "packed"])
def test_a_training_step_can_be_captured_in_a_graph(feature: str) -> None:
    layer = ecornn.LSTM(8, 16, 2, device="cuda")
    x = torch.randn(12, 4, 8, device="cuda")
    kwargs = {
        "plain": {},
        "lengths": {"lengths": torch.tensor([12, 3, 7, 1], device="cuda")},
        "resets": {"resets": torch.rand(12, 4, device="cuda") < 0.3},
        "packed": {},
    }[feature]
    given: Any = x
    if feature == "packed":
        given = pack_padded_sequence(x, torch.tensor([12, 7, 3, 1]))
        x = given.data

    def step() -> Tensor:
        layer.zero_grad(set_to_none=False)
        output = layer(given, **kwargs)[0]
        loss: Tensor = (output.data if feature == "packed" else output).square().sum()
        loss.backward()
        return loss

    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    replayed = [captured.clone(), *(p.grad.clone() for p in layer.parameters())]  # type: ignore[union-attr]
    plain = [step().detach(), *(p.grad for p in layer.parameters())]
    for a, b in zip(replayed, plain, strict=True):
        assert b is not None
        assert_matches(a, b, tolerance(torch.float32, 12))


def test_a_packed_sequence_that_is_new_to_a_capture_is_refused() -> None:
    layer = ecornn.LSTM(8, 16, device="cuda")
    x = torch.randn(12, 4, 8, device="cuda")
    layer(x, lengths=torch.tensor([12, 7, 3, 1], device="cuda"))
    packed = pack_padded_sequence(x, torch.tensor([12, 7, 3, 1]))
    with (
        pytest.raises(ecornn.InvalidInput, match="before the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        layer(packed)


@pytest.mark.parametrize("backend", ["persistent", "reference"])
def test_states_alone_are_kept(backend: str) -> None:
    """keep="states": the output and the cell states, and nothing else of that size."""
    steps, batch, hidden = 64, 8, 128
    layer = ecornn.LSTM(16, hidden, backend=backend, keep="states", device="cuda")
    x = torch.randn(steps, batch, 16, device="cuda")
    layer(x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = layer(x)[0]
    kept = torch.cuda.memory_allocated() - before
    assert out.requires_grad
    assert kept <= 2.1 * steps * batch * hidden * 4


def test_all_cells_of_a_step() -> None:
    for cell in ("LSTMCell", "GRUCell", "RNNCell"):
        ours = getattr(ecornn, cell)(5, 6, device="cuda")
        theirs = getattr(nn, cell)(5, 6, device="cuda")
        theirs.load_state_dict(ours.state_dict())
        x = torch.randn(3, 5, device="cuda")
        a, b = ours(x), theirs(x)
        a, b = (a, b) if isinstance(a, tuple) else ((a,), (b,))
        assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def test_input_on_another_device_is_refused() -> None:
    with pytest.raises(ecornn.InvalidInput, match="move it"):
        ecornn.LSTM(5, 6, device="cuda")(torch.randn(7, 3, 5))


def test_lengths_that_do_not_fit_are_refused() -> None:
    layer = ecornn.LSTM(5, 6, device="cuda")
    x = torch.randn(7, 3, 5, device="cuda")
    for lengths in ([7, 8, 1], [7, -1, 1]):
        with pytest.raises(ecornn.InvalidInput, match="lengths"):
            layer(x, lengths=torch.tensor(lengths, device="cuda"))
