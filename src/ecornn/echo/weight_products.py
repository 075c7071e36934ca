"""Gradients taken out of a call's backward pass, for those of many calls to be made at once.

A weight's gradient is, for each call of a part, a product over the rows of that call: few rows, a
result as large as the weight, and another kernel to add it to the sum of the calls before. The sum
over many calls is one product over all of their rows. So the backward pass hands over the two
factors instead, where these are smaller, and `weight_sums.py` multiplies those of many calls. A
bias's gradient is a sum over rows that are such a factor. A sum over very many rows takes compiled
code two kernels; the second is left to the sum of many calls.
An input that is the same at every call, such as attention's values, has a gradient like a weight's.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ecornn.echo.gathered import Factor, Gathered, Product, RowSum, Small
from ecornn.echo.graph import number_of_the_call
from ecornn.echo.nodes import calls_like

aten = torch.ops.aten

#: Both factors together are at most this part of the result: then it is the result's bytes that
#: take the time, and keeping the factors of some calls takes less memory than it saves kernels.
LARGEST_FACTORS = 0.5
#: A gradient of at most so many bytes takes a kernel as long as an empty one takes.
SMALL_BYTES = 64 * 2**10
#: Sums over more rows than these are made in two kernels; what the first may make.
ROWS_OF_TWO_KERNELS = 1024
LARGEST_FIRST_BYTES = 256 * 2**10

#: The same entries in the same order.
_SHOWN = (
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default),
    *(aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default),
)


class Backward:
    """A backward pass that is being changed. What is `changing` is no factor to keep: an optimizer
    may write to a weight while other calls are still to come."""

    def __init__(self, module: fx.GraphModule, changing: Collection[str]) -> None:
        self.module, self._changing = module, changing
        (self._output,) = module.graph.find_nodes(op="output")
        self.results: list[Any] = list(self._output.args[0])
        self.gradients = len(self.results)
        self._places: dict[fx.Node, int] = {}  # of what is handed over as a factor
        self.gathered: list[Gathered] = []

    def end(self) -> tuple[Gathered, ...]:
        if self.gathered:
            self._output.args = (type(self._output.args[0])(self.results),)
            self.module.graph.eliminate_dead_code()
            self.module.graph.lint()
            self.module.recompile()
        return tuple(self.gathered)

    def take_products(self, inputs: Collection[int]) -> None:
        """In the place of such a gradient stands a factor of it; the other factors follow at the
        end."""
        for k in sorted(inputs):
            product = _product_of(self.results, k) if k < self.gradients else None
            if product is None:
                continue
            chain, found = product
            (left, left_turned), (right, right_turned) = map(_untransposed, found.args)
            if left.name in self._changing or right.name in self._changing:
                continue
            self.gathered.append(
                Product(
                    k,
                    Factor(self._handed(left, k), left_turned),
                    Factor(self._handed(right), right_turned),
                    tuple(map(int, found.meta["val"].shape)),
                    chain[0].meta["val"].dtype,
                    turned=sum(map(_transposes, chain)) % 2 == 1,
                )
            )

    def take_row_sums(self, weights: Collection[int]) -> None:
        for k in sorted(weights):
            found = _sum_of(self.results[k])
            if found is None or found.args[1] != [0] or found.args[0] not in self._places:
                continue
            factor, value = found.args[0], self.results[k].meta["val"]
            if factor.meta["val"].dim() != 2:
                continue
            size = tuple(map(int, value.shape))
            self.gathered.append(RowSum(k, self._places[factor], size, value.dtype))
            self.results[k] = factor

    def take_small(self, weights: Collection[int]) -> None:
        """Gradients of biases and the like, as they are or as some sums whose sum they are."""
        values = {k: self.results[k].meta.get("val") for k in sorted(weights)}
        for k, value in values.items():
            if _is_small(value):
                rows = self._in_two(k)
                self.gathered.append(Small(k, tuple(value.shape), rows))

    def _handed(self, factor: fx.Node, instead_of: int | None = None) -> int:
        """Where it stands among the results. Something must stand where a gradient was, or
        inductor (2.11) fails: the same factor once more."""
        if instead_of is not None:
            self.results[instead_of] = factor
        elif factor in self._places:
            return self._places[factor]
        else:
            instead_of = len(self.results)
            self.results.append(factor)
        return self._places.setdefault(factor, instead_of)

    def _in_two(self, k: int) -> int | None:
        """Leave a sum half done: how many sums stand in its place."""
        found = _sum_of(self.results[k], read_once=True)
        if found is None:
            return None
        of = found.args[0]
        value, columns = of.meta["val"], math.prod(self.results[k].meta["val"].shape)
        size = _three(of)
        if size is None or size[2] != columns or value.dtype not in (torch.float32, torch.float64):
            return None
        if list(found.args[1]) != list(range(value.dim() - 1)):
            return None
        groups, rows = size[:2]
        small = rows * columns * value.itemsize <= LARGEST_FIRST_BYTES
        if groups * rows <= ROWS_OF_TWO_KERNELS or not small:
            return None
        with self.module.graph.inserting_before(found):
            call = calls_like(self.module, found)
            viewed = of if value.dim() == 3 else call(aten.view.default, of, list(size))
            self.results[k] = call(aten.sum.dim_IntList, viewed, [0])
        return rows


def _three(node: Any) -> tuple[int, int, int] | None:
    """The three numbers of a tensor's size, or of what it was before its first two were made one;
    entry by entry, that is."""
    value = node.meta["val"]
    sizes = [tuple(value.shape)]
    if value.dim() == 2:
        pointwise = node.op == "call_function" and torch.Tag.pointwise in node.target.tags
        shown = [n for n in node.all_input_nodes if n.target in _SHOWN] if pointwise else []
        sizes += [tuple(n.args[0].meta["val"].shape) for n in shown]
    for size in sizes:
        fits = len(size) == 3 and all(isinstance(n, int) for n in (*size, *value.shape))
        if fits and (value.dim() == 3 or (size[0] * size[1], size[2]) == tuple(value.shape)):
            return size
    return None


def _sum_of(node: Any, *, read_once: bool = False) -> Any:
    """The sum over rows that a result shows; `read_once`: nobody else reads it."""
    while isinstance(node, fx.Node) and (node.target in _SHOWN or _widens(node)):
        if read_once and (len(node.users) > 1 or _widens(node)):
            return None
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.target is not aten.sum.dim_IntList:
        return None
    return None if node.kwargs or (read_once and len(node.users) > 1) else node


def _is_small(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided  # sparse ones have no bytes to ask for
        and all(isinstance(n, int) for n in value.shape)
        and value.nbytes <= SMALL_BYTES
    )


def views_of(forward: fx.GraphModule, weights: Collection[int]) -> set[str]:
    """Names of what shares a weight's memory, or may."""
    inputs = forward.graph.find_nodes(op="placeholder")
    found = {inputs[k].name for k in weights if k < len(inputs)}
    for node in forward.graph.nodes:
        shares = isinstance(node.target, torch._ops.OpOverload) and any(
            argument.alias_info is not None for argument in node.target._schema.arguments
        )
        if shares and any(argument.name in found for argument in node.all_input_nodes):
            found.add(node.name)
    return found


