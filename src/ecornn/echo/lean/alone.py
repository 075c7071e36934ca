"""Does anything beside the backward pass still refer to a tensor's memory?

Counted by whatever can refer to it: tensors that share its storage (views, what other operators
kept, arrays of NumPy), the storage itself, and names in Python. What these counts are for a sole
owner depends on torch and Python, and is found by running the same code on a tensor that nobody
else can have.
"""

from __future__ import annotations

import sys
from threading import Thread
from typing import Any

import torch
from torch import Tensor

Counts = tuple[int, ...]


def counts_of(tensor: Tensor) -> Counts:
    held: Any = tensor  # not all that is asked is in torch's type hints
    storage = held.untyped_storage()
    found = [torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)]
    found += [held._use_count(), sys.getrefcount(tensor)]
    if held._is_view():
        base = held._base
        found += [base._use_count(), sys.getrefcount(base)]
    return tuple(found)


class Loan:
    """A tensor that is kept for the backward pass of a model's call. It is `private` if nobody else
    refers to it when the call is over: then nobody can have come to it later."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor
        self.private = False
        self.counts: Counts = ()

    def end_of_call(self, *, seen_by_other_streams: bool) -> None:
        """When the model's call is over and its names are gone."""
        tensor, self._tensor = self._tensor, None
        assert tensor is not None
        state = _held_by_a_call()
        self.counts = counts_of(tensor)
        if not seen_by_other_streams and _is_plain(tensor):
            self.private = self.counts == _sole_owner(tensor._is_view(), state)[0]

    def is_over(self, tensor: Tensor) -> bool:
        """Within a backward pass: is this the last that will ever be read of the tensor?"""
        state = _held_by_a_call()
        self.counts = counts_of(tensor)
        if not self.private or torch._C._autograd._get_current_graph_task_keep_graph():
            return False
        return self.counts == _sole_owner(tensor._is_view(), state)[1]


class AssumedLoan(Loan):
    """Of a tensor without numbers, whose references are not those of a real one: what was found for
    a real one is taken to hold."""

    def __init__(self, tensor: Tensor, *, private: bool) -> None:
        super().__init__(tensor)
        self._assumed = private

    def end_of_call(self, *, seen_by_other_streams: bool) -> None:
        self._tensor, self.private = None, self._assumed

    def is_over(self, tensor: Tensor) -> bool:
        return self.private


def _is_plain(tensor: Tensor) -> bool:
    """All of its memory, in order, made by an operator."""
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return whole and type(tensor) is Tensor and not tensor.is_leaf


def _held_by_a_call() -> int:
    """References to an argument while a function of Python runs: one more as long as torch's
    compiler looks at frames anywhere in the process, because calls are not inlined then."""
    return _references(object())


def _references(value: object) -> int:
    return sys.getrefcount(value)


def _sole_owner(view: bool, held_by_a_call: int) -> tuple[Counts, Counts]:
    """The counts at the end of a call and in the backward pass, of a tensor that nobody has, while
    calls hold so much. In a thread of its own: hooks and modes of the caller's would hold the
    tensor as well. Where another thread begins or ends to compile meanwhile, nobody's."""
    known = _SOLE_OWNERS.get((view, held_by_a_call))
    if known is not None:
        return known
    found: list[Counts] = []
    thread = Thread(target=_keep_and_count, args=(view, found))
    before = _held_by_a_call()
    thread.start()
    thread.join()
    if not before == _held_by_a_call() == held_by_a_call:
        return (), ()
    at_end, in_backward = found
    _SOLE_OWNERS[view, held_by_a_call] = at_end, in_backward
    return at_end, in_backward


#: By whether it is a view and what a call holds.
_SOLE_OWNERS: dict[tuple[bool, int], tuple[Counts, Counts]] = {}


def _keep_and_count(view: bool, found: list[Counts]) -> None:
    def call() -> tuple[Tensor, Loan]:
        given = torch.zeros(2, 2, 2, requires_grad=True) * 2
        tensor = given.flatten(0, 1) if view else given
        loan = Loan(tensor)
        return _Keeps.apply(tensor, loan), loan

    result, loan = call()
    loan.end_of_call(seen_by_other_streams=True)
    found.append(loan.counts)
    result.backward()
    found.append(loan.counts)


class _Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loan: Loan) -> Tensor:
        ctx.save_for_backward(tensor)
        ctx.loan = loan
        return tensor.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (tensor,) = ctx.saved_tensors
        ctx.loan.is_over(tensor)
        return grad.expand(tensor.shape), None
