"""`ecornn::linear_cross_entropy`: an output layer and the cross entropy of its scores as one
operator, which makes some rows of scores at once and never has them all.

Once a row's scores are there, so is all that its gradient takes but one factor, what arrives at the
loss. The operator makes the gradients as if that were one, before the scores are given up for those
of the next rows: no product is run twice, and what stays for the backward pass is as large as the
layer's input and its weights. torch holds all scores two or three times over.

Rows are added up in float32, or in float64 if they are. Of 16-bit numbers torch rounds the gradient
of each score, and here its distance from zero at the right class is computed in float32 before it
is rounded, as there.

Shape suffixes: N rows, R rows at once, H inputs, V classes, W classes and what fills up a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ecornn.errors import InvalidInput
from ecornn.kernels.products import product_in
from ecornn.kernels.reference.row_losses import Rows
from ecornn.kernels.row_losses import VECTOR_BYTES, is_served, row_losses
from ecornn.ops.only_once import only_once

#: Bytes of scores that are there at once, about: small beside what a model of so many classes has
#: in weights. With 128 MiB, GPT-2's seven products of weights' gradients took 40 % longer than
#: one of all rows, by a profile: each but the first is added to what was there.
CHUNK_BYTES = 192 * 2**20
#: Products are made of tiles of so many rows.
ROWS_ALIGNED = 128
#: By what gradients of scores are multiplied before they are rounded: float16 has no numbers below
#: 2**-24, and a scale of the loss that is there for its sake arrives too late. Gradients of scores
#: are 1 at most, and float16 ends just short of 2**16.
FACTORS = {torch.float16: 2.0**15}
REDUCTIONS = ("mean", "sum")
#: Why a second derivative raises, and what has one.
NOT_TWICE = (
    "a second derivative of an output layer and its cross entropy that are one operator, which "
    "makes their gradients along with the loss: take it of the model as it is written, not compiled"
)
_ARGUMENTS = 7
_LAYER = 3


class Loss(NamedTuple):
    """Sums over the rows that count. Gradients are those of `loss`, times the factor of the scores'
    dtype; empty if not asked for. Those of weights are not rounded: of 16 bits they might not hold
    a sum over all rows."""

    loss: Tensor
    rows: Tensor
    d_input_NH: Tensor
    d_weight_VH: Tensor
    d_bias_V: Tensor


def linear_cross_entropy(
    input: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`cross_entropy(linear(input, weight, bias), target)` of inputs (…, H) and targets (…), with
    scores of `dtype`, such as autocast chooses; None: the input's."""
    if reduction not in REDUCTIONS:
        expected = " or ".join(map(repr, REDUCTIONS))
        raise InvalidInput("reduction", repr(reduction), expected, "add up no less than all rows")
    dtype = dtype or input.dtype
    x_NH, weight_VH = input.flatten(0, -2).to(dtype), weight_VH.to(dtype)
    bias_V = None if bias_V is None else bias_V.to(dtype)
    layer = (x_NH, weight_VH, bias_V)
    wanted = [one is not None and one.requires_grad for one in layer]
    loss: Tensor
    rows: Tensor
    loss, rows, *_ = torch.ops.ecornn.linear_cross_entropy(
        *layer, target.flatten(), ignore_index, label_smoothing, wanted
    )
    if reduction == "sum":
        return loss
    # of no rows the mean is not a number, as torch's, but gradients are zeros
    return (loss / rows.clamp(min=1)).where(rows > 0, torch.nan)


def sums_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def input_gradient_in(dtype: torch.dtype) -> torch.dtype:
    """float16 might not hold it times the factor."""
    return sums_in(dtype) if dtype in FACTORS else dtype


