"""The contenders of `ecornn bench echo` on CUDA, on tiny models: graphs, limits of memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils._pytree import tree_leaves

import ecornn
from ecornn.bench.models.step import make_step
from ecornn.bench.runners import tf32_where_it_is_faster
from ecornn.bench.training.build import NotMeasurable, configured
from ecornn.bench.training.cases import NAMED, ModelCase, make_case
from ecornn.bench.training.contenders import (
    CHECKPOINT,
    COMPILE,
    CONVERTED,
    EAGER,
    ECHO,
    ECHO_CONVERTED,
    ECHO_EAGER,
    ECHO_MIN,
    ECHO_WITHIN,
    replayed,
)
from ecornn.bench.training.measure import EFFORTS, Measurement
from ecornn.bench.training.memory import bytes_now
from ecornn.echo.model_call import ModelCall
from ecornn.echo.rehearse import rehearsed

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    torch.use_deterministic_algorithms(False)  # its filled buffers would be counted as time
    torch._dynamo.reset()
    with tf32_where_it_is_faster(CUDA):
        yield


def measured(case: ModelCase, contender: object) -> dict[str, float | str]:
    found = Measurement(case, contender, CUDA, EFFORTS["quick"])  # type: ignore[arg-type]
    with configured(found.contender, 2, eager_draws=case.part == "check"):
        found.prepare()
        found.measure()
    return found.metrics


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("contender", [EAGER, CHECKPOINT], ids=lambda c: c.name)
def test_plain_steps(name: str, contender: object) -> None:
    metrics = measured(make_case(name, "step", tiny=True), contender)
    assert float(metrics["step_ms"]) > 0
    assert float(metrics["peak_bytes"]) > 0
    assert "wrong" not in metrics


@pytest.mark.parametrize("name", NAMED)
def test_a_replayed_step_is_eager_s(name: str) -> None:
    """Dropout included."""
    metrics = measured(make_case(name, "step", tiny=True), replayed(EAGER))
    assert "wrong" not in metrics
    assert float(metrics["error"]) < 1e-2


def test_what_cannot_be_captured_says_why() -> None:
    with pytest.raises(NotMeasurable, match="random numbers"):
        measured(make_case("gpt2", "step", tiny=True), replayed(CHECKPOINT))


@pytest.mark.parametrize("name", ["nmt-50", "speech"])
def test_a_replayed_checkpoint(name: str) -> None:
    metrics = measured(make_case(name, "step", tiny=True), replayed(CHECKPOINT))
    assert "wrong" not in metrics
    assert float(metrics["step_ms"]) > 0


def test_the_largest_batch_is_found_by_running_out_of_memory() -> None:
    case = ModelCase("lstm-lm", "batch", memory_gib=0.25, size="tiny")
    metrics = measured(case, EAGER)
    assert float(metrics["largest_batch"]) > 4
    assert float(metrics["peak_bytes"]) <= 0.25 * 2**30


@pytest.mark.parametrize("name", ["nmt-50", "speech"])
@pytest.mark.parametrize("contender", [ECHO, replayed(ECHO)], ids=lambda c: c.name)
def test_echo(contender: object, name: str) -> None:
    metrics = measured(make_case(name, "step", tiny=True), contender)
    assert "failed" not in metrics
    assert float(metrics["step_ms"]) > 0


@pytest.mark.parametrize("name", ["nmt-50", "lstm-lm", "speech"])
@pytest.mark.parametrize(
    "contender", [CONVERTED, ECHO_CONVERTED, replayed(ECHO_CONVERTED)], ids=lambda c: c.name
)
def test_models_with_layers_of_ours(contender: object, name: str) -> None:
    metrics = measured(make_case(name, "step", tiny=True), contender)
    assert "failed" not in metrics
    assert float(metrics["step_ms"]) > 0


def test_torch_s_compiler_leaves_the_speech_model_s_loss_alone() -> None:
    """It would run cuDNN's operator on texts and sounds of no length."""
    metrics = measured(make_case("speech", "step", tiny=True), COMPILE)
    assert "wrong" not in metrics
    assert float(metrics["error"]) < 1e-2


def test_echo_is_eager_s_when_it_draws_as_eager_does() -> None:
    metrics = measured(make_case("nmt-50", "check", tiny=True), ECHO)
    assert float(metrics["error"]) < 1e-3


def test_batch_norms_are_those_of_a_traced_graph_to_the_bit() -> None:
    """Eager's own are cuDNN's, which round elsewhere."""
    metrics = measured(make_case("resnet50", "check", tiny=True), ECHO_EAGER)
    assert metrics["bitwise"] == 1 or metrics["eager_repeats"] == 0
    assert float(metrics["error"]) < 1e-9


