"""Who is measured, under the names users know them by.

- `eager`: the model as it is;
- `checkpoint`: its blocks wrapped in `torch.utils.checkpoint`, non-reentrant, by hand;
- `torch.compile`: with default options; of a model with a Python loop, the part that is called in
  the loop (`torch.compile unrolled`: all of it);
- `budget=0.5`, `budget=0.1`: the same with torch's `activation_memory_budget`;
- `aggressive`: the same with torch's `aggressive_recomputation`;
- `echo`, `echo memory=min`, `echo memory=0.5`, `echo memory=0.6`, `echo memory=0.9`:
  `ecornn.compile`, with the default memory, the smallest, and, where they are named, such a part of
  what is held beside weights and batch when all is kept; recurrent layers of torch run on our
  kernels, as it has them do by default;
- `converted`, `echo converted`: the model, and `echo`, after `ecornn.convert`: its recurrent layers
  and cells are ours; where they are named;
- `ecornn.profiler`: the memory profiler's own figures, in a benchmark of their own;
- `…+graph`: the whole step, optimizer included, replayed from a CUDA graph; `torch.compile`'s where
  it is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ecornn.bench.training.cases import PROFILED, ModelCase
from ecornn.errors import InvalidInput

GRAPH = "+graph"


@dataclass(frozen=True)
class Contender:
    """`kind`: "eager", "checkpoint", "compile", "echo", "layers" or "profiler". `memory` and
    `codegen` are Echo's. `converted`: with layers of ours."""

    name: str
    kind: str
    graph: bool = False
    budget: float | None = None
    aggressive: bool = False
    unrolled: bool = False
    memory: str | float = "auto"
    codegen: str = "inductor"
    converted: bool = False

    @property
    def is_ours(self) -> bool:
        return self.kind in ("echo", "layers", "profiler")

    @property
    def compiles(self) -> bool:
        return self.kind in ("compile", "echo") and self.codegen == "inductor"

    @property
    def draws_as_eager(self) -> bool:
        """Dropout's masks are eager's at equal seeds; inductor makes its own."""
        return self.kind in ("eager", "checkpoint", "layers") or (
            self.is_ours and self.codegen == "eager"
        )


def replayed(contender: Contender) -> Contender:
    return replace(contender, name=contender.name + GRAPH, graph=True)


EAGER = Contender("eager", "eager")
CHECKPOINT = Contender("checkpoint", "checkpoint")
COMPILE = Contender("torch.compile", "compile")
BUDGETS = tuple(Contender(f"budget={b:g}", "compile", budget=b) for b in (0.5, 0.1))
AGGRESSIVE = Contender("aggressive", "compile", aggressive=True)
UNROLLED = Contender("torch.compile unrolled", "compile", unrolled=True)
ECHO = Contender("echo", "echo")
ECHO_MIN = Contender("echo memory=min", "echo", memory="min")
#: Between the other two, for models on which an option of torch's is; measured where it is named.
ECHO_WITHIN = tuple(Contender(f"echo memory={m:g}", "echo", memory=m) for m in (0.5, 0.6, 0.9))
#: Runs torch's own kernels in the order of the model: bitwise equal to it.
ECHO_EAGER = Contender("echo codegen=eager", "echo", codegen="eager")
ECHO_EAGER_MIN = Contender("echo memory=min codegen=eager", "echo", memory="min", codegen="eager")
CONVERTED = Contender("converted", "layers", converted=True)
ECHO_CONVERTED = Contender("echo converted", "echo", converted=True)
PROFILER = Contender("ecornn.profiler", "profiler")

#: By part, the most telling first.
CONTENDERS: dict[str, tuple[Contender, ...]] = {
    "step": (
        EAGER,
        # all that compile: as many as there are workers by default, so that it is waited for once
        ECHO,
        COMPILE,
        ECHO_MIN,
        replayed(ECHO),
        *BUDGETS,
        AGGRESSIVE,
        replayed(EAGER),
        CHECKPOINT,
        replayed(CHECKPOINT),
    ),
    "batch": (EAGER, ECHO, ECHO_MIN, CHECKPOINT, COMPILE, AGGRESSIVE),
    "check": (
        ECHO_EAGER,
        ECHO_EAGER_MIN,
        ECHO,
        ECHO_MIN,
        CHECKPOINT,
        COMPILE,
        *BUDGETS,
        AGGRESSIVE,
    ),
    "plan": (ECHO,),
    PROFILED: (PROFILER,),
}

NAMED_ONLY = (
    UNROLLED,
    replayed(COMPILE),
    *ECHO_WITHIN,
    *(CONVERTED, replayed(CONVERTED)),
    *(ECHO_CONVERTED, replayed(ECHO_CONVERTED)),
)
ALL = {c.name: c for c in (*(c for part in CONTENDERS.values() for c in part), *NAMED_ONLY)}


def contenders_for(
    case: ModelCase, device: str, names: Sequence[str] = (), *, unrolled: bool = False
) -> tuple[Contender, ...]:
    """Those of the case's part, or those named. `unrolled` adds the row of the model that
    is compiled as a whole, which takes minutes."""
    for name in names:
        if name not in ALL:
            raise InvalidInput("contender", repr(name), f"one of {', '.join(ALL)}", "name one")
    found = tuple(ALL[name] for name in names) or CONTENDERS[case.part]
    if unrolled and case.part == "step" and case.name == "nmt-50":
        found = (*found, UNROLLED)
    return tuple(contender for contender in found if device == "cuda" or not contender.graph)
