"""What the files of results say at a glance: the tables at the top of the page, and the README's.

Every figure is computed from rows. A range goes from the smallest to the largest figure of all
cases that a line speaks of, those among them that the planner leaves to torch's own kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ecornn.bench.cases import Case, Where
from ecornn.bench.compare import ratio
from ecornn.bench.contenders import GRAPH, PLAIN_LSTM
from ecornn.bench.grids import BATCHES, RNN
from ecornn.bench.markdown import NONE, both, digits, figure, table
from ecornn.bench.results import Results, Row, layer_rows, rows_by_case
from ecornn.bench.training.cases import BENCHMARK, NAMED, ModelCase
from ecornn.bench.training.report import batch_over_eager, largest_batch
from ecornn.errors import InvalidInput

MIB = 2**20
PASSES = ("forward_us", "train_us")
CALLED, REPLAYED = "", GRAPH

#: Between these lines of a page stands what `ecornn bench report` makes.
BEGIN = "<!-- made by `ecornn bench report` from benchmarks/results: do not edit -->"
END = "<!-- end of what is made -->"

SPEED = """\
**Speed of the layers, as a multiple of `torch.nn`'s**, on {gpu}: forward / training (forward and \
backward), from the worst to the best case. 256 time steps, as many inputs as units. Both are \
replayed from a CUDA graph, where launches cost nothing and `torch.nn` is at its best.
"""
SPEED_CALLED = """\
The same, both called as usual:
"""
STEPS = """\
**Memory and time of training steps of whole models**, on {gpu}: the peak in MiB, how many times \
smaller it is than in eager mode, and the time of a step divided by eager mode's (called / \
replayed from a CUDA graph) and by that of `torch.compile` (called). `echo` is \
`ecornn.compile(model)`, `min` is `ecornn.compile(model, memory="min")`.
"""
BATCHES_TOLD = """\
**The largest batch that trains in {gib:g} GiB**, on {gpu}, and how many times as many samples a \
second are seen with Echo's as with eager mode's. ≥: a larger one may fit, for which there was no \
time.
"""
#: What people call the benchmark's models.
MODELS = {
    "nmt": "LSTM translator with attention",
    "speech": "speech model like DeepSpeech 2",
    "lstm-lm": "LSTM language model",
    "gpt2": "decoder-only transformer (GPT-2)",
    "transformer": "encoder-decoder transformer",
    "resnet50": "ResNet-50",
}


@dataclass(frozen=True)
class Line:
    """Cases that are told of together, and who is compared in them."""

    name: str
    where: Where
    ours: str = "ecornn"
    peer: str = "torch.nn"


WIDE: Where = {"hidden": (256, 512, 1024)}
BF16: Where = {"hidden": (512, 1024), "batch": (4, 16), "dtype": ("bf16",), "lengths": (False,)}
LINES = (
    Line("LSTM, 64 or 128 units", {**PLAIN_LSTM, "hidden": (64, 128), "batch": BATCHES}),
    Line("LSTM, 256 to 1,024 units, 1 or 4 sequences", {**PLAIN_LSTM, **WIDE, "batch": (1, 4)}),
    Line("LSTM, 256 to 1,024 units, 16 sequences", {**PLAIN_LSTM, **WIDE, "batch": (16,)}),
    Line("LSTM, 256 to 1,024 units, 64 sequences", {**PLAIN_LSTM, **WIDE, "batch": (64,)}),
    Line("LSTM, 2,048 units, 1 to 16 sequences", {**PLAIN_LSTM, "hidden": (2048,)}),
    Line("GRU, 512 or 1,024 units, 4 or 16 sequences", {**BF16, "cell": ("gru",)}),
    Line("RNN, the same", {**BF16, "cell": ("rnn_tanh",)}),
    Line("LSTM of both directions, the same", {**BF16, "bidirectional": (True,)}),
    Line("LSTM of two layers, the same", {**BF16, "layers": (2,)}),
    Line(
        "LSTM, sequences of 1 to 256 steps, the same",
        {**BF16, "lengths": (True,)},
        "ecornn lengths",
        "torch.nn packed",
    ),
)
SHOWN = ("bf16", "fp16", "fp32")


def glance(files: Mapping[str, Results], *, whole: bool = False) -> str:
    """The tables, of files of both benchmarks that have them; `whole`: of called layers too."""
    parts: list[str] = []
    for results in files.values():
        where = {"gpu": results.environment.get("gpu") or "an unnamed GPU"}
        if results.benchmark == RNN.name and (replayed := speed(results, REPLAYED)):
            parts += [SPEED.format(**where), replayed]
            parts += [SPEED_CALLED, speed(results, CALLED)] if whole else []
        if results.benchmark == BENCHMARK and (found := steps(results)):
            parts += [STEPS.format(**where), found]
            limits = {case.memory_gib for case, _ in _models(results, "batch")}
            if len(limits) == 1 and (sizes := batches(results)):
                parts += [BATCHES_TOLD.format(gib=limits.pop(), **where), sizes]
    return "\n".join(part for part in parts if part)


def speed(results: Results, how: str) -> str:
    """A line for some cells and sizes, a column for each dtype."""
    cases = layer_rows(results.rows)
    body = [[line.name, *(_of_dtype(cases, line, dtype, how) for dtype in SHOWN)] for line in LINES]
    told = [cells for cells in body if set(cells[1:]) != {NONE}]
    return table(["layer", *SHOWN], told) if told else ""


def _of_dtype(cases: Mapping[Case, Mapping[str, Row]], line: Line, dtype: str, how: str) -> str:
    found: dict[str, list[float]] = {metric: [] for metric in PASSES}
    for case, rows in cases.items():
        if case.dtype != dtype or not case.matches(line.where):
            continue
        mine, theirs = rows.get(line.ours + how), rows.get(line.peer + how)
        if mine is None or theirs is None:
            continue
        for metric, times in found.items():
            if (one := ratio(mine, theirs, metric)) is not None:
                times.append(one)
    return both(span(times) for times in found.values()) if all(found.values()) else NONE


def span(found: Sequence[float]) -> str:
    low, high = min(found), max(found)
    ends = [f"{one:.2f}" if one < 10 else digits(one) for one in (low, high)]
    return f"{ends[0]}×" if ends[0] == ends[1] else f"{ends[0]}–{ends[1]}×"


def _models(results: Results, part: str) -> Iterator[tuple[ModelCase, Mapping[str, Row]]]:
    """The cases of a part with their rows, in the benchmark's own order."""
    found = [
        (case, rows)
        for case, rows in rows_by_case(results.rows).items()
        if isinstance(case, ModelCase) and case.part == part
    ]
    order = {name: place for place, name in enumerate(NAMED)}
    yield from sorted(found, key=lambda one: order.get(one[0].name, len(order)))


