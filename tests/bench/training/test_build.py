from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import ecornn
from ecornn.bench.models.speech import CTCLoss
from ecornn.bench.models.tasks import TASKS
from ecornn.bench.training import build as building
from ecornn.bench.training.accuracy import compare_with_eager
from ecornn.bench.training.build import NotMeasurable, build, configured
from ecornn.bench.training.cases import ModelCase
from ecornn.bench.training.contenders import (
    AGGRESSIVE,
    BUDGETS,
    CHECKPOINT,
    COMPILE,
    CONVERTED,
    EAGER,
    ECHO_CONVERTED,
    ECHO_MIN,
    UNROLLED,
    Contender,
    replayed,
)
from ecornn.nn.base import RecurrentLayer

MODELS = sorted(TASKS)


def tiny(model: str) -> ModelCase:
    return ModelCase(model, batch=2, size="tiny")


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """torch's tracing and partitioning, then torch's own kernels: inductor's C++ takes a minute a
    model. The list has what was compiled."""
    compiled: list[Any] = []
    plain = torch.compile

    def compile(model: Any, **options: Any) -> Any:
        compiled.append(model)
        return plain(model, backend="aot_eager", **options)

    monkeypatch.setattr(torch, "compile", compile)
    torch._dynamo.reset()
    return compiled


@pytest.mark.parametrize("model", MODELS)
def test_checkpoints_give_eager_s_gradients_to_the_bit(model: str) -> None:
    step, eager = (build(contender, tiny(model), "cpu") for contender in (CHECKPOINT, EAGER))
    found = compare_with_eager(step, eager, seed=5)
    assert found.error == 0
    # running statistics are moved again by the blocks that run again
    assert (found.state_error > 0) == (model in ("speech", "resnet50"))


@pytest.mark.parametrize("model", ["nmt", "lstm-lm", "speech"])
@pytest.mark.parametrize("contender", [CONVERTED, replace(ECHO_CONVERTED, codegen="eager")])
def test_models_with_layers_of_ours_have_eager_s_gradients(
    model: str, contender: Contender
) -> None:
    torch._dynamo.reset()
    step, eager = (build(one, tiny(model), "cpu") for one in (contender, EAGER))
    ours = [m for m in step.model.modules() if isinstance(m, RecurrentLayer)]
    assert ours
    assert not any(isinstance(m, RecurrentLayer) for m in eager.model.modules())
    assert compare_with_eager(step, eager, seed=5).error < 1e-5
    assert contender.is_ours
    assert contender.draws_as_eager


def test_a_model_without_recurrent_layers_is_not_converted() -> None:
    with pytest.raises(NotMeasurable, match="no recurrent layer"):
        build(CONVERTED, tiny("resnet50"), "cpu")


def test_a_block_is_run_again_for_the_backward_pass() -> None:
    step = build(CHECKPOINT, tiny("nmt"), "cpu")
    calls: list[int] = []
    step.model.decoder.attention.register_forward_hook(lambda *_: calls.append(1))
    loss = step.loss()
    forwards = len(calls)
    loss.backward()
    assert len(calls) == 2 * forwards


def test_masks_that_are_drawn_again_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's own budget option did: a comparison must not let that pass."""
    careless = partial(building.checkpoint, preserve_rng_state=False)
    monkeypatch.setattr(
        building, "checkpoint", lambda *a, preserve_rng_state, **options: careless(*a, **options)
    )
    step, eager = (build(contender, tiny("gpt2"), "cpu") for contender in (CHECKPOINT, EAGER))
    found = compare_with_eager(step, eager, seed=5)
    assert found.error > 0.1
    assert not found.bitwise


def test_only_blocks_without_draws_are_wrapped_for_a_graph() -> None:
    step = build(replayed(CHECKPOINT), tiny("nmt"), "cpu")
    assert isinstance(step.model.decoder.attention.forward, partial)
    assert not isinstance(step.model.decoder.forward, partial)
    with pytest.raises(NotMeasurable, match="random numbers"):
        build(replayed(CHECKPOINT), tiny("gpt2"), "cpu")


