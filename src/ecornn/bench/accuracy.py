"""Every contender's results and gradients against a float64 run of the same weights.

The reference is torch.nn in float64 on the same device, given a PackedSequence where the case has
lengths: neither our code nor a fast path.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ecornn.bench.calls import Call, Named, Replay
from ecornn.bench.problem import Problem, Values, make_layer

#: The largest ‖out − ref‖ / ‖ref‖ allowed of any result or gradient: three to four times the
#: largest that rounding cost torch.nn over the cases of `grids` (fp32 3e-6 on the CPU, fp16 5e-4,
#: bf16 7e-3 on an H200).
BOUNDS = {"fp64": 1e-12, "fp32": 1e-5, "fp16": 2e-3, "bf16": 2e-2}
#: For fp32 on CUDA, where products run in TF32, which has fp16's ten bits: torch.nn's was 5e-4.
TF32_BOUND = BOUNDS["fp16"]


@dataclass(frozen=True)
class Verdict:
    """`error` is the largest of all; None where something is not even finite, or misshapen.
    `failed` says what is wrong, None where all is well."""

    error: float | None
    failed: str | None


def bound(dtype: str, device: torch.device) -> float:
    return TF32_BOUND if dtype == "fp32" and device.type == "cuda" else BOUNDS[dtype]


def references(problem: Problem, values: Values, forms: Iterable[str]) -> dict[str, Named]:
    """What a call of each form must give: `padded` knows no lengths, the others obey them."""
    wanted = {form: "packed" if form in ("lengths", "packed") else "plain" for form in forms}
    runs = {kind: _run(problem, values.map(Tensor.double), kind) for kind in set(wanted.values())}
    return {form: runs[kind] for form, kind in wanted.items()}


def _run(problem: Problem, values: Values, form: str) -> Named:
    layer = make_layer(torch.nn, problem.case, problem.device, torch.float64)
    layer.load_state_dict(problem.weights)
    call = Call(layer, form, values, problem.lengths)
    results, gradients = call.train()
    named = call.name_results(results) | call.name_gradients(gradients)
    return {name: value.detach() for name, value in named.items()}


def check(call: Call | Replay, values: Values, expected: Named, allowed: float) -> Verdict:
    """Load the values, run with and without gradients, compare everything with `expected`."""
    call.load(values)
    with torch.no_grad():
        alone = judge(call.name_results(call.forward()), expected, allowed)
    results, gradients = call.train()
    named = call.name_results(results) | call.name_gradients(gradients)
    return worse(alone, judge(named, expected, allowed))


def judge(found: Named, expected: Named, allowed: float) -> Verdict:
    worst, where = 0.0, ""
    for name, value in found.items():
        error = relative_error(value, expected[name])
        if error is None:
            shapes = f"{tuple(value.shape)}, expected {tuple(expected[name].shape)}"
            return Verdict(None, f"{name}: shape {shapes}")
        if not math.isfinite(error):
            return Verdict(None, f"{name}: not finite")
        if error >= worst:
            worst, where = error, name
    if worst > allowed:
        return Verdict(worst, f"{where}: relative error {worst:.1e}, allowed {allowed:.0e}")
    return Verdict(worst, None)


def worse(one: Verdict, other: Verdict) -> Verdict:
    """The verdict with the larger error; one that could not be computed is the largest."""
    return max(one, other, key=lambda v: math.inf if v.error is None else v.error)


def relative_error(out: Tensor, reference: Tensor) -> float | None:
    """‖out − ref‖ / ‖ref‖; None where the shapes differ."""
    if out.shape != reference.shape:
        return None
    difference = float((out.detach().double() - reference).norm())
    scale = float(reference.norm())
    return difference / scale if scale > 0 else difference
