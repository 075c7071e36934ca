from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ecornn.nn
from ecornn.bench.accuracy import BOUNDS, TF32_BOUND, bound, check, judge, references, worse
from ecornn.bench.accuracy import Verdict as V
from ecornn.bench.calls import make_call
from ecornn.bench.cases import Case
from ecornn.bench.contenders import Contender, contenders_for
from ecornn.bench.problem import draw_problem, draw_values

CPU = torch.device("cpu")
DOCUMENTATION = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
OURS = Contender("ecornn", ecornn.nn)


def verdict(contender: Contender, case: Case) -> V:
    generator = torch.Generator().manual_seed(7)
    problem = draw_problem(case, CPU, generator)
    call = make_call(contender, problem, draw_values(problem, generator))
    values = draw_values(problem, generator)
    expected = references(problem, values, [contender.form])[contender.form]
    return check(call, values, expected, bound(case.dtype, CPU))


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
@pytest.mark.parametrize("lengths", [False, True])
def test_contenders_that_are_right_pass(cell: str, lengths: bool) -> None:
    case = Case(cell, 7, 3, 6, bidirectional=True, initial=True, lengths=lengths)
    for contender in contenders_for(case, CPU):
        found = verdict(contender, case)
        assert found.failed is None, contender.name
        assert found.error is not None
        assert 0 < found.error < BOUNDS["fp32"]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64"])
def test_the_error_is_that_of_the_dtype(dtype: str) -> None:
    found = verdict(OURS, Case("lstm", 16, 3, 12, dtype))
    assert found.failed is None
    assert found.error is not None
    roundoff = torch.finfo(Case("lstm", 1, 1, 1, dtype).torch_dtype).eps
    assert found.error < 4 * roundoff


class ForgetfulLSTM(torch.nn.LSTM):
    """Wrong in its output: the second half is what the first one was."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output, state = super().forward(*args, **kwargs)
        half = output.shape[0] // 2
        return torch.cat([output[:half], output[:half]]), state


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 1.01


class CarelessLSTM(torch.nn.LSTM):
    """Right in its results, wrong by a hundredth in the gradient of its input."""

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return super().forward(WrongGradient.apply(x), *args, **kwargs)


class LazyLSTM(torch.nn.LSTM):
    """Right with gradients, wrong without."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output, state = super().forward(*args, **kwargs)
        return (output if torch.is_grad_enabled() else torch.zeros_like(output)), state


class UnfinishedLSTM(torch.nn.LSTM):
    """Leaves one value of its final cell state unwritten."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output, (h, c) = super().forward(*args, **kwargs)
        hole = torch.zeros_like(c)
        hole[0, 0, 0] = math.nan
        return output, (h, c + hole)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (ForgetfulLSTM, "output: relative error"),
        (CarelessLSTM, "gradient of input: relative error 1.0e-02"),
        (LazyLSTM, "output: relative error 1.0e"),
        (UnfinishedLSTM, "c_n: not finite"),
    ],
)
def test_a_contender_that_is_wrong_is_caught(kind: type, says: str) -> None:
    found = verdict(Contender("wrong", SimpleNamespace(LSTM=kind)), Case("lstm", 8, 2, 6))
    assert found.failed is not None
    assert says in found.failed


def test_a_result_of_another_shape_is_caught() -> None:
    found = judge({"output": torch.zeros(2, 3)}, {"output": torch.zeros(3, 3)}, 1.0)
    assert found == V(None, "output: shape (2, 3), expected (3, 3)")


def test_values_in_the_padding_reach_no_reference() -> None:
    case = Case("lstm", 5, 3, 8, lengths=True)
    generator = torch.Generator().manual_seed(1)
    problem = draw_problem(case, CPU, generator)
    values = draw_values(problem, generator)
    found = references(problem, values, ["lengths", "packed", "padded"])
    assert found["lengths"] is found["packed"]
    for b, end in enumerate(problem.lengths.tolist()):  # type: ignore[union-attr]
        assert not found["lengths"]["output"][end:, b].any()
        assert not found["lengths"]["gradient of input"][end:, b].any()
        assert found["padded"]["output"][end:, b].all()


def test_lengths_are_mixed_and_reach_both_ends() -> None:
    case = Case("lstm", 4, 32, 1000, lengths=True)
    problem = draw_problem(case, CPU, torch.Generator())
    assert problem.lengths is not None
    lengths = problem.lengths.tolist()
    assert (min(lengths), max(lengths)) == (1, 1000)
    assert lengths != sorted(lengths)
    assert 400 < sum(lengths) / 32 < 600


def test_every_check_has_fresh_values() -> None:
    generator = torch.Generator().manual_seed(1)
    problem = draw_problem(Case("lstm", 4, 2, 3, initial=True), CPU, generator)
    one, other = draw_values(problem, generator), draw_values(problem, generator)
    assert all(not torch.equal(a, b) for a, b in zip(one, other, strict=True))  # type: ignore[arg-type]


def test_the_worse_of_two_verdicts() -> None:
    right, wrong, lost = V(1e-7, None), V(0.5, "off"), V(None, "not finite")
    assert worse(right, wrong) == wrong
    assert worse(lost, wrong) == lost


def test_the_documentation_states_the_bounds() -> None:
    (line,) = (ln for ln in DOCUMENTATION.read_text().splitlines() if ln.startswith("| bound"))
    stated = [float(cell) for cell in line.strip("| ").split(" | ")[1:]]
    assert stated == [BOUNDS["fp64"], BOUNDS["fp32"], TF32_BOUND, BOUNDS["fp16"], BOUNDS["bf16"]]


def test_tf32_is_allowed_for_on_cuda_alone() -> None:
    assert bound("fp32", torch.device("cuda")) == TF32_BOUND
    assert bound("fp32", CPU) == BOUNDS["fp32"] < TF32_BOUND
    assert bound("bf16", torch.device("cuda")) == BOUNDS["bf16"]
