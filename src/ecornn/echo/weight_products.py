"""Products that make the weights' gradients of one call, taken out of its backward pass.

A weight's gradient is, for each call of a part, a product over the rows of that call: few rows, a
result as large as the weight, and another kernel to add it to the sum of the calls before. The sum
over many calls is one product over all of their rows. So the backward pass hands over the two
factors instead, where these are smaller, and `weight_sums.py` multiplies those of many calls.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ecornn.echo.graph import number_of_the_call

aten = torch.ops.aten

#: Both factors together are at most this part of the result: then it is the result's bytes that
#: take the time, and keeping the factors of some calls takes less memory than it saves kernels.
LARGEST_FACTORS = 0.5
#: A gradient of at most so many bytes takes a kernel as long as an empty one takes.
SMALL_BYTES = 64 * 2**10


@dataclass(frozen=True)
class Factor:
    """`place` among the outputs. `turned`: the product takes its transpose."""

    place: int
    turned: bool

    def of_calls(self, given: Sequence[Tensor], *, left: bool) -> Tensor:
        """Those of several calls side by side, along the rows that the product adds up over."""
        if len(given) == 1:
            together = given[0]
        else:
            together = torch.cat(list(given), dim=1 if left is not self.turned else 0)
        return together.t() if self.turned else together


@dataclass(frozen=True)
class Product:
    """The gradient of weight `weight`, as large as `size`; `turned`: the result's transpose is."""

    weight: int
    left: Factor
    right: Factor
    size: tuple[int, int]
    dtype: torch.dtype
    turned: bool

    @property
    def bytes(self) -> int:
        return self.size[0] * self.size[1] * self.dtype.itemsize

    def of_calls(
        self, lefts: Sequence[Tensor], rights: Sequence[Tensor], before: Tensor | None
    ) -> Tensor:
        """Of several calls, added to `before`. Written to `out`, which autocast leaves alone."""
        left = self.left.of_calls(lefts, left=True)
        right = self.right.of_calls(rights, left=False)
        if before is not None and before.dtype is left.dtype:
            return torch.addmm(before, left, right, out=before)
        found = left.new_empty(self.size)
        torch.mm(left, right, out=found)
        if before is not None:
            return before.add_(found)
        return found if found.dtype is self.dtype else found.to(self.dtype)

    def result(self, found: Tensor) -> Tensor:
        return found.t() if self.turned else found


def take_out(
    backward: fx.GraphModule, weights: Collection[int], changing: Collection[str]
) -> tuple[Product, ...]:
    """Change a backward pass: in the place of a weight's gradient it returns the left factor of its
    product, and all right factors at the end. What is `changing` is no factor to keep: an optimizer
    may write to a weight while other calls are still to come."""
    output: Any
    (output,) = backward.graph.find_nodes(op="output")
    results: list[Any] = list(output.args[0])
    found: list[Product] = []
    for k in sorted(weights):
        product = _product_of(results, k) if k < len(results) else None
        if product is None:
            continue
        chain, mm = product
        (left, left_turned), (right, right_turned) = map(_untransposed, mm.args)
        if left.name in changing or right.name in changing:
            continue
        results[k] = left
        results.append(right)
        rows, columns = map(int, mm.meta["val"].shape)
        found.append(
            Product(
                k,
                Factor(k, left_turned),
                Factor(len(results) - 1, right_turned),
                (rows, columns),
                chain[0].meta["val"].dtype,
                turned=sum(map(_transposes, chain)) % 2 == 1,
            )
        )
    if found:
        output.args = (type(output.args[0])(results),)
        backward.graph.eliminate_dead_code()
        backward.recompile()
    return tuple(found)


def small_results(backward: fx.GraphModule, weights: Collection[int]) -> list[int]:
    """Gradients of biases and the like."""
    output: Any
    (output,) = backward.graph.find_nodes(op="output")
    values = {k: output.args[0][k].meta.get("val") for k in weights}
    return [
        k
        for k, value in values.items()
        if isinstance(value, Tensor)
        and value.layout is torch.strided  # sparse ones have no bytes to ask for
        and all(isinstance(n, int) for n in value.shape)
        and value.nbytes <= SMALL_BYTES
    ]


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
    while len(node.users) == 1 and _keeps_entries(node):
        chain.append(node)
        node = node.args[0]
    if node.target is not aten.mm.default or len(node.users) != 1:
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


def _keeps_entries(node: Any) -> bool:
    """A transpose, or another type of numbers: of a sum it is the sum of those of its parts."""
    if _transposes(node):
        return True
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
        node.target is aten.permute.default and list(node.args[1]) == [1, 0]
    )
