"""The specification once more, as slow float64 loops that share nothing with the library.

One vector at a time: over sequences, layers, directions and steps. Autograd gives the gradients.
Everything is time first: input (T, B, I), states (layers · directions, B, size), resets (T, B).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

EPS = 1e-5


@dataclass(frozen=True)
class Expected:
    output: Tensor  # (T, B, directions · R)
    h_n: Tensor
    c_n: Tensor | None
    cells: Tensor | None  # (T, B, directions · H), of the last layer

    def named(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if value is not None}


def parameters_of(layer: torch.nn.RNNBase, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """A copy of a layer's parameters, of which gradients can be taken."""
    named = layer.named_parameters()
    return {name: p.detach().clone().to(dtype).requires_grad_() for name, p in named}


def expect(
    layer: torch.nn.RNNBase,
    parameters: Mapping[str, Tensor],
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None = None,
    *,
    lengths: Sequence[int] | None = None,
    after_end: str = "zeros",
    resets: Tensor | None = None,
    reset_to: str = "zero",
    zoneout: tuple[Tensor | None, Tensor | None] | None = None,
) -> Expected:
    """What `layer` in evaluation must return, computed from `parameters`.

    `zoneout` stands for masks drawn in training, of h and of c, each (layers · directions, T, B,
    size) with 1 where a unit keeps its value; without it the layer's probabilities are used.
    """
    directions = 2 if layer.bidirectional else 1
    steps, batch = x.shape[:2]
    last_h: dict[tuple[int, int], Tensor] = {}
    last_c: dict[tuple[int, int], Tensor] = {}
    outputs, cells = [], []
    for b in range(batch):
        end = steps if lengths is None else int(lengths[b])
        bounds = [bool(resets is not None and resets[t, b]) for t in range(steps)]
        rows = [x[t, b] for t in range(steps)]
        for k in range(layer.num_layers):
            found = []
            for d in range(directions):
                s = k * directions + d
                run = _Direction(
                    layer.mode,
                    _weights(parameters, k, d),
                    h0[s, b],
                    None if c0 is None else c0[s, b],
                    reset_to,
                    reverse=d == 1,
                )
                hs, cs = run(rows[:end], bounds, _zoneout_at(layer, zoneout, s, b))
                last_h[s, b], last_c[s, b] = run.h, run.c
                found.append(
                    (run.pad(hs, "h", steps, after_end), run.pad(cs, "c", steps, after_end))
                )
            rows = [torch.cat([hs[t] for hs, _ in found]) for t in range(steps)]
        outputs.append(torch.stack(rows))
        if layer.mode == "LSTM":
            cells.append(torch.stack([torch.cat([cs[t] for _, cs in found]) for t in range(steps)]))

    def states(last: dict[tuple[int, int], Tensor]) -> Tensor:
        count = layer.num_layers * directions
        return torch.stack([torch.stack([last[s, b] for b in range(batch)]) for s in range(count)])

    lstm = layer.mode == "LSTM"
    return Expected(
        torch.stack(outputs, 1),
        states(last_h),
        states(last_c) if lstm else None,
        torch.stack(cells, 1) if lstm else None,
    )


class _Direction:
    """One direction of one layer, over one sequence."""

    def __init__(
        self,
        mode: str,
        weights: dict[str, Tensor],
        h0: Tensor,
        c0: Tensor | None,
        reset_to: str,
        *,
        reverse: bool,
    ) -> None:
        self.mode, self.weights, self.reset_to, self.reverse = mode, weights, reset_to, reverse
        self.h0 = h0
        self.c0 = torch.zeros_like(h0) if c0 is None else c0
        self.h, self.c = self.h0, self.c0

    def __call__(
        self, rows: Sequence[Tensor], bounds: Sequence[bool], zoneout: _Zoneout
    ) -> tuple[list[Tensor], list[Tensor]]:
        hs, cs = [self.h] * len(rows), [self.c] * len(rows)
        order = range(len(rows))
        for t in reversed(order) if self.reverse else order:
            # a boundary lies before the step it is marked at, so a reverse run meets it later
            entered = t + 1 if self.reverse else t
            if entered < len(rows) and bounds[entered]:
                self.restart()
            h, c = _step(self.mode, self.weights, rows[t], self.h, self.c)
            self.h = zoneout.mix("h", t, self.h, h)
            self.c = zoneout.mix("c", t, self.c, c)
            hs[t], cs[t] = self.h, self.c
        return hs, cs

    def restart(self) -> None:
        initial = self.reset_to == "initial"
        self.h = self.h0 if initial else torch.zeros_like(self.h0)
        self.c = self.c0 if initial else torch.zeros_like(self.c0)

    def pad(self, values: list[Tensor], which: str, steps: int, after_end: str) -> list[Tensor]:
        stands = getattr(self, which + "0") if self.reverse else getattr(self, which)
        rest = stands if after_end == "frozen" else torch.zeros_like(stands)
        return values + [rest] * (steps - len(values))


class _Zoneout:
    """How much of the previous state stays, a number or a mask over the steps."""

    def __init__(self, h: float | Tensor, c: float | Tensor) -> None:
        self.share = {"h": h, "c": c}

    def mix(self, which: str, t: int, previous: Tensor, candidate: Tensor) -> Tensor:
        share = self.share[which]
        p = share[t] if isinstance(share, Tensor) else share
        return p * previous + (1 - p) * candidate


def _zoneout_at(
    layer: torch.nn.RNNBase, masks: tuple[Tensor | None, Tensor | None] | None, s: int, b: int
) -> _Zoneout:
    if masks is None:
        return _Zoneout(*layer.zoneout)
    h, c = (0.0 if mask is None else mask[s, :, b] for mask in masks)
    return _Zoneout(h, c)


def _weights(parameters: Mapping[str, Tensor], layer: int, direction: int) -> dict[str, Tensor]:
    """The parameters of one direction of one layer by the first part of their names."""
    end = f"_l{layer}_reverse" if direction else f"_l{layer}"
    return {name.removesuffix(end): p for name, p in parameters.items() if name.endswith(end)}


def _step(
    mode: str, w: Mapping[str, Tensor], x: Tensor, h: Tensor, c: Tensor
) -> tuple[Tensor, Tensor]:
    """The new h and c before zoneout."""
    from_x, from_h = _gates(w, "ih", x), _gates(w, "hh", h)
    if mode == "GRU":
        (r_x, z_x, n_x), (r_h, z_h, n_h) = from_x.chunk(3), from_h.chunk(3)
        r, z = torch.sigmoid(r_x + r_h), torch.sigmoid(z_x + z_h)
        n = torch.tanh(n_x + r * n_h)
        return (1 - z) * n + z * h, c
    if mode != "LSTM":
        act = torch.tanh if mode == "RNN_TANH" else torch.relu
        return act(from_x + from_h), c
    i, f, g, o = (from_x + from_h).chunk(4)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    seen = _standardized(c) * w["norm_c"] + w["norm_c_bias"] if "norm_c" in w else c
    h = torch.sigmoid(o) * torch.tanh(seen)
    return (w["weight_hr"] @ h if "weight_hr" in w else h), c


def _gates(w: Mapping[str, Tensor], kind: str, vector: Tensor) -> Tensor:
    gates = w[f"weight_{kind}"] @ vector
    if f"norm_{kind}" in w:
        gates = _standardized(gates) * w[f"norm_{kind}"]
    return gates + w[f"bias_{kind}"] if f"bias_{kind}" in w else gates


def _standardized(vector: Tensor) -> Tensor:
    centred = vector - vector.mean()
    return centred / ((centred * centred).mean() + EPS).sqrt()
