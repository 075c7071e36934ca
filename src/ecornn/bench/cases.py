"""`Case`: one layer and one call that every contender is measured on, and filters over cases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from ecornn.errors import InvalidInput

DTYPES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu")

#: Written for every case; the other fields only where they differ from their default.
ALWAYS_WRITTEN = ("cell", "hidden", "batch", "steps", "dtype", "layers", "bidirectional")

#: Allowed values by the name of a field; a field that is not named may have any.
Where = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Case:
    """`input`: size of the input, the hidden size unless given. `initial`: the call passes an
    initial state. `lengths`: the sequences' lengths are spread evenly over 1 … `steps`."""

    cell: str
    hidden: int
    batch: int
    steps: int
    dtype: str = "fp32"
    layers: int = 1
    bidirectional: bool = False
    input: int | None = None
    initial: bool = False
    lengths: bool = False

    def __post_init__(self) -> None:
        for name, choices in (("cell", CELLS), ("dtype", tuple(DTYPES))):
            if getattr(self, name) not in choices:
                raise _bad(name, getattr(self, name), f"one of {', '.join(choices)}")
        for name in ("hidden", "batch", "steps", "layers", "input"):
            value = getattr(self, name)
            if name == "input" and value is None:
                continue
            if type(value) is not int or value < 1:
                raise _bad(name, value, "a whole number of at least 1")
        for name in ("bidirectional", "initial", "lengths"):
            if type(getattr(self, name)) is not bool:
                raise _bad(name, getattr(self, name), "true or false")

    @property
    def input_size(self) -> int:
        return self.hidden if self.input is None else self.input

    @property
    def states(self) -> int:
        return self.layers * (2 if self.bidirectional else 1)

    @property
    def output_size(self) -> int:
        return self.hidden * (2 if self.bidirectional else 1)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def sequence_bytes(self) -> int:
        """T·B·H elements of the case's dtype, the unit that memory is told in."""
        return self.steps * self.batch * self.hidden * self.torch_dtype.itemsize

    def values(self) -> dict[str, Any]:
        """Every field by name, the input's size filled in: what filters look at."""
        return {**vars(self), "input": self.input_size}

    def to_json(self) -> dict[str, Any]:
        default = {field.name: field.default for field in fields(self)}
        return {
            name: value
            for name, value in vars(self).items()
            if name in ALWAYS_WRITTEN or value != default[name]
        }

    @classmethod
    def from_json(cls, value: Any) -> Case:
        if not isinstance(value, dict):
            raise _bad("case", value, "an object")
        known = {field.name for field in fields(cls)}
        for name in value:
            if name not in known:
                raise _bad("case", name, f"keys among {', '.join(sorted(known))}")
        for name in ALWAYS_WRITTEN:
            if name not in value:
                raise _bad("case", f"none of the name {name!r}", f"the key {name!r}")
        if value.get("input") == value["hidden"]:
            value = {name: v for name, v in value.items() if name != "input"}
        return cls(**value)

    def matches(self, where: Where) -> bool:
        mine = self.values()
        return all(mine[name] in allowed for name, allowed in where.items())

    def __str__(self) -> str:
        parts = [
            f"{self.cell} {self.input_size}→{self.hidden}",
            f"B={self.batch}",
            f"T={self.steps}",
            self.dtype,
        ]
        said = (
            (self.layers > 1, f"{self.layers} layers"),
            (self.bidirectional, "bidirectional"),
            (self.initial, "initial state"),
            (self.lengths, f"lengths 1–{self.steps}"),
        )
        return ", ".join(parts + [text for holds, text in said if holds])


def parse_filter(text: str) -> Where:
    """`"cell=lstm hidden=256,512"` as a `Where`; an empty text lets every case through."""
    kinds = {field.name: str(field.type) for field in fields(Case)}
    where: dict[str, list[Any]] = {}
    for term in text.split():
        name, sign, listed = term.partition("=")
        if name not in kinds or not sign or not listed:
            raise InvalidInput(
                "cases",
                repr(term),
                f"NAME=VALUE[,VALUE …] with a name among {', '.join(kinds)}",
                'such as --cases "cell=lstm hidden=256,512"',
            )
        where[name] = [_read_value(name, kinds[name], value) for value in listed.split(",")]
    return where


def select(cases: Sequence[Case], where: Where) -> tuple[Case, ...]:
    """The cases that match; at least one must."""
    found = tuple(case for case in cases if case.matches(where))
    if not found:
        asked = " ".join(f"{name}={','.join(map(str, v))}" for name, v in where.items())
        raise InvalidInput(
            "cases",
            f"{asked!r}, which none of the {len(cases)} cases matches",
            "a filter that lets at least one through",
            "leave out a condition",
        )
    return found


def _read_value(name: str, kind: str, text: str) -> Any:
    if kind == "bool":
        known: dict[str, Any] = {"true": True, "false": False}
        if text.lower() in known:
            return known[text.lower()]
    elif kind == "str":
        choices = CELLS if name == "cell" else tuple(DTYPES)
        if text in choices:
            return text
        raise _bad(f"cases, {name}", text, f"one of {', '.join(choices)}")
    elif text.isdecimal():
        return int(text)
    expected = "true or false" if kind == "bool" else "a whole number"
    raise _bad(f"cases, {name}", text, expected)


def _bad(name: str, got: Any, expected: str) -> InvalidInput:
    return InvalidInput(name, repr(got), expected, "correct it")
