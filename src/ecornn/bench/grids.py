"""The cases of each benchmark, as literal lists."""

from __future__ import annotations

from dataclasses import dataclass

from ecornn.bench.cases import Case

RECURRENT_CELLS = ("lstm", "gru", "rnn_tanh")


@dataclass(frozen=True)
class Grid:
    """`device` is where its cases run: "cpu" or "cuda"."""

    name: str
    device: str
    cases: tuple[Case, ...]


SMOKE = Grid(
    "smoke",
    "cpu",
    (
        Case("lstm", hidden=8, batch=2, steps=5),
        Case("gru", hidden=7, batch=3, steps=1, initial=True),
        Case("rnn_tanh", hidden=5, batch=1, steps=4, dtype="fp64", layers=2, bidirectional=True),
        Case("rnn_relu", hidden=6, batch=2, steps=3, input=4),
        Case("lstm", hidden=8, batch=4, steps=9, dtype="bf16"),
        Case("lstm", hidden=8, batch=5, steps=12, bidirectional=True, initial=True, lengths=True),
        Case("gru", hidden=8, batch=4, steps=10, lengths=True),
    ),
)

CPU = Grid(
    "cpu",
    "cpu",
    (
        # acting: one step at a time, the state handed from call to call
        *(Case(cell, hidden=128, batch=1, steps=1, initial=True) for cell in RECURRENT_CELLS),
        *(
            Case(cell, hidden=256, batch=16, steps=1, input=64, initial=True)
            for cell in RECURRENT_CELLS
        ),
        # small and middle sizes, as in language models and forecasting
        *(Case(cell, hidden=64, batch=8, steps=32, input=16) for cell in RECURRENT_CELLS),
        *(Case(cell, hidden=200, batch=20, steps=35) for cell in RECURRENT_CELLS),
        *(Case(cell, hidden=512, batch=32, steps=50, input=256) for cell in RECURRENT_CELLS),
        # one sequence, long
        Case("lstm", hidden=128, batch=1, steps=500),
        # taggers and acoustic models
        *(
            Case(cell, hidden=256, batch=16, steps=60, layers=2, bidirectional=True, input=80)
            for cell in RECURRENT_CELLS
        ),
        # other dtypes
        Case("lstm", hidden=200, batch=20, steps=35, dtype="bf16"),
        Case("lstm", hidden=200, batch=20, steps=35, dtype="fp64"),
        # mixed lengths
        *(Case(cell, hidden=128, batch=32, steps=1000, lengths=True) for cell in RECURRENT_CELLS),
        Case("lstm", hidden=128, batch=16, steps=1000, bidirectional=True, lengths=True),
    ),
)

STEPS = 256
HALF_AND_FULL = ("bf16", "fp16", "fp32")
BATCHES = (1, 4, 16, 64)

RNN = Grid(
    "rnn",
    "cuda",
    (
        *(
            Case("lstm", hidden, batch, STEPS, dtype)
            for hidden in (64, 128, 256, 512, 1024)
            for batch in BATCHES
            for dtype in HALF_AND_FULL
        ),
        *(
            Case("lstm", 2048, batch, STEPS, dtype)
            for batch in (1, 4, 16)
            for dtype in ("bf16", "fp16")
        ),
        *(
            case
            for hidden in (512, 1024)
            for batch in (4, 16)
            for case in (
                Case("gru", hidden, batch, STEPS, "bf16"),
                Case("rnn_tanh", hidden, batch, STEPS, "bf16"),
                Case("lstm", hidden, batch, STEPS, "bf16", bidirectional=True),
                Case("lstm", hidden, batch, STEPS, "bf16", layers=2),
                Case("lstm", hidden, batch, STEPS, "bf16", lengths=True),
            )
        ),
    ),
)

#: Of the sizes above, those whose time is worth taking apart: each is the slowest beside its target
#: in some row of the table, or was.
TIMELINE = Grid(
    "timeline",
    "cuda",
    tuple(
        Case("lstm", hidden, batch, STEPS, dtype)
        for hidden, batch, dtype in (
            (64, 16, "fp32"),
            (128, 64, "fp32"),
            (256, 4, "fp32"),
            (512, 16, "fp16"),
            (1024, 4, "fp32"),
            (1024, 16, "fp16"),
            (1024, 16, "bf16"),
            (1024, 64, "bf16"),
            (1024, 64, "fp32"),
            (2048, 1, "bf16"),
            (2048, 16, "bf16"),
        )
    ),
)

GRIDS: dict[str, Grid] = {grid.name: grid for grid in (CPU, RNN, SMOKE, TIMELINE)}
