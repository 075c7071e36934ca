"""The models on which the profiler's claims are measured."""

from __future__ import annotations

from collections.abc import Sequence

from ecornn.bench.models.tasks import task_named
from ecornn.bench.training.cases import (
    LIMIT_GIB,
    NAMED,
    PROFILED,
    TINY_LIMIT_GIB,
    ModelCase,
)
from ecornn.errors import InvalidInput

#: By their names in `training.cases.NAMED`.
CASES = ("nmt-50", "speech", "transformer", "resnet50", "gpt2")
#: In 16 GiB too few samples of it fit for a share of 2 % to be one of them.
LIMITS_GIB = {"gpt2": 48.0}


def profile_cases(names: Sequence[str] = (), *, tiny: bool = False) -> tuple[ModelCase, ...]:
    """All of them where no names are given."""
    for name in names:
        if name not in CASES:
            raise InvalidInput("case", repr(name), f"one of {', '.join(CASES)}", "name one")
    return tuple(_profile_case(name, tiny=tiny) for name in names or CASES)


def _profile_case(name: str, *, tiny: bool) -> ModelCase:
    model, length, tiny_length = NAMED[name]
    size, length = ("tiny", tiny_length) if tiny else ("full", length)
    limit = TINY_LIMIT_GIB if tiny else LIMITS_GIB.get(name, LIMIT_GIB)
    return ModelCase(model, PROFILED, task_named(model).size(size).batch, length, limit, size)
