"""What observing costs, and that the compiler is kept out of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ecornn.bench.models import attention_nmt
from ecornn.profiler import collect, places, profile, storages

ROUNDS = 5
OPERATORS = 400

#: Coverage's tracing would be taken for the profiler's cost.
pytestmark = pytest.mark.no_cover


class Bare(TorchDispatchMode):
    """What no observer of operators in Python can be cheaper than."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """So that the time of the process is that of the work, however busy the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def shortest(
    call: Callable[[], Any], *around: Callable[[], AbstractContextManager[Any]]
) -> list[float]:
    """Seconds of the process, the least of some rounds, in turns."""
    found = [float("inf")] * len(around)
    for _ in range(ROUNDS):
        for i, make in enumerate(around):
            with make():
                began = time.process_time()
                call()
                found[i] = min(found[i], time.process_time() - began)
    return found


def test_an_operator_costs_little_more_than_being_seen_at_all() -> None:
    """2.7 times as much as a mode that does nothing when this was written; a walk up the frames at
    every operator, or torch's own way to keep its compiler out, would each be seen here."""
    model, x = nn.Linear(2, 2), torch.randn(4, 4, requires_grad=True)

    def many() -> None:
        for _ in range(OPERATORS):
            x + 1

    plain, bare, observed = shortest(many, nullcontext, Bare, lambda: profile(model=model))
    assert observed - plain < 4.5 * (bare - plain)


def test_a_step_of_a_model_takes_at_most_twice_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    # else, all that Python knows of is looked through first, which is no matter of the step's size
    monkeypatch.setattr(collect, "generates_code", lambda: False)
    size = attention_nmt.Size(500, 500, hidden=256, length=4, batch=64)
    model = attention_nmt.make_model(size)
    batch = attention_nmt.make_batch(size, size.batch, torch.Generator().manual_seed(0))
    step = lambda: model(*batch).backward()  # noqa: E731
    step()
    (plain,) = shortest(step, nullcontext)
    (observed,) = shortest(lambda: profile(step, model), nullcontext)
    assert observed < 2 * plain


def test_the_compiler_does_not_look_into_the_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where compiled code breaks off, operators run with the compiler looking on."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    model = nn.Linear(3, 3)

    @torch._dynamo.disable(recursive=False)
    def not_compiled(y: torch.Tensor) -> torch.Tensor:
        return y * 2

    def broken(x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = not_compiled(model(x)).sum()
        return total

    torch._dynamo.reset()
    for kind in (collect.CollectorBesideCompiler, collect.WrappedCollector):
        if kind is collect.WrappedCollector:
            monkeypatch.setattr(collect, "passed_over_by_compiler", lambda *_: False)
        compiled = torch.compile(broken, backend="eager")
        with profile(model=model) as observed:
            assert type(observed._collector) is kind
            compiled(torch.randn(2, 3)).backward()
        assert observed.report.peak_bytes > 0
        codes = [places._code_of(module) for module in (collect, places, storages)]
        assert [
            code for group in codes for code in group if _debug_get_cache_entry_list(code)
        ] == []
    torch._dynamo.reset()