def steps(results: Results) -> str:
    """A line for each model."""
    heads = ["model", "eager", "torch.compile", "echo", "", "min", ""]
    heads += ["echo's time ÷ eager", "÷ torch.compile"]
    body = []
    for case, rows in _models(results, "step"):
        if "echo" not in rows:
            continue
        eager, ours, least = (rows.get(name) for name in ("eager", "echo", "echo memory=min"))
        times = [_slower(rows, "echo" + how, "eager" + how) for how in (CALLED, REPLAYED)]
        body.append(
            [
                _named(case),
                *(_peak(rows.get(name)) for name in ("eager", "torch.compile", "echo")),
                _smaller(ours, eager),
                _peak(least),
                _smaller(least, eager),
                both(times),
                _slower(rows, "echo", "torch.compile"),
            ]
        )
    return table(heads, body) if body else ""


def _named(case: ModelCase) -> str:
    words = "" if case.length is None else f", {case.length} words"
    batch = "" if case.batch is None else f", batch {case.batch}"
    return f"{MODELS.get(case.model, case.model)}{words}{batch}"


def _peak(row: Row | None) -> str:
    value = None if row is None else row.number("peak_bytes")
    return figure(None if value is None else value / MIB, "{:,.0f}")


def _smaller(row: Row | None, eager: Row | None) -> str:
    if row is None or eager is None:
        return NONE
    return figure(ratio(row, eager, "peak_bytes"), "{:.2f}×")


def _slower(rows: Mapping[str, Row], ours: str, peer: str) -> str:
    mine, theirs = rows.get(ours), rows.get(peer)
    if mine is None or theirs is None:
        return NONE
    found = ratio(mine, theirs, "step_ms")
    return figure(1 / found if found else None, "{:.2f}×")


def batches(results: Results) -> str:
    """A line for each model whose largest batch was looked for."""
    heads = ["model", "eager", "torch.compile", "echo", "÷ eager", "min", "÷ eager"]
    heads += ["echo's samples a second ÷ eager's"]
    body = []
    for case, rows in _models(results, "batch"):
        if "echo" not in rows:
            continue
        ours, eager = rows["echo"], rows.get("eager")
        faster = None if eager is None else ratio(eager, ours, "samples_per_s")
        body.append(
            [
                _named(case),
                *(_found(rows, name) for name in ("eager", "torch.compile")),
                *(of(rows, "echo") for of in (_found, _times_larger)),
                *(of(rows, "echo memory=min") for of in (_found, _times_larger)),
                figure(faster, "{:.2f}×"),
            ]
        )
    return table(heads, body) if body else ""


def _found(rows: Mapping[str, Row], name: str) -> str:
    return largest_batch(rows[name], rows) if name in rows else NONE


def _times_larger(rows: Mapping[str, Row], name: str) -> str:
    return batch_over_eager(rows[name], rows) if name in rows else NONE


def put_into(page: str, made: str, where: str) -> str:
    """`page` with `made` between its two marks; `where` names it for people."""
    before, begin, rest = page.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InvalidInput(
            where,
            "a page without the two lines between which figures stand",
            f"the lines {BEGIN!r} and {END!r}",
            "add them where the figures are to stand",
        )
    return f"{before}{begin}\n{made}\n{end}{after}"


def targets_met(counted: Iterable[tuple[str, str]]) -> str:
    """Of each section, named as it is headed, how many of its targets are met."""
    return "".join(f"- [{title}](#{anchor(title)}): {tally}\n" for title, tally in counted)


def anchor(title: str) -> str:
    """Where a heading is found in its page, as GitHub names it."""
    kept = "".join(c for c in title.lower() if c.isalnum() or c in " -_")
    return kept.replace(" ", "-")
