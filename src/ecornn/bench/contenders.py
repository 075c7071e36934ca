"""Who is measured, under the names users know them by.

A plain case is run by `ecornn` and `torch.nn`. A case of mixed lengths is run by

- `ecornn lengths`: the padded input with `lengths=`;
- `ecornn packed`, `torch.nn packed`: a PackedSequence that was made beforehand;
- `torch.nn padded`: the padded input and no lengths, so that it also computes the padding: what
  one runs who wants neither packing nor sorting.

On CUDA each is also replayed from a CUDA graph: the same name with `+graph`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import ecornn.nn
from ecornn.bench.cases import Case

OURS = "ecornn"
GRAPH = "+graph"


@dataclass(frozen=True)
class Contender:
    """`module` has LSTM, GRU and RNN. `form` is how the call is given its sequences: "plain",
    "lengths", "packed" or "padded"."""

    name: str
    module: Any
    form: str = "plain"
    graph: bool = False


PLAIN = (Contender("ecornn", ecornn.nn), Contender("torch.nn", torch.nn))

MIXED_LENGTHS = (
    Contender("ecornn lengths", ecornn.nn, "lengths"),
    Contender("ecornn packed", ecornn.nn, "packed"),
    Contender("torch.nn packed", torch.nn, "packed"),
    Contender("torch.nn padded", torch.nn, "padded"),
)


def contenders_for(case: Case, device: torch.device) -> tuple[Contender, ...]:
    called = MIXED_LENGTHS if case.lengths else PLAIN
    if device.type != "cuda":
        return called
    replayed = (Contender(c.name + GRAPH, c.module, c.form, graph=True) for c in called)
    return (*called, *replayed)


def is_ours(name: str) -> bool:
    return name.split()[0].removesuffix(GRAPH) == OURS


def is_replayed(name: str) -> bool:
    return name.endswith(GRAPH)
