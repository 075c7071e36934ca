"""Sums of rows that have one entry other than zero, written as that entry, for code that is
compiled.

The gradient of a cross entropy is a row of zeros, with one entry at the right class, less the
softmax as many times as the row's sum says. torch adds up all classes to find that. Inductor may
have the rows in memory then, beside the scores, instead of overwriting these: of a language model's
scores it held both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ecornn.echo.nodes import calls_like

aten = torch.ops.aten


def without_single_sums(joint: fx.GraphModule) -> int:
    """Change a graph; how many sums were replaced."""
    replaced = 0
    for node in joint.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        factor = _factor_of(node)
        if factor is None:
            continue
        with joint.graph.inserting_before(node):
            entry = calls_like(joint, node)(aten.neg.default, factor)
        node.replace_all_uses_with(entry)
        joint.graph.erase_node(node)
        replaced += 1
    if replaced:
        joint.graph.lint()
        joint.recompile()
    return replaced


def _factor_of(total: fx.Node) -> fx.Node | None:
    """Of a sum over the classes of what torch's `nll_loss_backward` makes: a column, by which it
    multiplies rows with one -1. That there is one is known of this operator alone: whoever writes
    the same rows by hand may have classes that do not exist. Rows of a single class are a column
    too, and one of as many classes as the call says may be."""
    product: Any = total.args[0]
    if total.args[1:] != ([1], True) or total.kwargs:
        return None
    # by its name: graphs are copied before they come here, and what they say of operators with them
    made_by = str(product.meta.get("original_aten"))
    if made_by != str(aten.nll_loss_backward.default) or product.target is not aten.mul.Tensor:
        return None
    form = _form(product)
    if form is None or len(form) != 3 or not isinstance(form[1], int) or form[1] == 1:
        return None
    for factor in product.args:
        if _is_column(factor) and _form(factor) == _form(total):
            found: fx.Node = factor
            return found
    return None


def _form(node: Any) -> tuple[Any, ...] | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return (*value.shape, value.dtype) if isinstance(value, Tensor) else None


def _is_column(node: Any) -> bool:
    form = _form(node)
    return form is not None and len(form) == 3 and isinstance(form[1], int) and form[1] == 1
