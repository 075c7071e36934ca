"""Products with a vector, written as multiplications and sums, for code that is compiled.

The scores of attention are a product of many rows with one vector; its gradients are a product with
a vector, and one of two vectors. As products they run in torch's library, which reads and writes
the large factor in memory, although it was made by an elementwise operator just before and could be
made again; and each is a launch. As sums they are part of the kernels around them. They are summed
in float32 then, never in TF32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from ecornn.echo.nodes import Call, calls_like

aten = torch.ops.aten

#: The same entries in the same order or another.
_SHOWN = (
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.t.default),
    *(aten.permute.default, aten.transpose.int, aten.squeeze.dim, aten.unsqueeze.default),
)


def without_vector_products(joint: fx.GraphModule) -> int:
    """Change a graph; how many products were replaced."""
    replaced = 0
    for node in joint.graph.find_nodes(op="call_function", target=aten.mm.default):
        steps = _steps_for(*node.args)
        if steps is not None:
            _replace(joint, node, steps)
            replaced += 1
    if replaced:
        joint.graph.lint()
        joint.recompile()
    return replaced


Steps = Callable[[Call, fx.Node, fx.Node], fx.Node]


def _steps_for(left: Any, right: Any) -> Steps | None:
    sizes = _size(left), _size(right)
    if sizes[0] is None or sizes[1] is None:
        return None
    if _is_one(sizes[0][1]):
        return _outer
    if _is_one(sizes[1][1]):
        return _with_column if _made_entry_by_entry(left) else None
    return _with_row if _is_one(sizes[0][0]) and _made_entry_by_entry(right) else None


def _made_entry_by_entry(factor: fx.Node) -> bool:
    """By an operator that a kernel around can take in. A matrix that is in memory anyway, such as
    a weight, is read as well by torch's own product."""
    node: Any = factor
    while node.op == "call_function" and node.target in _SHOWN:
        node = node.args[0]
    tags = getattr(node.target, "tags", ()) if node.op == "call_function" else ()
    return torch.Tag.pointwise in tags


def _is_one(size: Any) -> bool:
    """A symbol's number is not asked for: the graph would be compiled for it alone."""
    return isinstance(size, int) and size == 1


def _outer(call: Call, left: fx.Node, right: fx.Node) -> fx.Node:
    return call(aten.mul.Tensor, left, right)


def _with_column(call: Call, left: fx.Node, right: fx.Node) -> fx.Node:
    each = call(aten.mul.Tensor, left, call(aten.permute.default, right, [1, 0]))
    return call(aten.sum.dim_IntList, each, [1], True)


def _with_row(call: Call, left: fx.Node, right: fx.Node) -> fx.Node:
    each = call(aten.mul.Tensor, call(aten.permute.default, left, [1, 0]), right)
    return call(aten.sum.dim_IntList, each, [0], True)


def _replace(joint: fx.GraphModule, product: fx.Node, steps: Steps) -> None:
    with joint.graph.inserting_before(product):
        left, right = product.args
        result = steps(calls_like(joint, product), left, right)  # type: ignore[arg-type]
    product.replace_all_uses_with(result)
    joint.graph.erase_node(product)


def _size(node: Any) -> tuple[Any, Any] | None:
    """Of a matrix of float32. Narrower numbers would be rounded before they are summed."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor) or value.dtype is not torch.float32:
        return None
    rows, columns = value.shape
    return rows, columns