def rows_at_once(rows: int, row_bytes: int) -> int:
    """In equal shares, but for what completes tiles."""
    chunks = -(-rows * row_bytes // CHUNK_BYTES)
    return max(-(-rows // (max(chunks, 1) * ROWS_ALIGNED)), 1) * ROWS_ALIGNED


def row_bytes_of(classes: int, dtype: torch.dtype, device: torch.device) -> int:
    """Of scores; those of 16 bits are there in float32 as well, unless a kernel reads them."""
    size, wide = dtype.itemsize, sums_in(dtype).itemsize
    alone = size == wide or is_served(dtype, device)
    return classes * (size if alone else size + wide)


def filled_up(classes: int, dtype: torch.dtype, device: torch.device) -> int:
    """By how many classes; on a CPU, whose products read anything, by none."""
    return -classes % (VECTOR_BYTES // dtype.itemsize) if device.type == "cuda" else 0


def scratch_of(rows: int, weight_VH: Tensor, dtype: torch.dtype) -> int:
    """Bytes that the operator takes beside its results, of scores of `dtype`."""
    (classes, width), device = weight_VH.shape, weight_VH.device
    filled = classes + filled_up(classes, dtype, device)
    at_once = min(rows, rows_at_once(rows, row_bytes_of(classes, dtype, device)))
    scores, wide = at_once * row_bytes_of(filled, dtype, device), sums_in(dtype).itemsize
    # products come when scores in wider numbers are gone; those in wider numbers take rows of the
    # input's gradient beside, or all that is multiplied in such numbers
    products = at_once * filled * dtype.itemsize
    by_parts = input_gradient_in(dtype) != dtype
    if dtype.itemsize != wide and not _has_mixed_products(device):
        products += at_once * (filled + width) * wide
        products += filled * width * wide if by_parts else 0
    elif by_parts:
        products += at_once * width * wide
    taken = max(scores, products)
    if filled > classes:
        taken += filled * width * dtype.itemsize
    return taken


def _has_mixed_products(device: torch.device) -> bool:
    """Of 16-bit numbers, in float32."""
    return device.type == "cuda"


@torch.library.custom_op(
    "ecornn::linear_cross_entropy",
    mutates_args=(),
    schema="(Tensor input, Tensor weight, Tensor? bias, Tensor target, int ignore_index, "
    "float label_smoothing, bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _operator(
    input_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    target_N: Tensor,
    ignore_index: int,
    label_smoothing: float,
    wanted: Sequence[bool],
) -> Loss:
    with torch.autocast(input_NH.device.type, enabled=False):
        layer = _Layer(input_NH, weight_VH, bias_V)
        gradients = _Gradients(input_NH, layer, wanted)
        rows = Rows(layer.classes, label_smoothing, FACTORS.get(input_NH.dtype, 1.0))
        losses_N = input_NH.new_empty(len(input_NH), dtype=layer.sums)
        counts_N = target_N != ignore_index
        # raises where there is no such class, which a kernel would not see
        weight_VH.new_empty(layer.classes).index_select(0, target_N.where(counts_N, 0))
        target_N = target_N.where(counts_N, -1)
        row_bytes = row_bytes_of(layer.classes, input_NH.dtype, input_NH.device)
        for chunk in _slices(len(input_NH), rows_at_once(len(input_NH), row_bytes)):
            _make(layer, gradients, chunk, target_N[chunk], losses_N[chunk], rows)
        return gradients.with_loss(losses_N.sum(), counts_N.sum(dtype=layer.sums))


def _slices(rows: int, at_once: int) -> Iterator[slice]:
    """One at least: sums of no rows are zeros."""
    return (slice(at, min(at + at_once, rows)) for at in range(0, max(rows, 1), at_once))


class _Layer:
    """Rows of scores are filled up to whole vectors by classes that nothing is ever in: with a bias
    of -∞ their softmax is zero, and so is their gradient."""

    def __init__(self, input_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> None:
        self.input_NH = input_NH
        self.classes, self.sums = weight_VH.shape[0], sums_in(input_NH.dtype)
        more = filled_up(self.classes, input_NH.dtype, input_NH.device)
        self.weight_WH, self.bias_W = weight_VH, bias_V
        if more:
            self.weight_WH = F.pad(weight_VH, (0, 0, 0, more))
            bias_V = weight_VH.new_zeros(self.classes) if bias_V is None else bias_V
            self.bias_W = F.pad(bias_V, (0, more), value=-torch.inf)

    def scores(self, rows: slice) -> Tensor:
        return F.linear(self.input_NH[rows], self.weight_WH, self.bias_W)


def _make(
    layer: _Layer,
    gradients: _Gradients,
    chunk: slice,
    target_R: Tensor,
    losses_R: Tensor,
    rows: Rows,
) -> None:
    """The losses of some rows; their part of the gradients is added to the others'. A function, so
    that their scores are gone before the next ones are made."""
    scores_RW = layer.scores(chunk)
    row_losses(scores_RW, target_R, losses_R, rows)
    gradients.add(chunk, scores_RW)


class _Gradients:
    def __init__(self, input_NH: Tensor, layer: _Layer, wanted: Sequence[bool]) -> None:
        self.layer, self.input_NH = layer, input_NH
        self.of_input, self.of_weight, self.of_bias = wanted
        of_input = input_NH.shape if self.of_input else 0
        self.d_input_NH = input_NH.new_empty(of_input, dtype=input_gradient_in(input_NH.dtype))
        self._sums: dict[str, Tensor] = {}

    def add(self, rows: slice, d_scores_RW: Tensor) -> None:
        if self.of_input:
            d_input_RH = self.d_input_NH[rows]
            if d_input_RH.dtype == d_scores_RW.dtype:
                torch.mm(d_scores_RW, self.layer.weight_WH, out=d_input_RH)
            else:
                d_input_RH.copy_(self._product(d_scores_RW, self.layer.weight_WH))
        if self.of_weight:
            self._add_up("weight", d_scores_RW, self.input_NH[rows])
        if self.of_bias:
            self._add_up("bias", d_scores_RW, d_scores_RW.new_ones(len(d_scores_RW), 1))

    def _add_up(self, name: str, d_scores_RW: Tensor, columns: Tensor) -> None:
        self._sums[name] = self._product(d_scores_RW.t(), columns, self._sums.get(name))

    def _product(self, left: Tensor, right: Tensor, before: Tensor | None = None) -> Tensor:
        """In the numbers that sums are in, added to what was there before."""
        sums = self.layer.sums
        if left.dtype != sums and not _has_mixed_products(left.device):
            left, right = left.to(sums), right.to(sums)
        return product_in(sums, left, right, before)

    def with_loss(self, loss: Tensor, rows: Tensor) -> Loss:
        classes = self.layer.classes
        d_weight_VH, d_bias_V = loss.new_empty(0), loss.new_empty(0)
        if self.of_weight:
            d_weight_VH = self._sums["weight"][:classes]
        if self.of_bias:
            d_bias_V = self._sums["bias"][:classes, 0]
        return Loss(loss, rows, self.d_input_NH, d_weight_VH, d_bias_V)


@_operator.register_fake
def _(
    input_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    target_N: Tensor,
    ignore_index: int,
    label_smoothing: float,
    wanted: Sequence[bool],
) -> Loss:
    sums = sums_in(input_NH.dtype)
    loss, rows = (input_NH.new_empty((), dtype=sums) for _ in range(2))
    of_input, of_weight, of_bias = wanted
    return Loss(
        loss,
        rows,
        input_NH.new_empty(
            input_NH.shape if of_input else 0, dtype=input_gradient_in(input_NH.dtype)
        ),
        loss.new_empty(weight_VH.shape if of_weight else 0),
        loss.new_empty(weight_VH.shape[:1] if of_bias else 0),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Loss) -> None:
    # a compiler does not keep the layer for it: no backward pass that it traces reads it
    ctx.save_for_backward(*inputs[:_LAYER], *output[2:])
    ctx.dtype = inputs[0].dtype
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, d_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    layer, gradients = ctx.saved_tensors[:_LAYER], ctx.saved_tensors[_LAYER:]
    found: list[Tensor | None] = [None] * _LAYER
    if d_loss is not None:
        if ctx.dtype in FACTORS:
            d_loss = d_loss / FACTORS[ctx.dtype]
        for k, gradient in enumerate(gradients):
            if ctx.needs_input_grad[k]:
                # in float32: what arrives may be a scale that 16 bits do not hold
                found[k] = (gradient.to(d_loss.dtype) * d_loss).to(ctx.dtype)
    if torch.is_grad_enabled():
        found[:] = only_once(found, [one for one in layer if one is not None], NOT_TWICE)
    return (*found, *(None,) * (_ARGUMENTS - _LAYER))


_operator.register_autograd(_backward, setup_context=_keep)
OPERATOR = _operator._opoverload


@register_flop_formula(torch.ops.ecornn.linear_cross_entropy, get_raw=True)
def _flops(input_NH: Tensor, weight_VH: Tensor, *args: Any, out_val: Any = None, **_: Any) -> int:
    of_input, of_weight, _of_bias = args[-1]
    return int(2 * input_NH.shape[0] * weight_VH.numel() * (1 + of_input + of_weight))
