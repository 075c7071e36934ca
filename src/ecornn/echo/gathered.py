"""Gradients of a part's weights, made for many of its calls at once of what each has handed over.

A call's backward pass hands over less than a gradient, or something that is made faster: the two
factors of a product, the rows of a sum, or a sum over some of its rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Columns:
    """What some calls have handed over, by its place among a call's results."""

    def __init__(self, places: Mapping[int, int], calls: Sequence[Sequence[Tensor]]) -> None:
        self._places, self._columns = places, list(zip(*calls, strict=True))
        self._together: dict[tuple[int, int], Tensor] = {}

    def of(self, place: int) -> Sequence[Tensor]:
        found: Sequence[Tensor] = self._columns[self._places[place]]
        return found

    def side_by_side(self, place: int, dim: int) -> Tensor:
        """One for all calls; made once, although two weights' gradients may have a factor in
        common, and that factor's rows be the gradient of a bias."""
        given = self.of(place)
        if len(given) == 1:
            return given[0]
        known = self._together.get((place, dim))
        if known is None:
            known = self._together[place, dim] = torch.cat(list(given), dim)
        return known


class Gathered(Protocol):
    """Makes the gradient of input `weight`."""

    @property
    def weight(self) -> int: ...

    @property
    def places(self) -> tuple[int, ...]:
        """What it is made of."""

    @property
    def later_bytes(self) -> int:
        """Of memory that a call's backward pass does not take yet."""

    def of_calls(self, columns: Columns, before: Tensor | None) -> Tensor:
        """The calls' sum, added to that of others."""

    def result(self, found: Tensor) -> Tensor:
        """What is handed over of a sum."""


@dataclass(frozen=True)
class Factor:
    """`place` among the outputs. `turned`: the product takes its transpose."""

    place: int
    turned: bool

    def of_calls(self, columns: Columns, *, left: bool) -> Tensor:
        """Those of several calls side by side, along the rows that the product adds up over."""
        together = columns.side_by_side(self.place, -1 if left is not self.turned else -2)
        return together.mT if self.turned else together


@dataclass(frozen=True)
class Product:
    """As large as `size`: of matrices, or of as many pairs of them as its first number says.
    `turned`: the gradient is the result's transpose."""

    weight: int
    left: Factor
    right: Factor
    size: tuple[int, ...]
    dtype: torch.dtype
    turned: bool

    @property
    def places(self) -> tuple[int, ...]:
        return self.left.place, self.right.place

    @property
    def later_bytes(self) -> int:
        return torch.Size(self.size).numel() * self.dtype.itemsize

    def of_calls(self, columns: Columns, before: Tensor | None) -> Tensor:
        """Written to `out`, which autocast leaves alone."""
        left = self.left.of_calls(columns, left=True)
        right = self.right.of_calls(columns, left=False)
        single = len(self.size) == 2
        if before is not None and before.dtype is left.dtype:
            add = torch.addmm if single else torch.baddbmm
            return add(before, left, right, out=before)
        found = left.new_empty(self.size)
        (torch.mm if single else torch.bmm)(left, right, out=found)
        if before is not None:
            return before.add_(found)
        return found if found.dtype is self.dtype else found.to(self.dtype)

    def result(self, found: Tensor) -> Tensor:
        return found.mT if self.turned else found


@dataclass(frozen=True)
class RowSum:
    """Of a factor that is handed over for a product anyway, as a bias's gradient is."""

    weight: int
    place: int
    size: tuple[int, ...]
    dtype: torch.dtype

    @property
    def places(self) -> tuple[int, ...]:
        return (self.place,)

    @property
    def later_bytes(self) -> int:
        return torch.Size(self.size).numel() * self.dtype.itemsize

    def of_calls(self, columns: Columns, before: Tensor | None) -> Tensor:
        rows = columns.side_by_side(self.place, -2)
        found = rows.sum(0, dtype=self.dtype).view(self.size)
        return found if before is None else before + found

    def result(self, found: Tensor) -> Tensor:
        return found


@dataclass(frozen=True)
class Small:
    """A small gradient; `rows`: each call hands over that many rows, whose sum it is."""

    weight: int
    size: tuple[int, ...]
    rows: int | None = None

    @property
    def places(self) -> tuple[int, ...]:
        return (self.weight,)

    @property
    def later_bytes(self) -> int:
        return 0

    def of_calls(self, columns: Columns, before: Tensor | None) -> Tensor:
        column = columns.of(self.weight)
        if self.rows is not None:
            found = torch.stack(list(column)).sum((0, 1)).view(self.size)
        else:
            found = column[0] if len(column) == 1 else torch.stack(list(column)).sum(0)
        return found if before is None else before + found

    def result(self, found: Tensor) -> Tensor:
        return found
