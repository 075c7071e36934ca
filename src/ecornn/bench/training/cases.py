"""`ModelCase`: one model and what is measured on it, and the cases of the benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ecornn.bench.cases import Where
from ecornn.bench.models.tasks import SIZES, TASKS, task_named
from ecornn.errors import InvalidInput

BENCHMARK = "echo"

#: "step"   time and memory of a training step, and the time until the first one is done
#: "batch"  the largest batch that fits a limit of memory, and its samples a second
#: "check"  loss, gradients and buffers against eager's, at equal seeds
#: "plan"   how long Echo plans a large graph, and how near its plans of small ones are to the best
PARTS = ("step", "batch", "check", "plan")
#: Steps of the unrolled decoder, for a joint graph of more than 15,000 nodes; of the tiny one.
PLANNED = 100, 4
#: What the profiler says of a step, of a batch and of a limit of memory; of another benchmark.
PROFILED = "profile"
LIMIT_GIB = 16.0
#: Enough for some samples of any tiny model, too little for many.
TINY_LIMIT_GIB = 2**-9


@dataclass(frozen=True)
class ModelCase:
    """`batch` is None in the part "batch", which looks for it; there `memory_gib` is the limit.
    `length` is None where the model's sizes have none to choose."""

    model: str
    part: str = "step"
    batch: int | None = None
    length: int | None = None
    memory_gib: float | None = None
    size: str = "full"

    def __post_init__(self) -> None:
        for name, allowed in (
            ("model", tuple(TASKS)),
            ("part", (*PARTS, PROFILED)),
            ("size", SIZES),
        ):
            if getattr(self, name) not in allowed:
                raise _bad(name, getattr(self, name), f"one of {', '.join(allowed)}")
        for name in ("batch", "length"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise _bad(name, value, "a whole number of at least 1")
        limit = self.memory_gib
        if limit is not None and (type(limit) not in (int, float) or limit <= 0):
            raise _bad("memory_gib", limit, "a number above 0")
        if (self.part == "batch") != (self.batch is None):
            raise _bad("batch", self.batch, "none in the part 'batch', one in the others")
        if (self.part in ("batch", PROFILED)) != (limit is not None):
            expected = "a limit in the parts 'batch' and 'profile', none in the others"
            raise _bad("memory_gib", limit, expected)

    @property
    def name(self) -> str:
        return self.model if self.length is None else f"{self.model}-{self.length}"

    def to_json(self) -> dict[str, Any]:
        default = {field.name: field.default for field in fields(self)}
        return {
            name: value
            for name, value in vars(self).items()
            if name in ("model", "part") or value != default[name]
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ModelCase:
        known = {field.name for field in fields(cls)}
        for name in value:
            if name not in known:
                raise _bad("case", name, f"keys among {', '.join(sorted(known))}")
        return cls(**value)

    def matches(self, where: Where) -> bool:
        mine = {**vars(self), "name": self.name}
        return all(mine[name] in allowed for name, allowed in where.items())

    def __str__(self) -> str:
        said = [self.name]
        if self.batch is not None:
            said.append(f"B={self.batch}")
        if self.memory_gib is not None:
            said.append(f"in {self.memory_gib:g} GiB")
        said += {"check": ["checked"], "plan": ["planned"]}.get(self.part, [])
        if self.size != "full":
            said.append(self.size)
        return ", ".join(said)


#: By the name of a case: its model, and the length of its sequences where that is chosen; the
#: length of the tiny one. The most telling first.
NAMED: dict[str, tuple[str, int | None, int | None]] = {
    "nmt-50": ("nmt", 50, 5),
    "nmt-100": ("nmt", 100, 10),
    "speech": ("speech", None, None),
    "lstm-lm": ("lstm-lm", None, None),
    "gpt2": ("gpt2", None, None),
    "transformer": ("transformer", None, None),
    "resnet50": ("resnet50", None, None),
}


def make_case(name: str, part: str, *, tiny: bool = False) -> ModelCase:
    if name not in NAMED:
        raise InvalidInput("case", repr(name), f"one of {', '.join(NAMED)}", "name one")
    model, length, tiny_length = NAMED[name]
    size, length = ("tiny", tiny_length) if tiny else ("full", length)
    if part == "batch":
        limit = TINY_LIMIT_GIB if tiny else LIMIT_GIB
        return ModelCase(model, part, None, length, limit, size)
    return ModelCase(model, part, task_named(model).size(size).batch, length, None, size)


def make_cases(
    names: Sequence[str], parts: Sequence[str], *, tiny: bool = False
) -> tuple[ModelCase, ...]:
    """All of them where no names are given. Part after part, the first for all cases first."""
    for part in parts:
        if part not in PARTS:
            raise InvalidInput("part", repr(part), f"one of {', '.join(PARTS)}", "name one")
    found: list[ModelCase] = []
    for part in parts:
        if part == "plan":
            found.append(planned_case(tiny=tiny))
        else:
            found += [make_case(name, part, tiny=tiny) for name in names or NAMED]
    return tuple(found)


def planned_case(*, tiny: bool = False) -> ModelCase:
    """The one case of the part "plan"."""
    size, length = ("tiny", PLANNED[1]) if tiny else ("full", PLANNED[0])
    return ModelCase("nmt", "plan", task_named("nmt").size(size).batch, length, None, size)


def _bad(name: str, got: Any, expected: str) -> InvalidInput:
    return InvalidInput(name, repr(got), expected, "correct it")
