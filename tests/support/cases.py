"""Cases for tests of whole layers: what is asked, drawn values, and the run of a layer.

Values are multiples of 1/128 with at most eight bits, exact in every dtype, so that one float64
run of the oracle serves them all. Padding beyond a sequence's end is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import ecornn
from support import oracle
from support.tolerances import relative_error, tolerance

Named = dict[str, Tensor]

CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@dataclass(frozen=True)
class Case:
    """A layer and a call. `form` is "batched", "batch_first", "unbatched" or "packed"."""

    cell: str = "lstm"
    steps: int = 5
    batch: int = 3
    inputs: int = 4
    hidden: int = 3
    layers: int = 1
    bidirectional: bool = False
    bias: bool = True
    proj: int = 0
    form: str = "batched"
    layer_norm: bool = False
    zoneout: tuple[float, float] = (0.0, 0.0)
    initial: bool = True
    lengths: bool = False
    after_end: str = "zeros"
    resets: bool = False
    reset_to: str = "zero"
    cell_states: bool = False

    @property
    def lstm(self) -> bool:
        return self.cell == "lstm"

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    def __str__(self) -> str:
        default = Case()
        changed = {k: v for k, v in vars(self).items() if v != getattr(default, k)}
        return ",".join(f"{k}={v}" for k, v in {"cell": self.cell, **changed}.items())


@dataclass(frozen=True)
class Values:
    """The tensors of a call in float64, time first and batched."""

    x: Tensor
    h0: Tensor
    c0: Tensor | None
    lengths: list[int] | None
    resets: Tensor | None

    def to(self, dtype: torch.dtype) -> Values:
        c0 = None if self.c0 is None else self.c0.to(dtype)
        return replace(self, x=self.x.to(dtype), h0=self.h0.to(dtype), c0=c0)

    def requiring_grad(self) -> Values:
        def leaf(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.detach().clone().requires_grad_()

        return replace(self, x=leaf(self.x), h0=leaf(self.h0), c0=leaf(self.c0))

    def sources(self) -> Named:
        named = {"x": self.x, "h0": self.h0, "c0": self.c0}
        return {name: value for name, value in named.items() if value is not None}


def draw(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    """Float64 values that every dtype holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(shape, generator=generator, dtype=torch.float64) * scale * 128
    return whole.round().clamp(-255, 255) / 128


def draw_values(case: Case) -> Values:
    generator = torch.Generator().manual_seed(case.steps)
    x = draw(case.steps, case.batch, case.inputs, seed=1)
    states = case.layers * case.directions
    h0 = draw(states, case.batch, case.proj or case.hidden, seed=2)
    c0 = draw(states, case.batch, case.hidden, seed=3) if case.lstm else None
    if not case.initial:
        h0, c0 = torch.zeros_like(h0), None if c0 is None else torch.zeros_like(c0)
    lengths = None
    if case.lengths or case.form == "packed":
        least = 1 if case.form == "packed" else 0
        drawn = torch.randint(least, case.steps + 1, (case.batch,), generator=generator)
        lengths = drawn.tolist()
        if case.batch > 1:
            lengths[1] = case.steps  # not the first, so that the order is no accident
        for b, end in enumerate(lengths):
            x[end:, b] = torch.nan
    resets = None
    if case.resets:
        resets = torch.rand(case.steps, case.batch, generator=generator) < 0.3
    return Values(x, h0, c0, lengths, resets)