def _product_of(results: Sequence[Any], k: int) -> tuple[list[Any], Any] | None:
    """(what stands between, the last first; the product) of a result that nobody else reads."""
    node: Any = results[k]
    chain: list[Any] = []
    if not isinstance(node, fx.Node) or results.count(node) > 1:
        return None
    while len(node.users) == 1 and (_transposes(node) or _widens(node)):
        chain.append(node)
        node = node.args[0]
    if node.target not in (aten.mm.default, aten.bmm.default) or len(node.users) != 1:
        return None
    found, factors = node.meta.get("val"), [arg.meta.get("val") for arg in node.args]
    if not all(isinstance(value, Tensor) for value in (found, *factors)):
        return None
    if not all(isinstance(n, int) for n in found.shape):  # a weight's size is known
        return None
    entries = sum(number_of_the_call(value.numel()) * value.itemsize for value in factors)
    if entries > LARGEST_FACTORS * found.numel() * found.itemsize:
        return None
    return [*chain, node], node


def _widens(node: Any) -> bool:
    """To another type of numbers: of a sum it is the sum of those of its parts."""
    # to wider ones: nothing is rounded that was not before
    if node.target not in (torch.ops.prims.convert_element_type.default, aten._to_copy.default):
        return False
    before, after = node.args[0].meta.get("val"), node.meta.get("val")
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return False
    return bool(after.dtype.is_floating_point and after.itemsize >= before.itemsize)


def _untransposed(node: Any) -> tuple[Any, bool]:
    return (node.args[0], True) if _transposes(node) else (node, False)


def _transposes(node: Any) -> bool:
    return node.target is aten.t.default or (
        node.target is aten.permute.default and list(node.args[1]) in ([1, 0], [0, 2, 1])
    )
