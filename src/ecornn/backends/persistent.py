"""Persistent kernels as a backend: recurrent weights stay on chip for all time steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice

import torch

from ecornn.backends.persistent_backward import backward
from ecornn.backends.persistent_calls import matching_products, sizes_at_once
from ecornn.backends.persistent_forward import forward
from ecornn.backends.persistent_scratch import scratch_of
from ecornn.backends.protocol import (
    BackwardRequest,
    CallGrads,
    LayerCall,
    LayerResult,
    ResultGrads,
    Scratch,
)
from ecornn.backends.samples import sample_by_sample
from ecornn.errors import EcornnError
from ecornn.kernels.persistent.choose import Request, measured
from ecornn.kernels.persistent.device import (
    build_side_by_side,
    chip,
    failure_flag,
    geometry,
    is_loaded,
    numbers_of,
    too_few_at_once,
    too_old,
    unavailable,
)
from ecornn.kernels.persistent.model import explain
from ecornn.kernels.persistent.tile import Geometry
from ecornn.spec import RnnSpec


class Persistent:
    name = "persistent"
    summary = "CUDA kernels that keep the recurrent weights on chip for all steps"

    def unavailable(self) -> str | None:
        return unavailable()

    def refuse(self, spec: RnnSpec) -> str | None:
        numbers = numbers_of(spec.dtype)
        wanted = (
            (spec.device != "cuda", f"it runs on cuda, not on {spec.device}"),
            (numbers is None, f"it has no kernel for {str(spec.dtype).removeprefix('torch.')}"),
            (spec.layer_norm, "its kernels have no layer norm"),
            (spec.zoneout, "its kernels have no zoneout"),
            (spec.projection > 0, "its kernels have no projection"),
            (spec.forward_mode, "its kernels have no forward-mode derivative"),
            (spec.transformed, "torch.func transforms cannot see through its kernels"),
            (
                spec.short and _torch_could(spec),
                "with this few steps, loading the weights takes longer than it saves",
            ),
        )
        refusal = next((reason for asked, reason in wanted if asked), None)
        refusal = refusal or too_old() or self._does_not_fit(spec)
        # last: the kernel is loaded by now, and a graph that is captured later may use it
        if refusal is None and _torch_could(spec) and _cudnn_is_quicker(spec):
            refusal = "cuDNN's own persistent kernel was quicker when both were measured"
        return refusal

    def _does_not_fit(self, spec: RnnSpec) -> str | None:
        batch = spec.batch or 1
        # Two launches of half the sequences each, one after the other, are still the quicker way:
        # with the 80 that the two layers of 1024 units of the benchmarks' language model have, its
        # step took 18.9 ms with them on an H200 and 20.9 with cuDNN's. Where cuDNN's are no choice
        # there are as many launches as it takes.
        several = not _torch_could(spec)
        device, refused = torch.cuda.current_device(), []
        for size in islice(sizes_at_once(batch), None if several else 2):
            found = self._geometries(spec, size)
            if isinstance(found, str) or None not in found:
                return found if isinstance(found, str) else None
            refused.append(_requests(spec, size)[found.index(None)])
            # where the driver runs too few blocks every size may be kernels to compile for nothing
            if several and len(refused) == 1 < size and too_few_at_once(refused[0], device):
                alone = self._geometries(spec, 1)
                if isinstance(alone, str) or None in alone:
                    break
        request = refused[-1] if several else refused[0]
        if (waiting := too_few_at_once(request, device)) is not None:
            told = f"{request.kernel} pass of {spec.hidden} units, batch of {request.batch}"
            return f"{waiting} ({told})"
        return (
            f"the weights of {spec.hidden} units, with a batch of {request.batch}, do not fit on "
            f"the chip's {chip(device).multiprocessors} multiprocessors ({request.kernel} pass)"
        )

    def _geometries(self, spec: RnnSpec, batch: int) -> list[Geometry | None] | str:
        """Of each pass, until one does not fit; or why that cannot be known."""
        device, requests = torch.cuda.current_device(), _requests(spec, batch)
        # launches ask for both directions at once first
        asked = (replace(r, directions=d) for r in requests for d in range(1, spec.directions + 1))
        if spec.captured and not all(is_loaded(request, device) for request in asked):
            return (
                "a CUDA graph is being captured, and its kernel was not loaded before; call the "
                "layer once in the same way before the capture"
            )
        build_side_by_side(requests, device)
        found: list[Geometry | None] = []
        for request in requests:
            try:
                found.append(geometry(request, device))
            except (EcornnError, OSError) as error:
                # another backend may still serve the call: a cache that cannot be written, say
                return f"its kernel could not be made: {error}"
            if found[-1] is None:
                break
        return found

    def keeps(self, spec: RnnSpec) -> str:
        if not spec.needs_grad:
            return "none"
        if spec.cell in ("rnn_tanh", "rnn_relu"):
            return "states"  # the gates are the output
        if spec.keep == "auto":
            return "gates" if spec.roomy else "states"
        return spec.keep

    def details(self, spec: RnnSpec) -> list[str]:
        device, batch = torch.cuda.current_device(), spec.batch or 1
        told = []
        for request in _requests(spec, batch):
            for size in sizes_at_once(batch):
                request = replace(request, batch=size)
                if (found := geometry(request, device)) is not None:
                    break
            else:
                continue
            launches = -(-batch // size)
            several = "" if launches == 1 else f"in {launches} launches, one after the other: "
            first, *model = explain(found, spec.hidden).splitlines()
            told += [several + first, *model]
            told += [_as_measured(request, found)] if found == measured(request) else []
        return told

    def forward(self, call: LayerCall) -> LayerResult:
        with _prepared(call):
            return forward(call)

    def backward(
        self, call: LayerCall, result: LayerResult, grads: ResultGrads, ask: BackwardRequest
    ) -> CallGrads:
        if ask.samples > 1:
            return sample_by_sample(self, call, result, grads, ask)
        with _prepared(call):
            return backward(call, result, grads, ask)

    def scratch(self, call: LayerCall) -> Scratch:
        return scratch_of(call)


def _torch_could(spec: RnnSpec) -> bool:
    """Whether torch's kernels are a choice; if not, the definition would be the only other one."""
    return spec.backend == "auto" and spec.keep == "auto" and not spec.cell_states


