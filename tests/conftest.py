"""Every test starts from the same seed, on memory that is NaN until it is written, and collects no
garbage but its file's; coverage is measured where that is cheap."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from support.compilations import Recording


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-compilations",
        action="store_true",
        help="compile all kernels and write down what the compiler says of them",
    )


def pytest_configure(config: pytest.Config) -> None:
    Recording.on = config.getoption("--record-compilations")
    # torch's compiler makes objects by the million, few of them in circles: after every 700, as
    # Python has it, a search for these took a seventh of the time of tests that compile
    gc.set_threshold(20_000, 10, 10)


@pytest.fixture(autouse=True)
def _seed_and_poison() -> Iterator[None]:
    torch.manual_seed(20181)
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory  # torch.empty is NaN
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module", autouse=True)
def _leave_what_is_older_to_others() -> None:
    """A collection goes over all that is alive: half a second for the million objects that the
    tests themselves and torch's compiler leave in a process, and a profile collects several times.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _guards_are_not_timed() -> Iterator[None]:
    """torch times the guards of all that it compiles, once, for a log, and empties the processor's
    caches before: 20 of the 74 ms that a small model takes."""
    guards: Any = sys.modules.get("torch._dynamo.guards")
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(guards, "profile_guard_manager"):
            patch.setattr(guards, "profile_guard_manager", lambda *_: 0.0)
        yield


# Coverage is measured where that is cheap: tracing doubles the time of Python code before 3.12.
# What is not measured counts as not reached, so that the limit on coverage is only stricter.

#: Not measured: their lines, but for a few dozen, are reached by other tests as well.
UNMEASURED_FILES = {
    "tests/bench/profiling/test_measure.py",
    "tests/cli/test_fit.py",
    "tests/echo/analysis/test_repetition.py",
    "tests/echo/test_attack.py",
    "tests/echo/test_backend.py",
    "tests/echo/test_pipeline.py",
    "tests/echo/test_regions.py",
    "tests/echo/test_rewrite.py",
    "tests/echo/test_training.py",
    "tests/nn/test_compile.py",
    "tests/nn/test_derivatives.py",
    "tests/nn/test_long.py",
    "tests/profiler/test_fit.py",
    "tests/profiler/test_guide.py",
}
#: Of a test that has many; random ones, of which nobody knows which lines they reach, are not.
MEASURED_CASES = 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _choose_what_is_measured(items)
    _skip_what_needs_a_gpu(items)


def _choose_what_is_measured(items: list[pytest.Item]) -> None:
    seen: Counter[str] = Counter()
    for item in items:
        test = item.nodeid.partition("[")[0]
        seen[test] += 1
        file = test.partition("::")[0]
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
