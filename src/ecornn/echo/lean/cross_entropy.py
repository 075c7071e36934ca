"""Cross entropy that keeps its scores instead of their log-softmax, and works on some rows at once.

torch holds three times the scores at the peak of the backward pass: the log-softmax, the gradient
of it and that of the scores. Here it is the scores and their gradient; or one of both, where
nothing else refers to the scores: then their gradient takes their place. The operators, and the
order in which they add, are torch's own, so that every bit is the same.

Of float32 scores on a GPU the backward pass is one kernel of ours, which reads them once and writes
the gradient. All that the log-softmax was computed with are two numbers a row: its largest score,
which no order of adding changes, and the logarithm of its sum. That is, negated and to the bit,
what torch's log-softmax is where the largest score stands.

Shape suffixes: N rows, V classes, R rows of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from ecornn.echo.lean.alone import Loan
from ecornn.kernels.losses import RowSums, cross_entropy_gradient, cross_entropy_launcher

aten = torch.ops.aten

NONE = 0
REDUCTIONS = {"none": NONE, "mean": 1, "sum": 2}
#: Scores of fewer bytes are left to torch: there is little to save.
FEWEST_BYTES = 16 * 2**20
#: Bytes of scores worked on at once, at least, and of the one buffer beside them. A large GPU reads
#: and writes as many in less time than a kernel takes to launch: smaller chunks would cost time.
CHUNK_BYTES = 8 * 2**20
#: Many scores are divided into so many chunks at most: a chunk is seven calls of torch's. With 117
#: chunks of the smallest size the language model's step took 40 % longer than eager when called,
#: and 16 % in a graph, where few rows at once leave most of a GPU idle.
MOST_CHUNKS = 16
#: Chunks begin at multiples of so many rows. torch's kernels for CUDA add the entries of a row in
#: an order that depends on where in 16 bytes it begins: this way it begins where it does for torch.
ROWS_ALIGNED = 16
#: Tensors without numbers are served as those that they stand for.
PLAIN = (Tensor, FakeTensor)
#: The targets that torch ignores by default.
IGNORED = -100


@dataclass(frozen=True)
class Call:
    """The arguments of `torch.nn.functional.cross_entropy`."""

    input: Tensor
    target: Tensor
    weight: Tensor | None = None
    size_average: bool | None = None
    ignore_index: int = IGNORED
    reduce: bool | None = None
    reduction: str = "mean"
    label_smoothing: float = 0.0

    def refusal(self) -> str | None:
        """Why the call is left to torch; None if it can be served."""
        scores, target = self.input, self.target
        if type(scores) not in PLAIN or type(target) not in PLAIN:
            return "not plain tensors"
        if scores.dim() != 2 or scores.shape[:1] != target.shape:
            return "other shapes than (N, V) and (N)"
        if target.dtype is not torch.int64 or target.device != scores.device:
            return "the targets are not indices of classes on the same device"
        if self.weight is not None or self.label_smoothing != 0.0:
            return "weights of classes, or smoothed labels"
        if self.size_average is not None or self.reduce is not None:
            return "arguments that torch gave up"
        if self.reduction not in REDUCTIONS:
            return "an unknown reduction"
        if not scores.dtype.is_floating_point:
            return "no real numbers"
        if not (scores.requires_grad and torch.is_grad_enabled()):
            return "no gradient is asked for"
        if torch.is_autocast_enabled(scores.device.type) and scores.itemsize < 4:
            return "autocast chooses another precision"
        return "few scores" if scores.nbytes < FEWEST_BYTES else None

    def carry_out(self, loan: Loan) -> Tensor:
        found: Tensor = _CrossEntropy.apply(
            self.input, self.target, self.ignore_index, REDUCTIONS[self.reduction], loan
        )
        return found


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scores_NV: Tensor,
        target_N: Tensor,
        ignore_index: int,
        reduction: int,
        loan: Loan,
    ) -> Tensor:
        kernel = cross_entropy_launcher(scores_NV)
        rows = rows_at_once(scores_NV)
        pairs = zip(scores_NV.split(rows), target_N.split(rows), strict=True)
        chunks = [
            _losses(scores, target, ignore_index, summed=kernel is not None)
            for scores, target in pairs
        ]
        loss, *sums = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        for largest_log_N in sums[1:]:
            largest_log_N.neg_()
        total = scores_NV.new_zeros(())
        if reduction != NONE:
            picked_N1 = loss.neg_().unsqueeze(1)
            single_N = _single(target_N, ignore_index)
            loss, total = aten.nll_loss_forward(picked_N1, single_N, None, reduction, IGNORED)
        ctx.save_for_backward(scores_NV, target_N, total, *sums)
        ctx.asked, ctx.loan, ctx.kernel = (reduction, ignore_index), loan, kernel
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scores_NV, target_N, total, *sums = ctx.saved_tensors
        if torch.is_grad_enabled():  # for a second derivative: torch's operators have one
            found = _gradient(scores_NV, target_N, total, grad, *ctx.asked)
            return found, None, None, None, None
        if not torch.compiler.is_compiling() and ctx.loan.is_over(scores_NV):
            found = scores_NV.detach()
        else:
            found = torch.empty_like(scores_NV, memory_format=torch.contiguous_format)
        # hooks on what is kept may have given it another form
        as_kept = all(kept.is_contiguous() for kept in (scores_NV, target_N, *sums))
        if ctx.kernel is not None and as_kept and not torch.compiler.is_compiling():
            largest_N, log_sum_N = sums
            slope_N = _slopes(target_N, total, grad, largest_N, *ctx.asked)
            if type(scores_NV) is not FakeTensor:
                summed = RowSums(largest_N, log_sum_N, slope_N)
                cross_entropy_gradient(ctx.kernel, scores_NV, target_N, summed, found)
            return found, None, None, None, None
        rows = rows_at_once(scores_NV)
        each = [tensor.split(rows) for tensor in (scores_NV, target_N, found)]
        grads = grad.split(rows) if grad.dim() else [grad] * len(each[0])
        for scores, target, out, of_rows in zip(*each, grads, strict=True):
            _gradient(scores, target, total, of_rows, *ctx.asked, out=out)
        return found, None, None, None, None


def _losses(
    scores_RV: Tensor, target_R: Tensor, ignore_index: int, *, summed: bool
) -> tuple[Tensor, ...]:
    """Of each row, and where the rows are `summed` their largest scores and log-softmaxes; a
    function, so that a chunk's log-softmax is gone before the next is made."""
    log_RV = aten._log_softmax(scores_RV, 1, False)
    loss_R: Tensor = aten.nll_loss_forward(log_RV, target_R, None, NONE, ignore_index)[0]
    if not summed:
        return (loss_R,)
    # the largest log-softmax is that of the largest score: less the logarithm of the sum, negated
    return loss_R, scores_RV.amax(1), log_RV.amax(1)