def _cudnn_is_quicker(spec: RnnSpec) -> bool:
    """Where cuDNN's own persistent kernels won when both were measured on an H200: one LSTM layer
    of one direction, T = 256, these sizes and what lies between them. Of 64 units in float32 its
    training step of many sequences is the shorter one in a graph, or of many steps; called, ours
    is, since its takes more of the host. Without TF32 that is so of any number of them, and ours of
    few is the longer one also forwards."""
    measured = spec.cell == "lstm" and spec.layers == 1 and not spec.bidirectional
    if not measured or spec.lengths or spec.resets:
        return False
    if spec.hidden > 64 or spec.dtype != torch.float32:
        return False
    called, tf32 = spec.brief and not spec.captured, numbers_of(spec.dtype) == "tf32"
    if tf32:
        return spec.needs_grad and not called and not 0 < spec.batch <= 16
    return not called or (0 < spec.batch < 16 and not spec.needs_grad)


@contextmanager
def _prepared(call: LayerCall) -> Iterator[None]:
    """On the call's device, products in the kernels' precision, whatever autocast says."""
    failure_flag().check()
    x = call.input_TBI
    with ExitStack() as stack:
        if x.device.index != torch.cuda.current_device():
            stack.enter_context(torch.cuda.device(x.device))
        if torch.is_autocast_enabled("cuda"):
            stack.enter_context(torch.autocast("cuda", enabled=False))
        if x.dtype == torch.float32:
            stack.enter_context(matching_products())
        yield


def _requests(spec: RnnSpec, batch: int) -> list[Request]:
    numbers = numbers_of(spec.dtype)
    assert numbers is not None
    kernels = ("forward", "backward") if spec.needs_grad else ("forward",)
    features = spec.lengths or spec.resets
    return [Request(name, spec.cell, numbers, spec.hidden, batch, 1, features) for name in kernels]


def _as_measured(request: Request, found: Geometry) -> str:
    told = "  the fastest of those that were measured for this size"
    own, asked = found.tile.numbers, request.numbers
    if own == asked:
        return told
    if own == "scaled":
        return f"{told}; {own} float16 has as many bits as {asked}"
    return f"{told}; {own} is as precise as {asked} at least"
