"""What LSTM, GRU and RNN share: shapes, states, random draws, and the call into a plan.

Shape suffixes: see `stack`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ecornn.backends.registry import BACKENDS
from ecornn.nn import checks
from ecornn.nn.compiling import let_dynamo_trace
from ecornn.nn.packing import pack, pad
from ecornn.nn.plain import plain_call, run_plain, run_plain_with_lengths
from ecornn.nn.stack import (
    StackCall,
    StackResult,
    drop,
    explained,
    is_brief,
    is_long,
    is_roomy,
    is_short,
    plan_from,
    run_stack,
)
from ecornn.nn.weights import add_norms, reset_norms, weight_names
from ecornn.ops.checks import check_lengths_within
from ecornn.ops.keeping import TracedAsOperators
from ecornn.ops.transforms import forward_mode_active, transforms_active, vmap_active
from ecornn.planner import ExecutionPlan
from ecornn.spec import weight_layout

BACKEND_CHOICES = ("auto", *(backend.name for backend in BACKENDS))
KEEP_CHOICES = ("auto", "states", "gates")

#: What a layer made by torch.nn has of our options: none. Also fills in old pickles.
DEFAULTS: dict[str, Any] = {
    "layer_norm": False,
    "zoneout": (0.0, 0.0),
    "recurrent_dropout": 0.0,
    "input_dropout": 0.0,
    "output_dropout": 0.0,
    "variational": False,
    "keep": "auto",
    "backend": "auto",
}


class _Read(NamedTuple):
    """A call as it was understood, and how its result is to be given back."""

    stack: StackCall
    plan: ExecutionPlan
    batched: bool
    packed: PackedSequence | None
    cast: bool  # whether autocast was on


class Made(NamedTuple):
    """What follows from the constructor's arguments and never changes."""

    cell: str
    layout: str
    directions: int
    names: tuple[str, ...]
    state_sizes: tuple[int, ...]  # of h and, for an LSTM, of c


