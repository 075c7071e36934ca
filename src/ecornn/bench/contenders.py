"""Who is measured, under the names users know them by.

A plain case is run by `ecornn` and `torch.nn`. A case of mixed lengths is run by

- `ecornn lengths`: the padded input with `lengths=`;
- `ecornn packed`, `torch.nn packed`: a PackedSequence that was made beforehand;
- `torch.nn padded`: the padded input and no lengths, so that it also computes the padding: what
  one runs who wants neither packing nor sorting.

On CUDA each is also replayed from a CUDA graph: the same name with `+graph`. Some plain cases have
more contenders there:

- `ecornn keep=states`, `ecornn keep=gates`: the layer told what to keep for the backward pass.
  Memory is counted of those that are called;
- `exchange floor+graph`: no layer, but its exchange of states from step to step and no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import ecornn.nn
from ecornn.bench.cases import Case, Where

OURS = "ecornn"
GRAPH = "+graph"
FLOOR_FORM = "floor"

#: The cases that the speed table, the plots and the contenders below speak of.
PLAIN_LSTM: Where = {
    "cell": ("lstm",),
    "layers": (1,),
    "bidirectional": (False,),
    "lengths": (False,),
}
#: Where gates take enough memory for it to matter which of the two is kept.
KEEP_CASES: Where = {**PLAIN_LSTM, "hidden": (1024,), "batch": (16, 64), "dtype": ("bf16",)}
#: Small batches have the least to compute between two exchanges of the state.
FLOOR_CASES: Where = {**PLAIN_LSTM, "hidden": (256, 512, 1024, 2048), "batch": (1, 4)}


@dataclass(frozen=True)
class Contender:
    """`module` has LSTM, GRU and RNN; their constructors get `options`. `form` is how the call is
    given its sequences: "plain", "lengths", "packed" or "padded". The form "floor" is no call of
    a layer, needs no module, and is only ever replayed."""

    name: str
    module: Any
    form: str = "plain"
    graph: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


PLAIN = (Contender("ecornn", ecornn.nn), Contender("torch.nn", torch.nn))

MIXED_LENGTHS = (
    Contender("ecornn lengths", ecornn.nn, "lengths"),
    Contender("ecornn packed", ecornn.nn, "packed"),
    Contender("torch.nn packed", torch.nn, "packed"),
    Contender("torch.nn padded", torch.nn, "padded"),
)

KEEP_STATES, KEEP_GATES = (
    Contender(f"ecornn keep={keep}", ecornn.nn, options={"keep": keep, "backend": "persistent"})
    for keep in ("states", "gates")
)

EXCHANGE_FLOOR = Contender("exchange floor" + GRAPH, None, FLOOR_FORM, graph=True)


def contenders_for(case: Case, device: torch.device) -> tuple[Contender, ...]:
    called: tuple[Contender, ...] = MIXED_LENGTHS if case.lengths else PLAIN
    if device.type != "cuda":
        return called
    called += (KEEP_STATES, KEEP_GATES) if case.matches(KEEP_CASES) else ()
    return (
        *called,
        *(replace(c, name=c.name + GRAPH, graph=True) for c in called),
        *((EXCHANGE_FLOOR,) if case.matches(FLOOR_CASES) else ()),
    )


def is_ours(name: str) -> bool:
    return name.split()[0].removesuffix(GRAPH) == OURS


def is_replayed(name: str) -> bool:
    return name.endswith(GRAPH)