def _single(target_N: Tensor, ignore_index: int) -> Tensor:
    """Targets among a single class: of its log-softmax torch adds the losses in the same order."""
    return (target_N == ignore_index) * IGNORED


def _slopes(
    target_N: Tensor,
    total: Tensor,
    grad: Tensor,
    like_N: Tensor,
    reduction: int,
    ignore_index: int,
) -> Tensor:
    """What arrives at each target's log-softmax."""
    given = (_single(target_N, ignore_index), None, reduction, IGNORED, total)
    found: Tensor = aten.nll_loss_backward(grad, like_N.unsqueeze(1), *given)
    return found.squeeze(1)


def _gradient(
    scores_RV: Tensor,
    target_R: Tensor,
    total: Tensor,
    grad: Tensor,
    reduction: int,
    ignore_index: int,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`out` may be the scores' own memory: it holds the log-softmax in between, since each of
    torch's kernels reads an entry for the last time just before it writes it."""
    if out is None:
        log_RV = aten._log_softmax(scores_RV, 1, False)
    else:
        log_RV = aten._log_softmax.out(scores_RV, 1, False, out=out)
    of_log_RV = aten.nll_loss_backward(grad, log_RV, target_R, None, reduction, ignore_index, total)
    given = (of_log_RV, log_RV, 1, scores_RV.dtype)
    if out is not None:
        return aten._log_softmax_backward_data.out(*given, out=out)  # type: ignore[no-any-return]
    return aten._log_softmax_backward_data(*given)  # type: ignore[no-any-return]


def rows_at_once(scores_NV: Tensor) -> int:
    rows, classes = scores_NV.shape
    fit = max(CHUNK_BYTES // (classes * scores_NV.itemsize), -(-rows // MOST_CHUNKS))
    return max(-(-fit // ROWS_ALIGNED), 1) * ROWS_ALIGNED
