"""Plots as SVG files, by matplotlib, which is an extra: the same plot is the same file."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ecornn.bench.contenders import EXCHANGE_FLOOR
from ecornn.bench.plot import CONTENDERS, Line, Panel, Plot

#: Colour, line and mark: a colour a library, whole lines for what is replayed from a graph.
STYLES = {
    "ecornn+graph": ("tab:blue", "-", "o"),
    "ecornn": ("tab:blue", "--", "o"),
    "torch.nn+graph": ("tab:orange", "-", "s"),
    "torch.nn": ("tab:orange", "--", "s"),
    EXCHANGE_FLOOR.name: ("black", ":", "^"),
}
PANEL_INCHES = (3.6, 3.0)

SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "ecornn",  # else the names of a file's parts differ from run to run
    "svg.fonttype": "none",  # text stays text: small files, alike whichever fonts are here
    "font.size": 9,
}
#: No date and no version, which would change a file whose plot did not change.
METADATA = {"Date": None, "Creator": None}


def missing() -> str | None:
    """What has to be installed before `draw` works; None if nothing."""
    if find_spec("matplotlib") is None:
        return "matplotlib is not installed; pip install 'ecornn[plot]'"
    return None


def draw(plot: Plot, path: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever the user's own settings are
        matplotlib.rcParams.update(SETTINGS)
        rows, columns = len(plot.rows), max(len(row) for row in plot.rows)
        width, height = PANEL_INCHES
        figure = Figure(figsize=(width * columns, height * rows + 0.8), layout="constrained")
        figure.suptitle(plot.title)
        # One scale for all panels of a pass: they are there to be compared.
        axes = figure.subplots(rows, columns, sharex=True, sharey="row", squeeze=False)
        shown: dict[str, Any] = {}
        for row, panels in enumerate(plot.rows):
            axes[row, 0].set_ylabel("µs a time step")
            for column in range(columns):
                if column < len(panels):
                    shown |= _draw_panel(axes[row, column], panels[column])
                else:
                    axes[row, column].set_visible(False)
        _mark_sizes(axes, plot)
        names = [name for name in CONTENDERS if name in shown]
        handles = [shown[name] for name in names]
        figure.legend(handles, names, loc="outside lower center", ncols=2 * columns)
        figure.savefig(path, format="svg", metadata=METADATA)


def _draw_panel(axes: Any, panel: Panel) -> dict[str, Any]:
    """The drawn lines by contender."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    axes.set_title(panel.title)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.grid(visible=True, linewidth=0.4)
    return {line.contender: _draw_line(axes, line) for line in panel.lines}


def _mark_sizes(axes: Any, plot: Plot) -> None:
    """Ticks at the sizes that were measured, in any panel: they share the axis."""
    lines = [line for row in plot.rows for panel in row for line in panel.lines]
    axes[0, 0].set_xticks(sorted({size for line in lines for size, _ in line.points}))
    for lowest in axes[-1]:
        lowest.set_xlabel(plot.axis)


def _draw_line(axes: Any, line: Line) -> Any:
    colour, style, mark = STYLES[line.contender]
    sizes, times = zip(*line.points, strict=True)
    (drawn,) = axes.plot(sizes, times, style, color=colour, marker=mark, markersize=4)
    return drawn
