"""What only a GPU can show: replays from graphs, time between events, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ecornn.bench.calls import Replay, make_call
from ecornn.bench.cases import Case
from ecornn.bench.contenders import Contender, contenders_for
from ecornn.bench.problem import draw_problem, draw_values
from ecornn.bench.runners import run_case
from ecornn.bench.timing import QUICK

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
PLANS = ("plan", "forward_plan")


class SynchronizingLSTM(torch.nn.LSTM):
    """Looks at a value, which no graph can."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output, state = super().forward(*args, **kwargs)
        output.sum().item()
        return output, state


def run(case: Case, *more: Contender) -> dict[str, dict[str, Any]]:
    contenders = (*more, *contenders_for(case, CUDA))
    rows = run_case(case, contenders, CUDA, QUICK["cuda"], torch.Generator(CUDA))
    return {row.contender: dict(row.metrics) for row in rows}


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_everyone_is_measured_called_and_replayed(dtype: str) -> None:
    found = run(Case("lstm", 128, 4, 32, dtype))
    assert len(found) == 4
    for name, metrics in found.items():
        assert "failed" not in metrics, name
        assert "not_measured" not in metrics, name
        # no comparison of the two: other tests may be using the GPU
        assert min(metrics["train_us"], metrics["forward_us"]) > 0
    assert found["torch.nn"]["peak_bytes"] >= found["torch.nn"]["kept_bytes"] > 0


def test_rows_say_which_calls_torch_s_kernels_run() -> None:
    """Where cuDNN's own persistent kernels are the quicker, ours are not what is measured."""
    found = run(Case("lstm", 64, 64, 32, "fp32"))
    plans = [found[name][plan] for name in ("ecornn", "ecornn+graph") for plan in PLANS]
    backends = [plan.split(",")[0] for plan in plans]
    assert backends == ["persistent", "persistent", "aten", "persistent"]


def test_who_cannot_be_captured_says_why_and_disturbs_nobody() -> None:
    module = type("Module", (), {"LSTM": SynchronizingLSTM})
    found = run(Case("lstm", 64, 2, 8), Contender("looks+graph", module, graph=True))
    assert "synchronizing" in found["looks+graph"]["not_measured"]
    assert "train_us" in found["torch.nn+graph"]
    assert torch.rand(3, device=CUDA).isfinite().all(), "a failed capture can spoil the generator"


def test_who_looks_only_outside_of_captures_is_captured() -> None:
    found = run(Case("lstm", 64, 4, 8, lengths=True))
    assert "train_us" in found["ecornn lengths+graph"], found["ecornn lengths+graph"]
    assert "train_us" in found["torch.nn packed+graph"]


def test_the_floor_is_timed_from_a_graph() -> None:
    found = run(Case("lstm", 256, 4, 32, "bf16"))["exchange floor+graph"]
    assert set(found) == {"plan", "forward_us", "forward_us_spread"}, found
    assert found["forward_us"] > 0


def test_layers_told_what_to_keep_are_checked_and_their_memory_counted() -> None:
    found = run(Case("lstm", 1024, 16, 32, "bf16"))
    states, gates = found["ecornn keep=states"], found["ecornn keep=gates"]
    assert "failed" not in states | gates
    assert states["kept_bytes"] < gates["kept_bytes"]
    assert min(states["peak_bytes"], states["error"]) > 0


def test_a_replay_computes_from_what_was_loaded_last() -> None:
    generator = torch.Generator(CUDA)
    problem = draw_problem(Case("lstm", 32, 2, 5), CUDA, generator)
    call = make_call(Contender("torch.nn", torch.nn), problem, draw_values(problem, generator))
    replay = Replay(call)
    values = draw_values(problem, generator)
    replay.load(values)
    (output, *_), (gradient, *_) = replay.train()
    (expected, *_), (expected_gradient, *_) = call.train()
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(gradient, expected_gradient)
