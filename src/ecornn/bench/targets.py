"""What the measurements must show, as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ecornn.bench.cases import Where
from ecornn.bench.contenders import (
    EXCHANGE_FLOOR,
    FLOOR_CASES,
    GRAPH,
    KEEP_CASES,
    KEEP_GATES,
    KEEP_STATES,
    PLAIN_LSTM,
)


@dataclass(frozen=True)
class Target:
    """For every case of `benchmark` that `where` lets through: the peer's figure is `at_least` so
    many times the contender's, or the contender's `at_most` so many times the peer's."""

    name: str
    benchmark: str
    where: Where
    metric: str
    contender: str
    peer: str
    at_least: float | None = None
    at_most: float | None = None

    unit: ClassVar[str] = "×"

    def __str__(self) -> str:
        if self.at_most is not None:
            return f"{self.contender} takes ≤ {self.at_most:g}× the {self.metric} of {self.peer}"
        return f"{self.contender} is ≥ {self.at_least:g}× as fast as {self.peer} in {self.metric}"


@dataclass(frozen=True)
class MemoryTarget:
    """For every case of `benchmark` that `where` lets through: the contender's figure, in bytes,
    is `at_most` so many times T·B·H elements of the case's dtype. It has no peer."""

    name: str
    benchmark: str
    where: Where
    metric: str
    contender: str
    at_most: float

    unit: ClassVar[str] = " T·B·H"

    def __str__(self) -> str:
        return f"{self.contender} has {self.metric} ≤ {self.at_most:g} T·B·H elements"


LayerTarget = Target | MemoryTarget

METRICS = ("forward_us", "train_us")

CPU_TARGETS = (
    *(
        Target(
            "plain layers on the CPU cost no more than torch.nn's",
            "cpu",
            {"lengths": (False,)},
            metric,
            "ecornn",
            "torch.nn",
            at_most=1.05,
        )
        for metric in METRICS
    ),
    *(
        Target(
            "mixed lengths on the CPU cost little more than the padded run",
            "cpu",
            {"lengths": (True,)},
            metric,
            contender,
            "torch.nn padded",
            at_most=1.2,
        )
        for contender in ("ecornn lengths", "ecornn packed")
        for metric in METRICS
    ),
)

#: (hidden sizes, batches, dtypes): times as fast as torch.nn (forward, train), and the same with
#: both replayed from a CUDA graph. One LSTM layer, one direction.
RNN_TABLE: tuple[tuple[Any, ...], ...] = (
    ((256, 512, 1024), (1, 4), ("bf16", "fp16", "fp32"), (5, 4), (2.5, 2)),
    ((256, 512, 1024), (16,), ("bf16", "fp32"), (5, 4), (2.5, 2)),
    ((256, 512, 1024), (16,), ("fp16",), (1.3, 1.3), (1.1, 1.2)),
    ((256, 512, 1024), (64,), ("bf16", "fp32"), (2.5, 2.5), (1.5, 1.5)),
    ((256, 512, 1024), (64,), ("fp16",), (1.5, 1.5), (1.4, 1.4)),
    ((2048,), (1, 4, 16), ("bf16", "fp16"), (3, 2.5), (2, 1.8)),
    ((64, 128), (1, 4, 16, 64), ("bf16",), (8, 6), (3, 3)),
    ((64, 128), (1, 4, 16, 64), ("fp16", "fp32"), (1.3, 1.3), (1, 1)),
)


def _rnn_table() -> Iterator[Target]:
    for hidden, batches, dtypes, called, replayed in RNN_TABLE:
        where = {"hidden": hidden, "batch": batches, "dtype": dtypes}
        name = (
            f"LSTM, H = {', '.join(map(str, hidden))}; B = {', '.join(map(str, batches))}; "
            f"{', '.join(dtypes)}"
        )
        for suffix, factors in (("", called), (GRAPH, replayed)):
            for metric, factor in zip(METRICS, factors, strict=True):
                yield Target(
                    name,
                    "rnn",
                    {**PLAIN_LSTM, **where},
                    metric,
                    f"ecornn{suffix}",
                    f"torch.nn{suffix}",
                    at_least=factor,
                )


def _rnn_others() -> Iterator[Target]:
    sizes = {"hidden": (512, 1024), "batch": (4, 16), "dtype": ("bf16",)}
    one = {"layers": (1,), "bidirectional": (False,), "lengths": (False,)}
    kinds: tuple[tuple[str, dict[str, Any], str, str], ...] = (
        ("GRU", {**one, "cell": ("gru",)}, "ecornn", "torch.nn"),
        ("tanh-RNN", {**one, "cell": ("rnn_tanh",)}, "ecornn", "torch.nn"),
        ("bidirectional LSTM", {**one, "bidirectional": (True,)}, "ecornn", "torch.nn"),
        ("LSTM of two layers", {**one, "layers": (2,)}, "ecornn", "torch.nn"),
        ("LSTM with lengths", {**one, "lengths": (True,)}, "ecornn lengths", "torch.nn packed"),
    )
    for name, where, contender, peer in kinds:
        for metric in METRICS:
            yield Target(name, "rnn", {**sizes, **where}, metric, contender, peer, at_least=4)


#: Keeping the states alone keeps the output and the cell states, which are two sequences; the
#: bound leaves room for the last states. The backward pass then computes the gates anew.
KEEP_TARGETS: tuple[LayerTarget, ...] = (
    MemoryTarget(
        "LSTM that keeps states alone: memory between the passes",
        "rnn",
        KEEP_CASES,
        "kept_bytes",
        KEEP_STATES.name,
        at_most=2.1,
    ),
    MemoryTarget(
        "LSTM that keeps states alone: memory at the peak",
        "rnn",
        KEEP_CASES,
        "peak_bytes",
        KEEP_STATES.name,
        at_most=6,
    ),
    Target(
        "LSTM that keeps states alone: what it costs to compute the gates anew",
        "rnn",
        KEEP_CASES,
        "train_us",
        KEEP_STATES.name,
        KEEP_GATES.name,
        at_most=1.15,
    ),
)

FLOOR_TARGETS = (
    Target(
        "LSTM of small batches: how near it is to the exchange floor",
        "rnn",
        FLOOR_CASES,
        "forward_us",
        f"ecornn{GRAPH}",
        EXCHANGE_FLOOR.name,
        at_most=2,
    ),
)

TARGETS: tuple[LayerTarget, ...] = (
    *CPU_TARGETS,
    *_rnn_table(),
    *_rnn_others(),
    *KEEP_TARGETS,
    *FLOOR_TARGETS,
)