def make_layer(case: Case, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """The case's layer in evaluation, with drawn parameters."""
    kind = {"lstm": ecornn.LSTM, "gru": ecornn.GRU}.get(case.cell, ecornn.RNN)
    if kind is ecornn.RNN:
        options["nonlinearity"] = case.cell.removeprefix("rnn_")
    layer = kind(
        case.inputs,
        case.hidden,
        case.layers,
        bias=case.bias,
        batch_first=case.form == "batch_first",
        bidirectional=case.bidirectional,
        **({"proj_size": case.proj} if case.proj else {}),
        layer_norm=case.layer_norm,
        zoneout=case.zoneout,
        dtype=dtype,
        **options,
    )
    redraw_parameters(layer, case.hidden)
    return layer.eval()


def redraw_parameters(layer: torch.nn.Module, hidden: int) -> None:
    with torch.no_grad():
        for seed, (name, p) in enumerate(layer.named_parameters(), start=10):
            values = draw(*p.shape, seed=seed, scale=0.6 / hidden**0.5)
            if name.startswith("norm") and "bias" not in name:
                # gains around a half: with gains of one the recurrence is chaotic, and float32
                # loses four digits in sixty steps whoever computes it
                values = (64 + 32 * values).round() / 128
            p.copy_(values)


def call_arguments(case: Case, values: Values) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The values in the form the case's layer takes them."""
    x, h0, c0, resets = values.x, values.h0, values.c0, values.resets
    given: Any = x
    if case.form == "batch_first":
        given, resets = x.transpose(0, 1), None if resets is None else resets.T
    elif case.form == "unbatched":
        given, h0 = x.squeeze(1), h0.squeeze(1)
        c0 = None if c0 is None else c0.squeeze(1)
        resets = None if resets is None else resets.squeeze(1)
    elif case.form == "packed":
        given = pack_padded_sequence(x, values.lengths, enforce_sorted=False)
    hx = None if not case.initial else h0 if c0 is None else (h0, c0)
    options: dict[str, Any] = {}
    if case.lengths and case.form != "packed":
        options |= {
            "lengths": torch.tensor(values.lengths, dtype=torch.int64),
            "after_end": case.after_end,
        }
    if resets is not None:
        options |= {"resets": resets, "reset_to": case.reset_to}
    if case.cell_states:
        options["return_cell_states"] = True
    return (given, hx), options


def call_layer(layer: Any, case: Case, values: Values) -> Named:
    """Run a layer; its results by name, time first and batched."""
    arguments, options = call_arguments(case, values)
    output, state, *cells = layer(*arguments, **options)
    h_n, c_n = state if case.lstm else (state, None)

    def shaped(sequence: Any) -> Tensor:
        if case.form == "packed":
            assert isinstance(sequence, PackedSequence)
            return pad_packed_sequence(sequence, total_length=case.steps)[0]
        if case.form == "unbatched":
            return sequence.unsqueeze(1)
        return sequence.transpose(0, 1) if case.form == "batch_first" else sequence

    unsqueeze = case.form == "unbatched"
    found = {"output": shaped(output), "h_n": h_n.unsqueeze(1) if unsqueeze else h_n}
    if c_n is not None:
        found["c_n"] = c_n.unsqueeze(1) if unsqueeze else c_n
    if cells:
        found["cells"] = shaped(cells[0])
    return found


def pull_back(results: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> Named:
    """The gradient of every source for a drawn gradient of every result."""
    d_results = [draw(*r.shape, seed=50 + i).to(r.dtype) for i, r in enumerate(results.values())]
    # of sequences that all have length 0 the oracle's output depends on nothing
    pairs = [(r, d) for r, d in zip(results.values(), d_results, strict=True) if r.requires_grad]
    if not pairs:
        return {name: torch.zeros_like(source) for name, source in sources.items()}
    depending, arriving = zip(*pairs, strict=True)
    found = torch.autograd.grad(depending, list(sources.values()), arriving, materialize_grads=True)
    return dict(zip(sources, found, strict=True))


@lru_cache(maxsize=64)
def expected(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Named, Named]:
    """The oracle's results and gradients for a case, computed in `dtype`."""
    layer = make_layer(case)
    values = draw_values(case).to(dtype).requiring_grad()
    parameters = oracle.parameters_of(layer, dtype)
    results = oracle.expect(
        layer,
        parameters,
        values.x,
        values.h0,
        values.c0,
        lengths=values.lengths,
        after_end=case.after_end,
        resets=values.resets,
        reset_to=case.reset_to,
    ).named()
    if not case.cell_states:
        results.pop("cells", None)
    sources = values.sources() if case.initial else {"x": values.x}
    gradients = pull_back(results, sources | parameters)
    return {name: value.detach() for name, value in results.items()}, gradients


@lru_cache(maxsize=64)
def sensitivity(case: Case) -> float:
    """How many times more than the table allows rounding costs in this case, whoever computes it.

    Layer norm of a small or one-dimensional state divides by next to nothing: the gradient of h_0
    where H=1 is the small difference of large numbers. The oracle in float32 shows what that
    costs; where it stays well within the table's bound, this is 1, as it is without layer norm.
    """
    if not case.layer_norm:
        return 1.0
    exact, rounded = expected(case), expected(case, torch.float32)
    bound = tolerance(torch.float32, case.steps * case.layers)
    worst = max(
        relative_error(rounded[part][name], value)
        for part in (0, 1)
        for name, value in exact[part].items()
    )
    own = max(1.0, 8 * worst / bound)
    if case.batch > 1:
        return own
    form = "batched" if case.form == "unbatched" else case.form
    return max(own, sensitivity(replace(case, batch=3, form=form)))  # one number may be lucky
