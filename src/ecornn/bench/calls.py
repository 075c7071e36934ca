"""A contender's layer with everything it is called with: what is checked is what is timed.

Shape suffixes: see `problem`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from ecornn.bench.contenders import Contender
from ecornn.bench.problem import Problem, Values, make_layer
from ecornn.bench.results import FORWARD_PLAN, TRAIN_PLAN
from ecornn.planner import plan

Named = dict[str, Tensor]
Tensors = tuple[Tensor, ...]

STATES = ("h_n", "c_n")
INITIAL_STATES = ("h_0", "c_0")

#: As torch's notes on CUDA graphs have it: a few runs on a side stream before the capture.
WARM_UP_RUNS = 3


class Call:
    """A layer, and buffers for its call that `load` fills anew."""

    def __init__(self, layer: Any, form: str, values: Values, lengths: Tensor | None) -> None:
        self.layer = layer
        self.lengths = lengths
        self.packing = None
        if form == "packed":
            assert lengths is not None
            self.packing = pack_padded_sequence(values.input_TBI, lengths, enforce_sorted=False)
        self.options: dict[str, Any] = {}
        if form == "lengths" and lengths is not None:
            self.options["lengths"] = lengths.to(values.input_TBI.device)
        self.buffers = self._arrange(values).map(Tensor.clone)
        x, h0, c0, *upstream = self.buffers
        sources = [t.requires_grad_() for t in (x, h0, c0) if t is not None]
        self.input = x if self.packing is None else self._packed(x)
        self.state = h0 if c0 is None else (h0, c0)
        self.sources = (*sources, *layer.parameters())
        self.upstream = tuple(g for g in upstream if g is not None)

    def load(self, values: Values) -> None:
        with torch.no_grad():
            for buffer, value in zip(self.buffers, self._arrange(values), strict=True):
                if buffer is not None and value is not None:
                    buffer.copy_(value)

    def forward(self) -> Tensors:
        """Output, h and, for an LSTM, c."""
        output, state = self.layer(self.input, self.state, **self.options)
        if self.packing is not None:
            output = output.data
        return (output, *state) if isinstance(state, tuple) else (output, state)

    def train(self) -> tuple[Tensors, Tensors]:
        """The results, and the gradients of the input, the initial states and the weights."""
        results = self.forward()
        return results, torch.autograd.grad(results, self.sources, self.upstream)

    def name_results(self, results: Tensors) -> Named:
        """By name, sequences padded with zeros, time first."""
        output, *states = results
        return {"output": self._padded(output)} | dict(zip(STATES, states, strict=False))

    def name_gradients(self, gradients: Tensors) -> Named:
        x, *others = gradients
        weights = [name for name, _ in self.layer.named_parameters()]
        states = INITIAL_STATES[: len(others) - len(weights)]
        names = [f"gradient of {name}" for name in ("input", *states, *weights)]
        return dict(zip(names, (self._padded(x), *others), strict=True))

    def plans(self, *, captured: bool = False) -> dict[str, str]:
        """Which backend runs the training call and how, and which the call without gradients:
        another one where torch's kernels were the quicker. None for layers that do not plan.
        `captured`: of the same calls in a CUDA graph."""
        explain = getattr(self.layer, "explain", None)
        if explain is None:
            return {}
        found: dict[str, str] = {}
        for metric, with_gradients in ((TRAIN_PLAN, True), (FORWARD_PLAN, False)):
            with torch.set_grad_enabled(with_gradients):
                told = explain(self.input, self.state, **self.options)
            if captured:
                told = plan(replace(told.spec, captured=True))
            found[metric] = f"{told.backend}, {told.scope}, keeps {told.keep}"
        return found

    def _arrange(self, values: Values) -> Values:
        """Padded values as this call takes them."""
        lengths = self.lengths
        if self.packing is None or lengths is None:
            return values

        def pack(sequence_TBF: Tensor) -> Tensor:
            return pack_padded_sequence(sequence_TBF, lengths, enforce_sorted=False).data

        return values._replace(
            input_TBI=pack(values.input_TBI), grad_output_TBO=pack(values.grad_output_TBO)
        )

    def _padded(self, sequence: Tensor) -> Tensor:
        if self.packing is None:
            return sequence
        return pad_packed_sequence(self._packed(sequence))[0]

    def _packed(self, data: Tensor) -> PackedSequence:
        assert self.packing is not None
        return PackedSequence(
            data,
            self.packing.batch_sizes,
            self.packing.sorted_indices,
            self.packing.unsorted_indices,
        )


class Replay:
    """A call replayed from two CUDA graphs, one of the forward pass and one of both passes."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self._results: Tensors
        self._trained: tuple[Tensors, Tensors]
        with torch.no_grad():
            self._forward, self._results = capture(call.forward)
        self._train, self._trained = capture(call.train)

    def load(self, values: Values) -> None:
        """Also spoils what the graphs have written, so that a check sees what they leave out."""
        self.call.load(values)
        with torch.no_grad():
            for written in (*self._results, *self._trained[0], *self._trained[1]):
                written.fill_(torch.nan)

    def forward(self) -> Tensors:
        self._forward.replay()
        return self._results

    def train(self) -> tuple[Tensors, Tensors]:
        self._train.replay()
        return self._trained

    def name_results(self, results: Tensors) -> Named:
        return self.call.name_results(results)

    def name_gradients(self, gradients: Tensors) -> Named:
        return self.call.name_gradients(gradients)

    def plans(self) -> dict[str, str]:
        return self.call.plans(captured=True)


def capture(
    function: Callable[[], Any], before: Callable[[], None] = lambda: None
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The graph, and the tensors that its replays write. `before` is called between the runs that
    warm up and the capture.

    cuBLAS keeps a workspace for every stream and thread that has multiplied: those of streams that
    the graph does not run on are given back, since they are no memory of its.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_RUNS):
            function()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    before()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), waiting_forbidden():
        written = function()
    return graph, written


@contextmanager
def waiting_forbidden() -> Iterator[None]:
    """Raise before the CPU waits for the GPU, which no graph can hold. If the driver noticed it
    first, torch could not end the capture, and every later random draw would fail."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def make_call(contender: Contender, problem: Problem, values: Values) -> Call:
    """The contender's call with the problem's weights, not yet captured."""
    case = problem.case
    layer = make_layer(
        contender.module, case, problem.device, case.torch_dtype, **contender.options
    )
    layer.load_state_dict(problem.weights)
    return Call(layer, contender.form, values, problem.lengths)