class RecurrentLayer(TracedAsOperators, torch.nn.RNNBase):
    """Mixed into torch.nn's LSTM, GRU and RNN; replaces their forward pass."""

    def __init__(
        self,
        *args: Any,
        layer_norm: bool = False,
        zoneout: float | tuple[float, float] = 0.0,
        recurrent_dropout: float = 0.0,
        input_dropout: float = 0.0,
        output_dropout: float = 0.0,
        variational: bool = False,
        keep: str = "auto",
        backend: str = "auto",
        **kwargs: Any,
    ) -> None:
        options = {
            "layer_norm": checks.check_flag("layer_norm", layer_norm),
            "zoneout": checks.check_zoneout(zoneout),
            "recurrent_dropout": checks.check_probability("recurrent_dropout", recurrent_dropout),
            "input_dropout": checks.check_probability("input_dropout", input_dropout),
            "output_dropout": checks.check_probability("output_dropout", output_dropout),
            "variational": checks.check_flag("variational", variational),
            "keep": keep,
            "backend": backend,
        }
        checks.check_choice("keep", keep, KEEP_CHOICES)
        checks.check_choice("backend", backend, BACKEND_CHOICES)
        super().__init__(*args, **kwargs)
        for name, value in options.items():
            setattr(self, name, value)
        self._made = self._make()
        if layer_norm:
            add_norms(self, self._made.cell, self._made.names)
        let_dynamo_trace()

    # --- what the layer is made of -------------------------------------------------------------

    layer_norm: bool
    zoneout: tuple[float, float]
    recurrent_dropout: float
    input_dropout: float
    output_dropout: float
    variational: bool
    keep: str
    backend: str
    _made: Made

    def _make(self) -> Made:
        cell, directions = self.mode.lower(), 2 if self.bidirectional else 1
        layout = weight_layout(
            cell, bias=self.bias, projection=self.proj_size > 0, layer_norm=self.layer_norm
        )
        of_h = self.proj_size or self.hidden_size
        return Made(
            cell,
            layout,
            directions,
            weight_names(layout, self.num_layers, directions),
            (of_h, self.hidden_size) if cell == "lstm" else (of_h,),
        )

    def reset_parameters(self) -> None:
        super().reset_parameters()
        reset_norms(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._fill_options()

    def _fill_options(self) -> None:
        """Give a layer that torch.nn made the options it does not have; it need not be ours yet."""
        for name, value in DEFAULTS.items():
            self.__dict__.setdefault(name, value)
        self._made = RecurrentLayer._make(self)
        RecurrentLayer._forget_weights(self)
        let_dynamo_trace()

    def _init_flat_weights(self) -> None:
        super()._init_flat_weights()
        self._forget_weights()

    def _forget_weights(self) -> None:
        """Drop torch's weak references to the weights: nothing here reads them, and
        torch.utils.swap_tensors refuses a tensor that has one."""
        self._flat_weight_refs = [None] * len(self._flat_weights)

    def extra_repr(self) -> str:
        changed = [
            f"{k}={getattr(self, k)!r}" for k, v in DEFAULTS.items() if getattr(self, k) != v
        ]
        return ", ".join([super().extra_repr(), *changed])

    # --- a call --------------------------------------------------------------------------------

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: Any = None,
        *,
        lengths: Tensor | list[int] | None = None,
        after_end: str = "zeros",
        resets: Tensor | None = None,
        reset_to: str = "zero",
        return_cell_states: bool = False,
    ) -> Any:
        asks_for_more = resets is not None or return_cell_states is not False
        if not asks_for_more and after_end == "zeros" and reset_to == "zero":
            plain = plain_call(self, input, hx)
            found = None
            if plain is not None and lengths is None:
                found = run_plain(self, plain)
            elif plain is not None:
                found = run_plain_with_lengths(self, plain, lengths)
            if found is not None:
                output, h_n, c_n = found
                output = output.transpose(0, 1) if self.batch_first else output
                return output, h_n if c_n is None else (h_n, c_n)
        read = self._read(input, hx, lengths, after_end, resets, reset_to, return_cell_states)
        if read.cast:
            # all is in autocast's dtype already, and torch 2.11 would cast cuDNN's call to float16
            with torch.autocast(read.stack.input_TBI.device.type, enabled=False):
                result = run_stack(self._with_noise(read.stack), read.plan)
        else:
            result = run_stack(self._with_noise(read.stack), read.plan)
        return self._present(result, read, return_cell_states)

    def explain(
        self, input: Tensor | PackedSequence, hx: Any = None, **kwargs: Any
    ) -> ExecutionPlan:
        """The plan that a call with these arguments would run by; print it. Runs nothing."""
        given: dict[str, Any] = {"lengths": None, "after_end": "zeros", "resets": None}
        given |= {"reset_to": "zero", "return_cell_states": False} | kwargs
        read = self._read(input, hx, **given)
        return explained(read.stack, read.plan)

    def _read(
        self,
        input: Any,
        hx: Any,
        lengths: Any,
        after_end: str,
        resets: Any,
        reset_to: str,
        return_cell_states: bool,
    ) -> _Read:
        """Check everything, bring it into one form, and choose the plan."""
        traced = torch.compiler.is_compiling()
        transformed = not traced and transforms_active()
        weights = self._weights_now(traced)
        weight = weights[0]
        cast = checks.casting(weight.device.type)
        checks.check_call(self._made.cell, after_end, reset_to, return_cell_states)
        x, lengths_B, batched = self._read_input(input, lengths, weight, cast=cast)
        packed = input if isinstance(input, PackedSequence) else None
        resets_TB = checks.read_resets(
            resets, x, batched=batched, batch_first=self.batch_first, packed=packed is not None
        )
        h0, c0 = self._initial(hx, x, weight, batched=batched, cast=cast, packed=packed)
        if lengths is not None and not traced and not vmap_active():
            check_lengths_within(lengths_B, x.shape[0])
        if cast and x.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(weight.device.type)
            x, h0 = x.to(dtype), h0.to(dtype)
            c0 = None if c0 is None else c0.to(dtype)
            weights = [w.to(dtype) for w in weights]
        stack = StackCall(
            self._made.cell,
            self._made.layout,
            self.num_layers,
            self._made.directions,
            x,
            h0,
            c0,
            tuple(weights),
            lengths_B,
            resets_TB,
            after_end,
            reset_to,
            return_cell_states,
            self.dropout if self.training and self.num_layers > 1 else 0.0,
            self.variational,
            *self.zoneout,
            self.training,
        )
        return _Read(stack, self._plan(stack, traced, transformed), batched, packed, cast)

    def _read_input(
        self, input: Any, lengths: Any, weight: Tensor, *, cast: bool
    ) -> tuple[Tensor, Tensor | None, bool]:
        """(input as (T, B, I), lengths on its device, whether it came with a batch)"""
        if isinstance(input, PackedSequence):
            checks.check_packed(input.data, self.input_size, weight, cast=cast)
            checks.read_lengths(lengths, 0, weight.device, packed=True)
            return (*pad(input), True)
        checks.check_input(input, self.input_size, weight, batch_first=self.batch_first, cast=cast)
        batched = input.dim() == 3
        if not batched:
            x = input.unsqueeze(1)
        else:
            x = input.transpose(0, 1) if self.batch_first else input
        return x, checks.read_lengths(lengths, x.shape[1], x.device, packed=False), batched

    def _plan(self, stack: StackCall, traced: bool, transformed: bool) -> ExecutionPlan:
        x, c0 = stack.input_TBI, stack.c0
        tensors = (x, stack.h0, *stack.weights)
        needs_grad = torch.is_grad_enabled() and (
            any(t.requires_grad for t in tensors) or (c0 is not None and c0.requires_grad)
        )
        device = x.device.type
        dropout = stack.dropout
        if traced:
            # with sizes that are symbols this is one as well, of which no plan can be made; whether
            # there is dropout is all that one depends on
            dropout = 1.0 if dropout > 0 else 0.0
        return plan_from(  # in the order of RnnSpec's fields
            stack.cell,
            self.input_size,
            self.hidden_size,
            self.num_layers,
            self.bidirectional,
            self.proj_size,
            self.bias,
            x.dtype,
            device,
            dropout,
            self.variational and dropout > 0,
            self.layer_norm,
            self.zoneout != (0.0, 0.0),
            stack.lengths_B is not None,
            stack.resets_TB is not None,
            stack.cell_states,
            needs_grad,
            self.keep,
            self.backend,
            traced,
            transformed,
            not traced and forward_mode_active(),
            not traced and is_long(x.shape[0], device),
            device == "cuda" and not traced and torch.cuda.is_current_stream_capturing(),
            not traced and is_short(x.shape[0], device),
            not traced and is_brief(x.shape[0], device),
            not traced and is_roomy(x, self.hidden_size),
            x.shape[1] if device == "cuda" and not traced else 0,
        )

    def _weights_now(self, traced: bool) -> list[Tensor]:
        """The weights as they are at this moment, in the operator's order."""
        names, own = self._made.names, self._parameters
        # Attributes, because pruning, a parametrization or a replica makes a parameter one; the
        # dictionary where all are parameters still, because Module's getattr takes a microsecond.
        if not traced and all(name in own for name in names):
            return [own[name] for name in names]  # type: ignore[misc]
        return [getattr(self, name) for name in names]

    def _initial(
        self,
        hx: Any,
        x: Tensor,
        weight: Tensor,
        *,
        batched: bool,
        cast: bool,
        packed: PackedSequence | None,
    ) -> tuple[Tensor, Tensor | None]:
        """The initial states as (layers · directions, B, size), zeros where none are given."""
        sizes, states, batch = (
            self._made.state_sizes,
            self.num_layers * self._made.directions,
            x.shape[1],
        )
        lstm = len(sizes) == 2
        if hx is None:
            h0 = x.new_zeros(states, batch, sizes[0])
            return h0, x.new_zeros(states, batch, sizes[1]) if lstm else None
        given = checks.check_pair(hx) if lstm else (hx,)
        found = []
        for name, state, size in zip(("h_0", "c_0"), given, sizes, strict=False):
            checks.check_state(
                f"hx, {name}", state, (states, batch, size), weight, batched=batched, cast=cast
            )
            if packed is not None and packed.sorted_indices is not None:
                state = state.index_select(1, packed.sorted_indices)
            found.append(state if batched else state.unsqueeze(1))
        return found[0], found[1] if lstm else None

    def _with_noise(self, stack: StackCall) -> StackCall:
        """Draw what is drawn once a call: input dropout and dropped recurrent weights."""
        if not self.training or not (self.input_dropout or self.recurrent_dropout):
            return stack
        x, weights = stack.input_TBI, stack.weights
        if self.input_dropout > 0:
            x = drop(x, self.input_dropout, one_mask_a_sequence=True)
        if self.recurrent_dropout > 0:
            parts = stack.layout.split(",")
            weights = tuple(
                F.dropout(w, self.recurrent_dropout) if parts[i % len(parts)] == "w_hh" else w
                for i, w in enumerate(weights)
            )
        return stack._replace(input_TBI=x, weights=weights)

    def _present(self, result: StackResult, read: _Read, return_cell_states: bool) -> Any:
        """The result in the form the call came in."""
        output, h_n, c_n, cells = result
        if self.training and self.output_dropout > 0:
            output = drop(output, self.output_dropout, one_mask_a_sequence=True)
        shaped: Any = self._as_input(output, read)
        if not read.batched:
            h_n = h_n.squeeze(1)
            c_n = None if c_n is None else c_n.squeeze(1)
        if read.packed is not None and read.packed.unsorted_indices is not None:
            h_n = h_n.index_select(1, read.packed.unsorted_indices)
            c_n = None if c_n is None else c_n.index_select(1, read.packed.unsorted_indices)
        state = h_n if c_n is None else (h_n, c_n)
        if not return_cell_states:
            return shaped, state
        assert cells is not None
        return shaped, state, self._as_input(cells, read)

    def _as_input(self, values_TBF: Tensor, read: _Read) -> Any:
        if read.packed is not None:
            return pack(values_TBF, read.packed)
        if not read.batched:
            return values_TBF.squeeze(1)
        return values_TBF.transpose(0, 1) if self.batch_first else values_TBF