@pytest.mark.parametrize("name", ["nmt-50", "lstm-lm", "speech"])
@pytest.mark.parametrize(
    "contender", [ECHO, ECHO_MIN, *ECHO_WITHIN[-1:], ECHO_CONVERTED], ids=lambda c: c.name
)
def test_the_peak_of_a_divided_model_is_foretold(name: str, contender: object) -> None:
    """Of full size: what libraries take beside is a small share there alone."""
    metrics = measured(make_case(name, "step"), contender)
    predicted, peak = (float(metrics[m]) for m in ("predicted_peak_bytes", "peak_bytes"))
    assert predicted == pytest.approx(peak, rel=0.05)


LAYERS = [torch.nn.LSTM, torch.nn.GRU]


@pytest.mark.parametrize("layer", LAYERS)
def test_what_cudnn_reserves_grows_by_the_step(layer: type[torch.nn.RNNBase]) -> None:
    """Measured at two short lengths, and compared with what a long one takes."""
    from ecornn.echo.cudnn import asked_for, room_of_cudnn

    steps, batch, hidden = 60, 48, 512
    made = layer(hidden, hidden).cuda()
    given = torch.zeros(steps, batch, hidden, device=CUDA)
    state = torch.zeros(1, batch, hidden, device=CUDA)
    lstm = layer is torch.nn.LSTM
    mode, cells = (2, state.clone()) if lstm else (3, None)
    options = (mode, hidden, 0, 1, False, 0.0, True, False, [], None)
    weights = [weight.detach() for weight in made.parameters()]
    together = torch.empty(0, device=CUDA).set_(weights[0].untyped_storage())
    room = room_of_cudnn(given, weights, 4, together, state, cells, *options)
    before = asked_for(torch.device("cuda", 0))
    output, *_, reserve, _ = torch.ops.aten._cudnn_rnn(
        given, weights, 4, together, state, cells, *options
    )
    taken = asked_for(torch.device("cuda", 0)) - before
    assert reserve.nbytes == pytest.approx(room.reserve, rel=0.02)
    assert taken - output.nbytes - reserve.nbytes == pytest.approx(room.forward, rel=0.1, abs=2e6)


def test_dropout_inside_cudnn_draws_what_it_draws_without_echo() -> None:
    """torch seeds it at the first call after `manual_seed`, which must be the model's own."""

    class Stacked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = torch.nn.LSTM(32, 32, num_layers=2, dropout=0.5)
            self.head = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.stack(x)[0])

    model, x = Stacked().cuda(), torch.randn(5, 3, 32, device=CUDA)
    model(x)
    found = []
    compiled = ecornn.compile(model, recurrent="torch")
    for run in (model, model, compiled):
        torch.manual_seed(3)
        found.append(run(x))
    assert "draws inside cuDNN" in str(compiled.explain())
    if not torch.equal(found[0], found[1]):
        pytest.skip("this torch does not seed cuDNN's dropout anew")
    torch.testing.assert_close(found[2], found[0], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("cast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("flat", [True, False], ids=["flat", "scattered"])
@pytest.mark.parametrize("layer", LAYERS)
def test_both_passes_of_a_layer_are_foretold(
    layer: type[torch.nn.RNNBase], flat: bool, cast: bool
) -> None:
    """Weights that do not lie in one memory are copied at every call, and the copy is kept; under
    autocast they are cast as well."""
    made = layer(512, 512, bidirectional=True, batch_first=not flat).cuda()
    if not flat:
        for weight in made.parameters():
            weight.data = weight.data.clone()
    given = torch.randn(60, 60, 512, device=CUDA, requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16, enabled=cast):
        call = ModelCall.of((given,), {}, CUDA)
    assert call is not None

    def passes() -> None:
        with call.context():
            results = made(given)
        roots = tree_leaves(results)
        torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])
        made.zero_grad()
        given.grad = None

    passes()  # what libraries take once
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    passes()
    peak = torch.cuda.max_memory_allocated() - before
    assert rehearsed(made, call, {}, None) == pytest.approx(peak, rel=0.05)


def test_a_budget_is_met_by_running_one_layer_again() -> None:
    """Of five, whose reserves are most of what the model holds."""
    step = make_step("speech", device="cuda")
    step.run = ecornn.compile(step.model, memory=0.9, recurrent="torch")
    for _ in range(3):
        step()
    regions = step.run._regions  # type: ignore[attr-defined]
    found = regions.step.way.found
    assert (regions.replaced.latest_again, regions.replaced.latest_able) == (1, 5)
    assert 4 not in regions.step.way.again, "the peak comes at its turn"
    step.clear()
    before = bytes_now(step)
    torch.cuda.reset_peak_memory_stats()
    step.loss().backward()
    torch.cuda.synchronize()
    beside = torch.cuda.max_memory_allocated() - before
    assert beside == pytest.approx(found.most, rel=0.05)
    assert beside <= 1.01 * (regions.step.limit - found.held)
    told = " ".join(str(step.run.explain()).split())  # type: ignore[attr-defined]
    assert "of 5 calls of recurrent layers in a forward pass 1 are run again" in told
