"""A report as a picture for a paper, by matplotlib, which is an extra."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ecornn.errors import InvalidInput
from ecornn.profiler.model import COUNTED, MemoryReport
from ecornn.profiler.render.kinds import COLOURS, module_text
from ecornn.profiler.render.timeline import marks_of, times_to_draw
from ecornn.sizes import UNITS, size_text

FORMATS = (".png", ".svg", ".pdf")
INCHES = (7.0, 5.6)
DOTS_PER_INCH = 200
#: Modules with a bar; the others are one.
BARS = 12
NAME_LENGTH = 40
SETTINGS: dict[Any, Any] = {
    "font.size": 8,
    "svg.hashsalt": "ecornn",  # else the names of a file's parts differ from run to run
    "text.parse_math": False,  # a "$" in a module's name begins no formula
}
#: No date and no version, which would change a file whose picture did not change.
METADATA: dict[str, dict[str, None]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


def draw(report: MemoryReport, path: Path) -> None:
    if find_spec("matplotlib") is None:
        raise InvalidInput(
            "out", str(path), "matplotlib to be installed", "pip install 'ecornn[plot]'"
        )
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever the user's own settings are
        matplotlib.rcParams.update(SETTINGS)
        figure = Figure(figsize=INCHES, layout="constrained", dpi=DOTS_PER_INCH)
        # The caption of a paper has room for names; a title has not.
        when = f"{report.unit} {report.peak_time} of {len(report.timeline) - 1}"
        figure.suptitle(f"peak {size_text(report.peak_bytes)} at {when}", fontsize="medium")
        above, below = figure.subplots(2, 1)
        factor, unit = _unit(report.peak_bytes)
        kinds = _draw_timeline(above, report, factor, unit)
        _draw_modules(below, report, factor, unit)
        if kinds:
            handles, names = zip(*kinds, strict=True)
            figure.legend(handles, names, loc="outside lower center", ncols=5, frameon=False)
        suffix = path.suffix.lower()
        figure.savefig(path, format=suffix[1:], metadata=METADATA[suffix])


def _unit(most: int) -> tuple[int, str]:
    unit = next((unit for unit in ("GiB", "MiB", "KiB") if most >= UNITS[unit]), "B")
    return UNITS[unit], unit


def _draw_timeline(axes: Any, report: MemoryReport, factor: int, unit: str) -> list[Any]:
    """Handles and names for the legend."""
    timeline, times = report.timeline, times_to_draw(report)
    kinds = [kind for kind in COUNTED if any(timeline.bytes.get(kind, ()))]
    # A difference may be negative ("no tensor"), which has no area.
    columns = [[max(0, timeline.bytes[kind][t]) / factor for t in times] for kind in kinds]
    found = []
    if kinds:
        areas = axes.stackplot(
            times, columns, step="post", colors=[COLOURS[kind] for kind in kinds], linewidth=0
        )
        found = list(zip(areas, kinds, strict=True))
    for time, phase in marks_of(timeline):
        axes.axvline(time, color="black", linewidth=0.6, linestyle=":")
        axes.annotate(phase, (time, 1.01), xycoords=("data", "axes fraction"))
    if len(timeline):
        most = sum(column[times.index(report.peak_time)] for column in columns)
        axes.plot(report.peak_time, most, "o", color="black", markersize=4, fillstyle="none")
    axes.set_xlabel(report.unit)
    axes.set_ylabel(unit)
    axes.margins(x=0)
    return found


def _draw_modules(axes: Any, report: MemoryReport, factor: int, unit: str) -> None:
    modules: dict[str, dict[str, int]] = {}
    for row in report.rows:
        if row.kind in COUNTED:
            kinds = modules.setdefault(row.module, {})
            kinds[row.kind] = kinds.get(row.kind, 0) + row.bytes
    order = sorted(modules, key=lambda module: -sum(modules[module].values()))
    bars = [(_short(module_text(module)), modules[module]) for module in order[:BARS]]
    if rest := order[BARS:]:
        together = {kind: sum(modules[module].get(kind, 0) for module in rest) for kind in COUNTED}
        bars.append((f"{len(rest)} others", together))
    begin = [0.0] * len(bars)
    for kind in COUNTED:
        sizes = [max(0, kinds.get(kind, 0)) / factor for _, kinds in bars]
        axes.barh(range(len(bars)), sizes, left=begin, color=COLOURS[kind])
        begin = [left + size for left, size in zip(begin, sizes, strict=True)]
    axes.set_yticks(range(len(bars)), [name for name, _ in bars])
    axes.set_xlim(left=0)
    axes.invert_yaxis()
    axes.set_xlabel(f"{unit} at the peak")


def _short(name: str) -> str:
    return name if len(name) <= NAME_LENGTH else f"…{name[1 - NAME_LENGTH :]}"
