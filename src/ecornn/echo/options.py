"""`Options`: what is asked of Echo, checked when it is given and not when a model runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ecornn.errors import InvalidInput
from ecornn.sizes import read_size, size_text

CODEGENS = ("inductor", "eager")
MASKS = ("auto", "bits", "bytes")
MAPS = ("exact", "bf16", "fp8")
_MEMORY = '"auto", "min", a size such as "6GiB", bytes as an integer, or a fraction in (0, 1]'


@dataclass(frozen=True)
class Memory:
    """How much a compiled graph may hold; where only parts of a model are compiled, a whole step.

    "auto"      every recomputation that is free, or nearly so, is taken
    "min"       as little as can be
    "bytes"     at most `amount` bytes
    "fraction"  at most the graph's inputs and `amount` of what it holds beside them at its peak
                when nothing is recomputed; of a step, its weights and inputs, and `amount` of what
                the model holds beside them as it is written
    """

    kind: str
    amount: float = 0

    def __str__(self) -> str:
        if self.kind == "bytes":
            return f"at most {size_text(int(self.amount))}"
        return f"fraction {self.amount:g}" if self.kind == "fraction" else self.kind


AUTO, MIN = Memory("auto"), Memory("min")
#: Kinds of memory that promise a number of bytes.
BUDGETS = ("bytes", "fraction")


@dataclass(frozen=True)
class Options:
    memory: Memory = AUTO
    #: None: "inductor" on CUDA where Triton is installed, "eager" elsewhere.
    codegen: str | None = None
    #: "bits": kept booleans eight to a byte, those of ReLU among them, and indices in as few bytes
    #: as tell them apart; "auto": booleans, where a plan of operators that run one by one is better
    #: for it.
    masks: str = "auto"
    #: "bf16", "fp8": kept feature maps are rounded to it.
    maps: str = "exact"
    #: Times of operators are measured, once for a device, in the place of a roofline.
    measure: bool = False


def read_options(given: Mapping[str, Any] | None) -> Options:
    """From what `torch.compile(..., options=...)` was given."""
    given = dict(given or {})
    memory, codegen = given.pop("memory", "auto"), given.pop("codegen", None)
    masks, maps = given.pop("masks", "auto"), given.pop("maps", "exact")
    measure = given.pop("measure", False)
    if given:
        unknown = ", ".join(sorted(map(repr, given)))
        known = "'memory', 'codegen', 'masks', 'maps' and 'measure'"
        raise InvalidInput("options", unknown, known, "remove or correct what is unknown")
    if masks not in MASKS:
        raise InvalidInput("masks", repr(masks), "'auto', 'bits' or 'bytes'", "give one of these")
    if maps not in MAPS:
        raise InvalidInput("maps", repr(maps), "'exact', 'bf16' or 'fp8'", "give one of these")
    if codegen not in (None, *CODEGENS):
        raise InvalidInput(
            "codegen",
            repr(codegen),
            " or ".join(map(repr, CODEGENS)),
            "leave it out to let Echo"
            " take 'inductor' on CUDA where Triton is installed and 'eager' elsewhere",
        )
    if not isinstance(measure, bool):
        raise InvalidInput("measure", repr(measure), "True or False", "give one of these")
    return Options(read_memory(memory), codegen, masks, maps, measure)


def read_memory(given: Any) -> Memory:
    if isinstance(given, Memory):
        return given
    if given in ("auto", "min"):
        return Memory(given)
    if isinstance(given, str):
        return Memory("bytes", _bytes_of(given))
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise InvalidInput("memory", repr(given), _MEMORY, "give one of these")
    if isinstance(given, int):
        if given <= 0:
            raise InvalidInput("memory", f"{given} bytes", "more than 0", 'or ask for "min"')
        return Memory("bytes", given)
    if not 0 < given <= 1:
        raise InvalidInput(
            "memory", repr(given), "a fraction in (0, 1]", 'give bytes as an integer or as "6GiB"'
        )
    return Memory("fraction", given)


def _bytes_of(text: str) -> int:
    amount = read_size("memory", text, _MEMORY)
    if amount <= 0:
        raise InvalidInput("memory", repr(text), "more than 0", 'or ask for "min"')
    return amount


def refusal(memory: Memory, limit: int, smallest: int, of: str) -> InvalidInput:
    """Of a budget of so many bytes. `of`: what the smallest peak was found for."""
    return InvalidInput(
        "memory",
        f"{memory}, which is {limit:,} bytes here",
        f"at least {smallest:,} bytes ({size_text(smallest)}), the smallest peak that was found for"
        f" {of}, its inputs and weights included",
        'ask for that much, ask for "min", or make the batch smaller',
    )
