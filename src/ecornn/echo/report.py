"""What was decided for the graphs of a model, as plain values that outlive the graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import fx

from ecornn.echo.keep_told import RecurrentLayer, layers_of
from ecornn.echo.options import Memory
from ecornn.echo.origins import module_path, source_line
from ecornn.echo.pipeline import Candidate, Decision
from ecornn.echo.plan.groups import run_again
from ecornn.echo.schedule import backward_program, saved


@dataclass(frozen=True)
class Value:
    """A result of the forward pass that the backward pass needs."""

    name: str
    operator: str
    module: str  # path of the module that made it
    line: str  # of the user's code
    bytes: int
    kept: bool
    runs: int  # how often the backward pass makes it again
    seconds: float  # that takes
    why: str


@dataclass(frozen=True)
class Foretold:
    """Bytes of what runs: of the code that inductor has generated, or of the operators that are run
    one by one. All but `inputs` are beside what is there when the step begins."""

    inputs: int  # of the graph, weights among them
    forward: int  # the most during the forward pass
    results: int  # the model's own, there from then on
    kept: int  # between the passes, beside those
    source: str
    backward: int = 0  # the most during the backward pass
    gradients: int = 0  # of weights, there afterwards

    def peak(self, calls: int = 1) -> int:
        """The caller's inputs included. `calls`: as in `Estimate.peak`."""
        earlier = (calls - 1) * self.kept
        return self.inputs + earlier + max(self.forward, self.backward)


@dataclass(frozen=True)
class Choice:
    """`peak_bytes` is an estimate at the time of planning, to compare plans by."""

    strategy: str
    peak_bytes: int
    kept_bytes: int
    seconds_added: float


@dataclass
class GraphReport:
    name: str
    codegen: str
    codegen_reason: str
    memory: Memory
    calls: int = 1
    #: Was the whole step rehearsed that the graph is a part of, and found to fit?
    within_step: bool = False
    #: None until a backward pass was planned; a graph that needs no gradient never has one.
    chosen: Choice | None = None
    keep_all: Choice | None = None
    candidates: list[Choice] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    fallback: str | None = None
    limit_bytes: int | None = None
    #: With "auto": what the GPU has for it, if a plan of little time would need more.
    gpu_bytes: int | None = None
    limit_seconds: float = 0.0
    step_seconds: float = 0.0
    #: Where times come from, if some were measured.
    times: str = ""
    values: list[Value] = field(default_factory=list)
    #: Layers of this package that are traced as operators, and what they keep.
    recurrent: list[RecurrentLayer] = field(default_factory=list)
    foretold: Foretold | None = None
    #: Why it is None, or says nothing of the backward pass.
    not_foretold: str | None = "not compiled yet"
    #: Products with a vector that are written as sums.
    vector_products: int = 0
    #: Sums of rows with one entry that are written as that.
    single_sums: int = 0
    #: Output layers that are one operator with their losses, in sentences.
    output_losses: list[str] = field(default_factory=list)
    #: Cells of torch that are written out as elementwise operators.
    fused_cells: int = 0
    #: Which kept results have another form, in sentences.
    forms: list[str] = field(default_factory=list)
    #: Plans that were compiled to choose among them, and the peaks of their code.
    code_of: list[tuple[str, int]] = field(default_factory=list)
    #: It is compiled only to see what it would hold.
    ahead: bool = False
    #: How the weights' gradients of its calls are added up; None if autograd does it.
    sums: str | None = None

    @property
    def predicted_peak_bytes(self) -> int | None:
        """Of both passes as they will run, this graph's inputs and weights included."""
        if self.foretold is None or self.not_foretold is not None:
            return None
        return self.foretold.peak(self.calls)

    @property
    def over_budget(self) -> str | None:
        """That a budget in bytes is not met after all, in a sentence."""
        found, limit = self.predicted_peak_bytes, self.limit_bytes
        if found is None or limit is None or found <= limit or self.within_step or self.ahead:
            return None
        return f"{found:,} bytes are predicted, {limit:,} were asked for"

    def decided(self, joint: fx.GraphModule, decision: Decision) -> None:
        calls = decision.request.calls
        self.calls, self.fallback = calls, decision.fallback
        self.refused = list(decision.refused)
        self.limit_bytes, self.limit_seconds = decision.limits.bytes, decision.limits.seconds
        if decision.passes is None:
            return
        self.chosen = _choice(decision.chosen, calls)
        self.candidates = [_choice(candidate, calls) for candidate in decision.candidates]
        self.keep_all = next((c for c in self.candidates if c.strategy == "keep all"), None)
        self.step_seconds = decision.step_seconds
        self.times = "" if decision.prices is None else decision.prices.told
        self.recurrent = layers_of(joint, decision)
        if self.codegen == "eager":
            self.foretold, self.not_foretold = of_operators(decision), None
        self.values = _values(joint, decision)


