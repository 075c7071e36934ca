"""Every test starts from the same seed, on memory that is NaN until it is written; coverage is
measured where that is cheap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed_and_poison() -> Iterator[None]:
    torch.manual_seed(20181)
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory  # torch.empty is NaN
    yield
    torch.use_deterministic_algorithms(False)


#: Coverage is measured where that is cheap: tracing doubles the time of Python code before 3.12.
#: What is not measured counts as not reached, so that the limit on coverage is only stricter.
#: Not measured are these files, whose lines others reach as well (all but a few dozen),
UNMEASURED_FILES = {
    "echo/analysis/test_liveness.py",
    "echo/analysis/test_repetition.py",
    "echo/plan/test_estimate.py",
    "echo/test_attack.py",
    "echo/test_backend.py",
    "echo/test_pipeline.py",
    "echo/test_regions.py",
    "echo/test_rewrite.py",
    "echo/test_training.py",
    "nn/test_compile.py",
    "nn/test_long.py",
    "profiler/test_fit.py",
    "profiler/test_guide.py",
}
#: random cases, and of those that are listed all but the first few.
MEASURED_CASES = 4


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _choose_what_is_measured(items)
    _skip_what_needs_a_gpu(items)


def _choose_what_is_measured(items: list[pytest.Item]) -> None:
    seen: Counter[str] = Counter()
    for item in items:
        test = item.nodeid.partition("[")[0]
        seen[test] += 1
        file = item.path.relative_to(Path(__file__).parent).as_posix()
        random = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
        if file in UNMEASURED_FILES or random or seen[test] > MEASURED_CASES:
            item.add_marker("no_cover")


def _skip_what_needs_a_gpu(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU; this machine has none")
    for item in items:
        if "gpu" in item.keywords or "gpu" in item.path.parts:
            item.add_marker(skip)
