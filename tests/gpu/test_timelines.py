"""What torch's profiler says of a GPU during a layer's calls."""

from __future__ import annotations

import pytest
import torch

from ecornn.bench.cases import Case
from ecornn.bench.contenders import contenders_for
from ecornn.bench.runners import run_case
from ecornn.bench.timeline.watch import watch
from ecornn.bench.timing import QUICK

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_kernels_and_waiting_are_told_apart(dtype: str) -> None:
    case = Case("lstm", 256, 4, 64, dtype)
    generator = torch.Generator(CUDA)
    rows = run_case(case, contenders_for(case, CUDA), CUDA, QUICK["cuda"], generator, watch)
    found = {row.contender: row for row in rows}
    assert len(found) == 5
    for name, row in found.items():
        assert row.trouble is None, name
        passes = ("forward",) if "floor" in name else ("forward", "train")
        for which in passes:
            steps, span = row.number(f"{which}_steps_us"), row.number(f"{which}_span_us")
            assert steps is not None
            assert span is not None
            assert 0 < steps < span
    ours = found["ecornn"]
    # a launch each way; the input's product before, those of the gradients after
    assert "in 1 × forward" in str(ours.metrics["forward_longest"])
    assert "in 1 × backward" in str(ours.metrics["train_longest"])
    assert float(ours.metrics["train_products_us"]) > float(ours.metrics["forward_products_us"]) > 0
    # cuDNN launches at every step
    assert float(found["torch.nn"].metrics["forward_operations"]) > case.steps