@dataclass
class Report:
    """`most`: older graphs are forgotten beyond this number."""

    graphs: list[GraphReport] = field(default_factory=list)
    most: int | None = None

    def add(self, told: GraphReport) -> None:
        self.graphs.append(told)
        if self.most is not None:
            del self.graphs[: -self.most]

    def forget(self, told: GraphReport) -> None:
        self.graphs[:] = [graph for graph in self.graphs if graph is not told]


def _choice(candidate: Candidate, calls: int) -> Choice:
    found = candidate.estimate
    return Choice(candidate.strategy, found.peak(calls), found.kept_bytes, found.seconds_added)


def of_operators(decision: Decision) -> Foretold:
    """Of operators that are run one by one, which is what an estimate simulates."""
    passes, found = decision.passes, decision.chosen.estimate
    assert passes is not None
    operations, storages = passes.graph.operations, passes.graph.storages

    def held(some: Iterable[int | None]) -> set[int]:
        return {s for i in some if i is not None for s in operations[i].holds}

    theirs = (*passes.graph.inputs, *passes.graph.constants)
    inputs = held(i for i in theirs if i not in passes.backward)
    results = held(passes.graph.outputs[: passes.forward_outputs]) - inputs
    gradients = held(passes.graph.outputs[passes.forward_outputs :]) - inputs - results
    count = partial(_bytes, storages)
    return Foretold(
        inputs=count(inputs),
        forward=found.forward_peak - count(inputs),
        results=count(results),
        kept=found.kept_bytes,
        source="operators one by one",
        backward=found.backward_peak + found.beside - count(inputs),
        gradients=count(gradients),
    )


def _bytes(storages: Sequence[int], some: Iterable[int]) -> int:
    return sum(storages[s] for s in some)


def _values(joint: fx.GraphModule, decision: Decision) -> list[Value]:
    """Of torch's own splits it is known what they keep, not why."""
    passes, prices = decision.passes, decision.prices
    assert passes is not None
    assert prices is not None
    operations = passes.graph.operations
    nodes = {node.name: node for node in joint.graph.nodes}
    plan = decision.chosen.plan
    between, runs = _of_split(decision)
    again = run_again(passes, plan.kept) if plan else frozenset[int]()
    found = []
    makers: dict[int, int] = {}  # by storage
    for i, operation in enumerate(operations):
        for storage in operation.holds:
            makers.setdefault(storage, i)
    counted: set[int] = set(passes.held_anyway)  # a storage counts for the first that refers to it
    for i in sorted((passes.needed | set(between)) - set(passes.graph.inputs)):
        operation = operations[i]
        held = not set(operation.holds) - passes.held_anyway
        own = set(operation.holds) - counted
        if operation.kind in ("constant", "number") or (operation.kind == "view" and not own):
            continue
        counted |= own
        kept = i in between
        made = operations[min((makers[s] for s in own or operation.holds), default=i)]
        node = nodes[made.name]
        found.append(
            Value(
                *(operation.name, made.target, module_path(node), source_line(node)),
                bytes=sum(passes.graph.storages[s] for s in own),
                kept=kept,
                runs=runs[i],
                seconds=runs[i] * prices.seconds[i],
                why=_why(operation.kind, kept, held, i in again, plan is not None),
            )
        )
    return found


def _of_split(decision: Decision) -> tuple[set[int], Counter[int]]:
    """(results passed between the passes, how often each operation is run again)"""
    passes, plan = decision.passes, decision.chosen.plan
    assert passes is not None
    if plan is not None:
        between = saved(passes, plan.kept)
        return set(between), Counter(backward_program(passes, between, plan.window).again(passes))
    place = {operation.name: i for i, operation in enumerate(passes.graph.operations)}
    nodes = list(decision.modules[1].graph.nodes)
    passed = {place[n.name] for n in nodes if n.op == "placeholder" and n.name in place}
    made = (place[n.name] for n in nodes if n.op != "placeholder" and n.name in place)
    return passed - passes.backward, Counter(i for i in made if i not in passes.backward)


def _why(kind: str, kept: bool, held: bool, again: bool, ours: bool) -> str:
    if kept and held:
        return "there anyway: an input or a result"
    if kept:
        return {
            "product": "a product, which is not run again",
            "random": "drawn at random: another draw would be another number",
            "opaque": "not known to give the same when it is run again",
        }.get(kind, "no larger than what it would be made of again" if ours else "torch keeps it")
    return "made again from smaller or shared results" if again else "torch makes it again"
