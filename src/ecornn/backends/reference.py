"""The definition as a backend: plain torch, serves everything, fast at nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from ecornn.backends.protocol import (
    NOT_KNOWN,
    BackwardRequest,
    CallGrads,
    LayerCall,
    LayerResult,
    ResultGrads,
    Scratch,
    present,
)
from ecornn.kernels import reference
from ecornn.kernels.reference.backward import Kept, OutputGrads
from ecornn.spec import RnnSpec


def problem_of(call: LayerCall, direction: int) -> reference.Problem:
    return reference.Problem(
        cell=call.cell,
        reverse=direction == 1,
        reset_to=call.reset_to,
        after_end=call.after_end,
        resets_TB=call.resets_TB,
        lengths_B=call.lengths_B,
        zoneout_h=None if call.zoneout_h is None else call.zoneout_h[direction],
        zoneout_c=None if call.zoneout_c is None else call.zoneout_c[direction],
    )


def define(call: LayerCall) -> LayerResult:
    """The layer, differentiable by autograd to any order and transparent to torch.func."""
    results = [
        reference.forward(
            call.input_TBI,
            call.h0_DBR[d],
            None if call.c0_DBH is None else call.c0_DBH[d],
            call.weights[d],
            problem_of(call, d),
            call.keep,
        )
        for d in range(call.directions)
    ]
    kept = [r.pre_TBK for r in results] + [r.raw_TBG for r in results]
    cells = None
    if call.cell == "lstm" and (call.cell_states or call.keep != "none"):
        cells = _join([r.cells_TBH for r in results])
    return LayerResult(
        _join([r.output_TBR for r in results]),
        torch.stack([r.h_n_BR for r in results]),
        torch.stack([_some(r.c_n_BH) for r in results]) if call.cell == "lstm" else None,
        cells,
        [value for value in kept if value is not None],
    )


class Reference:
    name = "reference"
    summary = "plain torch, the definition of every cell and feature; any device"

    def unavailable(self) -> str | None:
        return None

    def refuse(self, spec: RnnSpec) -> str | None:
        return None

    def keeps(self, spec: RnnSpec) -> str:
        if not spec.needs_grad:
            return "none"
        # states: a third of the memory for one more large product in the backward pass
        return "states" if spec.keep == "auto" else spec.keep

    def details(self, spec: RnnSpec) -> list[str]:
        return []

    def forward(self, call: LayerCall) -> LayerResult:
        return define(call)

    def scratch(self, call: LayerCall) -> Scratch:
        return NOT_KNOWN

    def backward(
        self, call: LayerCall, result: LayerResult, grads: ResultGrads, ask: BackwardRequest
    ) -> CallGrads:
        directions = call.directions
        output = _split(result.output_TBO, directions)
        cells = _split(result.cells_TBE, directions)
        d_output = _split(grads.output_TBO, directions)
        d_cells = _split(grads.cells_TBE, directions)
        parts = [
            reference.backward(
                OutputGrads(
                    d_output[d], _take(grads.h_n_DBR, d), _take(grads.c_n_DBH, d), d_cells[d]
                ),
                call.input_TBI,
                call.h0_DBR[d],
                _take(call.c0_DBH, d),
                call.weights[d],
                problem_of(call, d),
                Kept(
                    _some(output[d]),
                    cells[d],
                    # pre-activations of each direction, then raw products of each
                    result.kept[d] if result.kept else None,
                    result.kept[directions + d] if len(result.kept) > directions else None,
                ),
                needs_x=ask.needs_input,
                samples=ask.samples,
            )
            for d in range(directions)
        ]
        d_input = None
        if ask.needs_input:
            d_input = _some(parts[0].x_TBI)
            if directions == 2:
                d_input = d_input + _some(parts[1].x_TBI)
        return CallGrads(
            d_input,
            torch.stack([p.h0_BR for p in parts]),
            None if call.c0_DBH is None else torch.stack([_some(p.c0_BH) for p in parts]),
            [value for p in parts for value in present(p.weights)],
        )


def _some(value: Tensor | None) -> Tensor:
    assert value is not None
    return value


def _take(value: Tensor | None, direction: int) -> Tensor | None:
    return None if value is None else value[direction]


def _join(values: list[Tensor | None] | list[Tensor]) -> Tensor:
    return _some(values[0]) if len(values) == 1 else torch.cat([_some(v) for v in values], -1)


def _split(value: Tensor | None, directions: int) -> list[Tensor | None]:
    return [None] * directions if value is None else list(value.chunk(directions, -1))
