"""torch's own recurrent kernels as a backend: cuDNN on CUDA, oneDNN or ATen's loops on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from ecornn.backends.aten_layer import run_layer
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
from ecornn.backends.samples import sample_by_sample
from ecornn.spec import RnnSpec


class Aten:
    name = "aten"
    summary = "torch's own kernels: cuDNN on CUDA, oneDNN or ATen on the CPU"

    def unavailable(self) -> str | None:
        return None

    def refuse(self, spec: RnnSpec) -> str | None:
        wanted = (
            (
                spec.resets and spec.device == "cuda" and (spec.traced or spec.captured),
                "it reads the resets on the host, and a captured graph cannot wait for that",
            ),
            (spec.layer_norm, "its kernels have no layer norm"),
            (spec.zoneout, "its kernels have no zoneout"),
            (spec.cell_states, "its kernels return only the last cell state"),
            (
                spec.keep != "auto",
                f"keep={spec.keep!r} was asked for, and its kernels decide themselves what to keep",
            ),
            (spec.forward_mode, "its kernels have no forward-mode derivative"),
            (spec.transformed, "torch.func transforms cannot see through its kernels"),
            (
                spec.device not in ("cpu", "cuda"),
                f"it is tested on cpu and cuda, not on {spec.device}",
            ),
        )
        return next((reason for asked, reason in wanted if asked), None)

    def keeps(self, spec: RnnSpec) -> str:
        return "none"

    def details(self, spec: RnnSpec) -> list[str]:
        return []

    def forward(self, call: LayerCall) -> LayerResult:
        with torch.no_grad(), torch.autocast(call.input_TBI.device.type, enabled=False):
            return run_layer(call)

    def scratch(self, call: LayerCall) -> Scratch:
        return NOT_KNOWN

    def backward(
        self, call: LayerCall, result: LayerResult, grads: ResultGrads, ask: BackwardRequest
    ) -> CallGrads:
        """Runs the layer again: what ATen's kernels keep is opaque, so an op cannot return it."""
        if ask.samples > 1:
            return sample_by_sample(self, call, result, grads, ask)
        with autograd_inside_an_operator(call.input_TBI.device.type):
            return _run_again(call, grads, ask.needs_input)


def _run_again(call: LayerCall, grads: ResultGrads, needs_input: bool) -> CallGrads:
    x = call.input_TBI.detach().requires_grad_(needs_input)
    h0 = call.h0_DBR.detach().requires_grad_()
    c0 = None if call.c0_DBH is None else call.c0_DBH.detach().requires_grad_()
    weights = tuple(w.map(lambda t: t.detach().requires_grad_()) for w in call.weights)
    again = run_layer(replace(call, input_TBI=x, h0_DBR=h0, c0_DBH=c0, weights=weights))
    outputs = (again.output_TBO, again.h_n_DBR, again.c_n_DBH)
    pairs = zip(outputs, grads[:3], strict=True)
    arrived = [(o, g) for o, g in pairs if o is not None and g is not None]
    inputs = ([x] if needs_input else []) + [h0] + ([] if c0 is None else [c0])
    found = iter(
        torch.autograd.grad(
            [o for o, _ in arrived],
            inputs + [part for w in weights for part in present(w)],
            [g for _, g in arrived],
            materialize_grads=True,
        )
    )
    return CallGrads(
        next(found) if needs_input else None,
        next(found),
        None if c0 is None else next(found),
        list(found),
    )


@contextmanager
def autograd_inside_an_operator(device: str) -> Iterator[None]:
    """Let autograd record within an operator's own run, where the dispatcher switched it off."""
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        exclude = exclude.remove(getattr(torch._C.DispatchKey, key))
    include = torch._C._dispatch_tls_local_include_set()
    with (
        torch._C._ForceDispatchKeyGuard(include, exclude),
        torch.enable_grad(),
        torch.autocast(device, enabled=False),
    ):
        yield
