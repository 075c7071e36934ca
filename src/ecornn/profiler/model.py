"""`MemoryReport`: where the memory of one step went, as values.

Time is counted in operators, or in allocations where the allocator's own history was read. Time 0
is before the step; at time `t` the `t`-th operator runs, or the `t`-th allocation is made. A
storage is alive at the times `born` … `freed - 1`, or to the end where `freed` is None.

How the rows add up. Every byte at `peak_time` stands in exactly one row:

    peak_bytes    the sum of the rows whose kind is in `COUNTED`
                  = the sum of `timeline.bytes[kind][peak_time]` over these kinds
                  = for the kinds in `TENSORS`, the sum of `held.bytes` over what is alive then
    device_bytes  the sum of all rows: also what the allocator has reserved and nobody uses, and
                  what only the driver sees (its context, other processes)

On the CPU and on meta tensors there is no allocator to ask: all rows are of `TENSORS`, and
`peak_bytes` is exactly the storages' bytes. On CUDA `peak_bytes` is the allocator's own count.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple

from ecornn.errors import EcornnError, InvalidInput

#: What a tensor is for. "weights" are parameters and buffers; "feature maps" are kept for the
#: backward pass; "workspace" is anything else made during the step; "other" was there before it.
TENSORS = (
    "weights",
    "gradients",
    "optimizer state",
    "feature maps",
    "workspace",
    "inputs",
    "other",
)
#: What the allocator counts beside tensors: the rounding of each to its block, and memory without
#: a tensor, such as scratch inside an operator. The latter is a difference, and negative where
#: tensors lie in memory that the allocator does not count.
ALLOCATOR = ("rounding", "no tensor")
#: The kinds whose rows add up to `peak_bytes`.
COUNTED = TENSORS + ALLOCATOR
#: Beyond the allocator's count: reserved by it and unused, and all else on the device.
BEYOND = ("reserved, unused", "driver")
KINDS = COUNTED + BEYOND

PHASES = ("before", "forward", "backward", "optimizer")
FORMAT = 1
_MAKE = "_make"
#: One thread makes what is missing, others that ask meanwhile wait.
_MAKING = RLock()


@dataclass(frozen=True)
class Held:
    """One storage, however many views of it there are."""

    id: int
    bytes: int
    #: With the allocator's rounding; `bytes` where there is none.
    allocated_bytes: int
    #: Empty, as `dtype` is, where it is not known: only the allocator has seen it.
    shape: tuple[int, ...]
    dtype: str
    kind: str
    #: Path of the module it belongs to, or in whose call it was made; "" is the model itself, and
    #: everything outside of it.
    module: str
    #: Such as "aten.addmm"; where operators were not observed, the function that called it,
    #: "functional.relu", or the node of the backward pass; "" if it was there before the step.
    operator: str
    #: Innermost line outside of torch, "path/file.py:12 in forward"; "" if there was none.
    line: str
    born: int
    freed: int | None
    #: The operators, "module: operator", whose backward pass reads it.
    kept_by: tuple[str, ...]
    #: One sentence: why it is alive until then.
    why: str

    @classmethod
    def made_of(cls, fields: dict[str, Any]) -> Held:
        """From all fields: a step has thousands, and the usual way takes four times as long."""
        held = object.__new__(cls)
        object.__setattr__(held, "__dict__", fields)
        return held

    def alive_at(self, time: int) -> bool:
        return self.born <= time and (self.freed is None or time < self.freed)


@dataclass(frozen=True)
class Row:
    """What one module holds of one kind at the peak."""

    module: str
    kind: str
    bytes: int
    #: How many storages.
    count: int


@dataclass(frozen=True)
class WhatIf:
    """A module, with all inside it, if its feature maps were made again in the backward pass."""

    module: str
    #: Feature maps when they take most, which is mostly at the peak.
    kept_bytes: int
    #: By Echo's analysis: no product is run again, no draw repeated. What is kept in their stead
    #: is taken off.
    cheap_frees: int
    cheap_seconds: float
    #: With the module in a checkpoint: all of it is run again.
    whole_frees: int
    whole_seconds: float


@dataclass(frozen=True)
class Timeline:
    """Columns over time; all have the same length, `len(timeline)`."""

    phase: tuple[str, ...]
    operator: tuple[str, ...]
    module: tuple[str, ...]
    #: By kind, each of `COUNTED` that occurs.
    bytes: Mapping[str, tuple[int, ...]]

    def __len__(self) -> int:
        return len(self.phase)

    def total(self, time: int) -> int:
        return sum(column[time] for column in self.bytes.values())


class UnreadableReport(EcornnError, RuntimeError):
    """What was observed could not be made into a report."""


class Part(NamedTuple):
    """Some fields of a report, and what makes those that are still missing."""

    fields: Mapping[str, Any]
    rest: Callable[[], Part] | None = None


@dataclass(frozen=True)
class MemoryReport:
    """A value. What takes long to make is made when it is first asked for; until then it holds
    numbers and texts, and nothing of the model's."""

    #: "cpu", "meta" or "cuda:0": tensors elsewhere are not counted, and a note says how much.
    device: str
    peak_time: int
    #: Largest first.
    rows: tuple[Row, ...]
    #: Every storage of the step, in the order of their birth.
    held: tuple[Held, ...]
    timeline: Timeline
    #: What cannot be seen or was decided, in sentences.
    #: Like `what_if`, no attribute of the class: it may be missing here, and then be made.
    notes: tuple[str, ...] = field(default_factory=tuple)
    #: What the step raised, if it did; the report then ends there.
    error: str | None = None
    #: Name of the device, versions.
    environment: Mapping[str, str] = field(default_factory=dict)
    #: What one time is: an "operator" or an "allocation".
    unit: str = "operator"
    #: By module, most feature maps first; empty unless the profile was asked for it.
    what_if: tuple[WhatIf, ...] = field(default_factory=tuple)

    @classmethod
    def made_later(cls, make: Callable[[], Part] | None, **known: Any) -> MemoryReport:
        """The fields that are not `known` are made when the first of them is asked for: a step in
        the midst of a training run then pays for being observed, and who reads pays for reading.
        A part may leave others for later again: who looks at the rows alone needs no storages,
        which take as long to tell as all the rest."""
        report = object.__new__(cls)
        report.__dict__.update(known, **{_MAKE: make})
        return report

    def __getattr__(self, name: str) -> Any:
        """Called for what is not there."""
        if name in type(self).__dataclass_fields__:
            with _MAKING:
                while name not in self.__dict__ and self.__dict__.get(_MAKE) is not None:
                    self._make_more()
            if name in self.__dict__:  # by this thread or by another
                return self.__dict__[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def _make_more(self) -> None:
        try:
            part = self.__dict__[_MAKE]()
        except Exception as error:
            # Not as it is: an AttributeError would look as if the report had no such field.
            told = f"{type(error).__name__}: {error}"
            raise UnreadableReport(
                f"the step was observed, but its report could not be made: {told}"
            ) from error
        self.__dict__.update(part.fields, **{_MAKE: part.rest})

    def __getstate__(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @property
    def peak_bytes(self) -> int:
        return sum(row.bytes for row in self.rows if row.kind in COUNTED)

    @property
    def device_bytes(self) -> int:
        return sum(row.bytes for row in self.rows)

    def at(self, time: int) -> tuple[Held, ...]:
        """What is alive at `time`, largest first."""
        alive = (held for held in self.held if held.alive_at(time))
        return tuple(sorted(alive, key=lambda held: (-held.bytes, held.id)))

    @property
    def at_peak(self) -> tuple[Held, ...]:
        return self.at(self.peak_time)

    def by_kind(self) -> dict[str, int]:
        """Bytes at the peak, in the order of `KINDS`, without those that do not occur."""
        found = {kind: sum(r.bytes for r in self.rows if r.kind == kind) for kind in KINDS}
        return {kind: count for kind, count in found.items() if count}

    def by_module(self, depth: int | None = None) -> dict[str, int]:
        """Bytes of `TENSORS` at the peak by module, largest first; `depth`: names of a path."""
        found: dict[str, int] = {}
        for row in self.rows:
            if row.kind in TENSORS:
                names = row.module.split(".")
                path = row.module if depth is None else ".".join(names[:depth])
                found[path] = found.get(path, 0) + row.bytes
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def __str__(self) -> str:
        from ecornn.profiler.render import as_text

        return as_text(self)

    def __repr__(self) -> str:
        return (
            f"MemoryReport({self.peak_bytes:,} bytes on {self.device}, {len(self.held)} storages)"
        )

    def to_html(self) -> str:
        """A page of its own, without anything from elsewhere."""
        from ecornn.profiler.render import to_html

        return to_html(self)

    def write(self, path: str | Path) -> None:
        """To .html, .json, .csv, .trace.json, .png, .svg or .pdf: the suffix says which."""
        from ecornn.profiler.render import write

        write(self, Path(path))

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> MemoryReport:
        told: dict[str, Any] = json.loads(text)
        if told.pop("format", None) != FORMAT:
            raise InvalidInput(
                "text", "something else", f"a report of format {FORMAT}", "profile the step again"
            )
        timeline = told.pop("timeline")
        columns = {kind: tuple(column) for kind, column in timeline.pop("bytes").items()}
        texts = {name: tuple(column) for name, column in timeline.items()}
        held = [
            Held(**{**one, "shape": tuple(one["shape"]), "kept_by": tuple(one["kept_by"])})
            for one in told.pop("held")
        ]
        return cls(
            rows=tuple(Row(**row) for row in told.pop("rows")),
            held=tuple(held),
            timeline=Timeline(**texts, bytes=columns),
            notes=tuple(told.pop("notes")),
            what_if=tuple(WhatIf(**one) for one in told.pop("what_if", ())),
            **told,
        )


def rows_of(held: Sequence[Held], time: int) -> list[Row]:
    """What is alive at `time`, by module and kind, largest first."""
    found: dict[tuple[str, str], list[int]] = {}
    for one in held:
        if one.alive_at(time) and one.bytes:
            found.setdefault((one.module, one.kind), []).append(one.bytes)
    rows = [Row(module, kind, sum(sizes), len(sizes)) for (module, kind), sizes in found.items()]
    return largest_first(rows)


def largest_first(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (-row.bytes, KINDS.index(row.kind), row.module))
