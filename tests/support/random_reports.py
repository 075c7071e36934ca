"""Reports of any size whose sums hold, for the views: random modules, kinds and lifetimes."""

from __future__ import annotations

import random
from itertools import accumulate

from ecornn.profiler.model import TENSORS, Held, MemoryReport, Row, Timeline, largest_first, rows_of

#: What could end a tag, a script, a cell or a line, move a cursor, or run.
HOSTILE = (
    "</script><script>window.hacked=1</script>",
    '<img src="http://203.0.113.1/x.png" onerror="window.hacked=1">',
    "\"'><svg onload=window.hacked=1>",
    "<!--",
    "]]>&lt;b&gt;&amp;",
    "\x1b[31mred\x1b]0;title\x07",
    "line\nbreak\r\ttab,comma;\"quote'",
    "\u2028\u202eevil\u0000",
    "[bold]markup[/bold] {braces} %s \\u003c",
    "\ud800",
)


def random_report(
    seed: int = 0,
    storages: int = 60,
    modules: int = 12,
    operators: int = 80,
    names: tuple[str, ...] = ("encoder", "decoder", "attention", "layers", "0", "1", "proj"),
    allocator: bool = True,
) -> MemoryReport:
    draw = random.Random(seed)
    paths = ["", *(_path(draw, names) for _ in range(modules))]
    held = []
    for number in range(storages):
        born = draw.choice((0, draw.randrange(operators)))
        freed = draw.choice((None, draw.randrange(born, operators) + 1))
        held.append(
            Held(
                number,
                size := draw.choice((0, 4, draw.randrange(1, 10**6), 2**20)),
                -(-size // 512) * 512,
                (draw.randrange(1, 9), number),
                "float32",
                draw.choice(TENSORS),
                draw.choice(paths),
                draw.choice(("aten.mul", "aten.addmm", draw.choice(names))) if born else "",
                f"{draw.choice(names)}.py:{number} in forward",
                born,
                freed,
                (f"{draw.choice(paths)}: aten.mul",),
                f"kept for {draw.choice(names)}",
            )
        )
    changes = {kind: [0] * (operators + 1) for kind in (*TENSORS, "rounding")}
    for one in held:
        for kind, size in ((one.kind, one.bytes), ("rounding", one.allocated_bytes - one.bytes)):
            changes[kind][one.born] += size
            changes[kind][operators if one.freed is None else one.freed] -= size
    columns = {kind: list(accumulate(column[:-1])) for kind, column in changes.items()}
    rounding = columns.pop("rounding")
    if allocator:
        columns["rounding"] = rounding
        # A difference: negative where tensors lie in memory that the allocator does not count.
        columns["no tensor"] = [draw.randrange(-1000, 5000) for _ in range(operators)]
    totals = [sum(column[time] for column in columns.values()) for time in range(operators)]
    peak = totals.index(max(totals))
    rows = rows_of(held, peak)
    if allocator:
        rows += [Row("", kind, columns[kind][peak], 0) for kind in ("rounding", "no tensor")]
        rows += [Row("", "reserved, unused", 2**21, 0), Row("", "driver", 2**29, 0)]
    begin = operators // 2
    return MemoryReport(
        device="cuda:0" if allocator else "cpu",
        peak_time=peak,
        rows=tuple(largest_first(rows)),
        held=tuple(held),
        timeline=Timeline(
            phase=("before", *("forward",) * (begin - 1), *("backward",) * (operators - begin)),
            operator=("", *(draw.choice(names) for _ in range(operators - 1))),
            module=tuple(draw.choice(paths) for _ in range(operators)),
            bytes={kind: tuple(column) for kind, column in columns.items()},
        ),
        notes=(draw.choice(names),),
        environment={"device": draw.choice(names)},
    )


def _path(draw: random.Random, names: tuple[str, ...]) -> str:
    return ".".join(draw.choice(names) for _ in range(draw.randrange(1, 5)))