@pytest.mark.parametrize("contender", [COMPILE, BUDGETS[1]], ids=lambda c: c.name)
def test_options_of_torch_change_what_is_kept_and_nothing_else(
    contender: Any, quick_compiler: list[Any]
) -> None:
    """On a model without draws, where equal gradients are owed."""
    case = tiny("resnet50")
    with configured(contender, 1, eager_draws=True):
        step, eager = build(contender, case, "cpu"), build(EAGER, case, "cpu")
        found = compare_with_eager(step, eager, seed=5)
    assert len(quick_compiler) == 1
    assert found.error == 0
    assert found.state_error == 0


def test_the_loop_s_body_is_compiled_or_all_of_the_model(quick_compiler: list[Any]) -> None:
    step = build(COMPILE, tiny("nmt"), "cpu")
    assert [c.__self__ for c in quick_compiler] == [step.model.decoder]
    assert step.run is step.model
    eager = build(EAGER, tiny("nmt"), "cpu")
    found = compare_with_eager(step, eager, seed=5)
    assert found.error < 1e-5, "this compiler draws as eager does"
    compiled = dict(torch._dynamo.utils.counters["stats"])
    assert compiled["unique_graphs"] > 0
    assert compare_with_eager(step, eager, seed=5, as_traced=True).error < 1e-5
    assert torch._dynamo.utils.counters["stats"] == compiled, "compared is what was compiled"
    unrolled = build(UNROLLED, tiny("nmt"), "cpu")
    assert quick_compiler[-1] is unrolled.model
    assert unrolled.run is not unrolled.model


@pytest.mark.parametrize("kept_from_it", [True, False])
def test_the_speech_model_s_loss_is_not_traced(
    kept_from_it: bool, quick_compiler: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's compiler would run cuDNN's operator on zeros."""
    traced: list[bool] = []

    def forward(self: Any, shares: torch.Tensor, *_: Any) -> torch.Tensor:
        traced.append(torch.compiler.is_compiling())
        return shares.sum()

    monkeypatch.setattr(CTCLoss, "forward", forward)
    if not kept_from_it:
        monkeypatch.setattr(building, "matching", lambda *_: {})
    step = build(COMPILE, tiny("speech"), "cpu")
    step.loss()
    assert len(quick_compiler) == 1
    assert traced == [not kept_from_it]


def test_echo_is_called_as_users_call_it(monkeypatch: pytest.MonkeyPatch) -> None:
    called: dict[str, Any] = {}

    def compile(model: Any, **options: Any) -> Any:
        called.update(options, model=model)
        return model

    monkeypatch.setattr(ecornn, "compile", compile, raising=False)
    step = build(ECHO_MIN, tiny("nmt"), "cpu")
    assert called == {"model": step.model, "memory": "min", "codegen": "inductor"}


class TestOptions:
    def test_they_are_set_and_taken_back(self) -> None:
        import torch._functorch.config as functorch
        import torch._inductor.config as inductor

        before = functorch.activation_memory_budget, functorch.aggressive_recomputation
        threads = inductor.compile_threads
        with configured(BUDGETS[1], 3, eager_draws=False):
            assert functorch.activation_memory_budget == 0.1
            assert inductor.compile_threads == 3
            assert not inductor.fallback_random
        with configured(AGGRESSIVE, 1, eager_draws=True):
            assert functorch.aggressive_recomputation
            assert inductor.fallback_random
        after = functorch.activation_memory_budget, functorch.aggressive_recomputation
        assert before == after
        assert inductor.compile_threads == threads

    def test_a_torch_without_one_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch._functorch.config as functorch

        class Old:
            __name__ = "torch._functorch.config"
            aggressive_recomputation = False

        monkeypatch.setattr(torch._functorch, "config", Old())
        assert hasattr(functorch, "activation_memory_budget")
        with (
            pytest.raises(NotMeasurable, match="activation_memory_budget"),
            configured(BUDGETS[0], 1, eager_draws=False),
        ):
            pass

    def test_eager_needs_none(self) -> None:
        with configured(EAGER, 1, eager_draws=False):
            pass
