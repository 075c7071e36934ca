"""What the plots of a file of results show, as data; `draw` makes pictures of it.

Both show the time of a step of the `rnn` benchmark's plain LSTM in one dtype: over the hidden size
for some batches, and over the batch for some hidden sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ecornn.bench.cases import Case
from ecornn.bench.contenders import EXCHANGE_FLOOR
from ecornn.bench.grids import RNN, STEPS
from ecornn.bench.results import Results, Row, layer_rows

DTYPE = "bf16"
#: In the legend's order.
CONTENDERS = ("ecornn+graph", "torch.nn+graph", "ecornn", "torch.nn", EXCHANGE_FLOOR.name)
#: Metric, and what it is called.
PASSES = (("forward_us", "forward"), ("train_us", "forward and backward"))
SYMBOLS = {"hidden": "H", "batch": "B"}


@dataclass(frozen=True)
class Line:
    """Points are (size, µs a time step), in the order of the sizes."""

    contender: str
    points: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Panel:
    title: str
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Plot:
    """`rows` of panels, one row a pass; `axis` says what their points lie over."""

    name: str
    title: str
    axis: str
    rows: tuple[tuple[Panel, ...], ...]


def plots_of(results: Results) -> tuple[Plot, ...]:
    """None for other benchmarks, and for files without a figure to show."""
    if results.benchmark != RNN.name:
        return ()
    measured = {case: rows for case, rows in layer_rows(results.rows).items() if _is_shown(case)}
    made = (
        _plot(results, measured, "hidden", "batch", (4, 16, 64)),
        _plot(results, measured, "batch", "hidden", (512, 1024)),
    )
    return tuple(plot for plot in made if plot.rows)


def _is_shown(case: Case) -> bool:
    return case == Case("lstm", case.hidden, case.batch, STEPS, DTYPE)


def _plot(
    results: Results,
    measured: Mapping[Case, Mapping[str, Row]],
    over: str,
    fixed: str,
    sizes: Iterable[int],
) -> Plot:
    """A panel for each pass and each size of `fixed`, over all measured sizes of `over`."""
    panels = tuple(
        tuple(
            Panel(f"{SYMBOLS[fixed]} = {size}, {called}", lines)
            for size in sizes
            if (lines := _lines(measured, over, {fixed: (size,)}, metric))
        )
        for metric, called in PASSES
    )
    where = results.environment.get("gpu") or "an unnamed GPU"
    return Plot(
        f"over-{over}",
        f"Microseconds a time step over {SYMBOLS[over]}: one LSTM layer, {DTYPE}, T = {STEPS}, "
        f"on {where}",
        SYMBOLS[over],
        tuple(row for row in panels if row),
    )


def _lines(
    measured: Mapping[Case, Mapping[str, Row]], over: str, where: dict[str, tuple[int]], metric: str
) -> tuple[Line, ...]:
    found: dict[str, dict[int, float]] = {name: {} for name in CONTENDERS}
    for case, rows in measured.items():
        if not case.matches(where):
            continue
        for name in CONTENDERS:
            time = rows[name].number(metric) if name in rows else None
            if time is not None:
                found[name][case.values()[over]] = time
    return tuple(Line(name, tuple(sorted(times.items()))) for name, times in found.items() if times)
