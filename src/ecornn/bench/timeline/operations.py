"""What a GPU ran during some calls, as data: the kind of each operation, and its time."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Operation(NamedTuple):
    """A kernel, a copy or a fill, by the name that the profiler has for it."""

    name: str
    start_ns: int
    duration_ns: int

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


#: What is neither, such as sums, casts and copies.
REST = "rest"
#: The first that matches a name is its kind. "steps": the recurrence itself, of cuDNN whatever is
#: named after its cells, and not the products between them. "products": those of whole sequences,
#: and of every step where no persistent kernel runs. "fills": marks among them.
PATTERNS = (
    ("steps", re.compile(r"^(forward|backward|exchange_floor)$")),
    ("products", re.compile(r"^(shares|gradients)$|gemm|gemv|nvjet|xmma|cutlass|splitK", re.I)),
    ("steps", re.compile(r"rnn|lstm|gru", re.I)),
    ("fills", re.compile(r"memset|FillFunctor", re.I)),
)
KINDS = (*dict.fromkeys(kind for kind, _ in PATTERNS), REST)

#: So many kernels are named, those that took the longest.
NAMED = 8
#: Names of templates are longer than anybody reads.
NAME_LENGTH = 60


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in PATTERNS if pattern.search(name)), REST)


def busy_ns(operations: Iterable[Operation]) -> int:
    """The time in which at least one ran: a kernel may begin before the one ahead has ended."""
    total = until = 0
    for one in sorted(operations, key=lambda operation: operation.start_ns):
        total += max(0, one.end_ns - max(until, one.start_ns))
        until = max(until, one.end_ns)
    return total


def summary(
    which: str, operations: Sequence[Operation], calls: int, steps: int
) -> dict[str, float | str]:
    """Microseconds a time step of `calls` calls in a row, by kind; what was waited for between
    operations; and in words, of one call, which took the longest."""
    begin = min(operation.start_ns for operation in operations)
    span = max(operation.end_ns for operation in operations) - begin
    took: dict[str, int] = dict.fromkeys(KINDS, 0)
    each: dict[str, list[int]] = defaultdict(list)
    for operation in operations:
        took[kind_of(operation.name)] += operation.duration_ns
        each[operation.name].append(operation.duration_ns)
    a_step = 1e-3 / calls / steps
    found: dict[str, float | str] = {f"{which}_{kind}_us": ns * a_step for kind, ns in took.items()}
    found[f"{which}_idle_us"] = (span - busy_ns(operations)) * a_step
    found[f"{which}_span_us"] = span * a_step
    found[f"{which}_operations"] = len(operations) / calls
    longest = sorted(each.items(), key=lambda one: -sum(one[1]))[:NAMED]
    found[f"{which}_longest"] = "; ".join(
        f"{sum(ns) * 1e-3 / calls:.1f} µs in {len(ns) / calls:g} × {name[:NAME_LENGTH]}"
        for name, ns in longest
    )
    return found
