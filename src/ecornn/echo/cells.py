"""torch's fused cells, written as the elementwise operators that they are, for compiled code.

`LSTMCell` and `GRUCell` run as one operator of torch's library each way. Compiled code calls it as
it stands: memory for all of its results, a workspace among them, checks of each, kernels for the
biases' gradients, and dropout before and after it in kernels of their own. Written out, a cell is
part of the kernels around it, and what its backward pass needs is chosen with all the rest.

Where numbers are narrow, both are computed in float32 and rounded at the end. The workspace, which
torch rounds as well, is not.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ecornn.echo.nodes import Call, calls_like

aten, prims = torch.ops.aten, torch.ops.prims
NARROW = (torch.float16, torch.bfloat16)

#: The forward operator; its backward one, and where that takes the workspace.
_LSTM = aten._thnn_fused_lstm_cell.default, aten._thnn_fused_lstm_cell_backward_impl.default, 4
_GRU = aten._thnn_fused_gru_cell.default, aten._thnn_fused_gru_cell_backward.default, 1

Parts = tuple[fx.Node, ...]


def without_fused_cells(joint: fx.GraphModule) -> int:
    """Change a graph; how many cells were replaced."""
    replaced = 0
    for forward, backward, place in (_LSTM, _GRU):
        for cell in joint.graph.find_nodes(op="call_function", target=forward):
            passes = _passes_of(cell, backward, place)
            if passes is not None:
                _replace(joint, cell, passes, lstm=forward is _LSTM[0])
                replaced += 1
    if replaced:
        joint.graph.lint()
        joint.recompile()
    return replaced


def _passes_of(cell: fx.Node, backward: Any, place: int) -> list[fx.Node] | None:
    """The cell's backward passes; None where somebody else reads its workspace."""
    found: list[fx.Node] = []
    last = 2 if backward is _LSTM[1] else 1
    for result in cell.users:
        if result.target is not operator.getitem:
            return None
        if result.args[1] != last:
            continue
        for reader in result.users:
            others = [a for k, a in enumerate(reader.args) if k != place]
            if reader.target is not backward or result in others:
                return None
            found.append(reader)
    return found


def _replace(
    joint: fx.GraphModule, cell: fx.Node, passes: Sequence[fx.Node], *, lstm: bool
) -> None:
    forward: Any = _lstm if lstm else _gru
    backward: Any = _lstm_backward if lstm else _gru_backward
    with joint.graph.inserting_before(cell):
        results, parts = forward(calls_like(joint, cell), *cell.args)
    for one in passes:
        with joint.graph.inserting_before(one):
            _put(joint, one, backward(calls_like(joint, one), parts, *one.args))
    _put(joint, cell, results)


def _put(joint: fx.GraphModule, replaced: fx.Node, results: Sequence[fx.Node]) -> None:
    for reader in list(replaced.users):
        index: Any = reader.args[1]
        if index < len(results):
            reader.replace_all_uses_with(results[index])
        joint.graph.erase_node(reader)
    joint.graph.erase_node(replaced)


class _Arithmetic:
    """On nodes, in float32 where they are narrower."""

    def __init__(self, call: Call, like: fx.Node) -> None:
        self.call, self.dtype = call, like.meta["val"].dtype
        self.columns = int(like.meta["val"].shape[1])

    def wide(self, node: fx.Node) -> fx.Node:
        narrow = node.meta["val"].dtype in NARROW
        return (
            self.call(prims.convert_element_type.default, node, torch.float32) if narrow else node
        )

    def rounded(self, node: fx.Node) -> fx.Node:
        if node.meta["val"].dtype is self.dtype:
            return node
        return self.call(prims.convert_element_type.default, node, self.dtype)

    def add(self, *nodes: fx.Node | None) -> fx.Node:
        """Of those that are there."""
        first, *others = (node for node in nodes if node is not None)
        for other in others:
            first = self.call(aten.add.Tensor, first, other)
        return first

    def mul(self, first: fx.Node, *others: fx.Node) -> fx.Node:
        for other in others:
            first = self.call(aten.mul.Tensor, first, other)
        return first

    def sub(self, left: fx.Node, right: fx.Node) -> fx.Node:
        return self.call(aten.sub.Tensor, left, right)

    def one_minus(self, node: fx.Node) -> fx.Node:
        return self.call(aten.add.Tensor, self.call(aten.neg.default, node), 1)

    def sigmoid_backward(self, gradient: fx.Node, result: fx.Node) -> fx.Node:
        return self.mul(gradient, self.one_minus(result), result)

    def tanh_backward(self, gradient: fx.Node, result: fx.Node) -> fx.Node:
        return self.mul(gradient, self.one_minus(self.mul(result, result)))

    def gate(self, node: fx.Node, index: int, size: int) -> fx.Node:
        dim = node.meta["val"].dim() - 1
        return self.call(aten.slice.Tensor, node, dim, index * size, (index + 1) * size)

    def side_by_side(self, gates: Sequence[fx.Node]) -> fx.Node:
        return self.rounded(self.call(aten.cat.default, list(gates), 1))

    def over_rows(self, node: fx.Node) -> fx.Node:
        return self.call(aten.sum.dim_IntList, node, [0])


def _lstm(
    call: Call, of_x: fx.Node, of_h: fx.Node, c: fx.Node, *biases: fx.Node | None
) -> tuple[Parts, Parts]:
    """((h, c), what the backward pass reads)"""
    do = _Arithmetic(call, of_x)
    size = do.columns // 4
    given = [do.wide(node) for node in (of_x, of_h, *biases) if node is not None]
    # Products first: their sum is one kernel of theirs, and the one value to keep
    gates = do.add(*given)
    i, f, g, o = (do.gate(gates, k, size) for k in range(4))
    i, f, o = (call(aten.sigmoid.default, gate) for gate in (i, f, o))
    g = call(aten.tanh.default, g)
    after = do.rounded(do.add(do.mul(f, do.wide(c)), do.mul(i, g)))
    h = do.rounded(do.mul(o, call(aten.tanh.default, do.wide(after))))
    return (h, after), (i, f, g, o)


def _lstm_backward(
    call: Call,
    parts: Parts,
    gradient_h: fx.Node | None,
    gradient_c: fx.Node | None,
    c: fx.Node,
    after: fx.Node,
    workspace: fx.Node,
    has_bias: bool,
) -> Parts:
    """Gradients of (the sum of the products, c, each bias)."""
    i, f, g, o = parts
    do = _Arithmetic(call, workspace)
    through = None if gradient_c is None else do.wide(gradient_c)
    of_o = None
    if gradient_h is not None:
        shown = call(aten.tanh.default, do.wide(after))
        gradient_h = do.wide(gradient_h)
        of_o = do.sigmoid_backward(do.mul(gradient_h, shown), o)
        through = do.add(do.tanh_backward(do.mul(gradient_h, o), shown), through)
    assert through is not None, "torch runs no backward pass without a gradient"
    gates = [
        do.sigmoid_backward(do.mul(through, g), i),
        do.sigmoid_backward(do.mul(through, do.wide(c)), f),
        do.tanh_backward(do.mul(through, i), g),
        call(aten.zeros_like.default, through) if of_o is None else of_o,
    ]
    whole = do.side_by_side(gates)
    found = whole, do.rounded(do.mul(through, f))
    return (*found, do.over_rows(whole)) if has_bias else found


def _gru(
    call: Call, of_x: fx.Node, of_h: fx.Node, h: fx.Node, *biases: fx.Node | None
) -> tuple[Parts, Parts]:
    do = _Arithmetic(call, of_x)
    size = do.columns // 3
    of_x, of_h, h = (do.wide(node) for node in (of_x, of_h, h))
    if biases and biases[0] is not None:
        bias_x, bias_h = (do.wide(bias) for bias in biases if bias is not None)
        of_x, of_h = do.add(of_x, bias_x), do.add(of_h, bias_h)
    r, z, x_n = (do.gate(of_x, k, size) for k in range(3))
    h_r, h_z, h_n = (do.gate(of_h, k, size) for k in range(3))
    r = call(aten.sigmoid.default, do.add(r, h_r))
    z = call(aten.sigmoid.default, do.add(z, h_z))
    n = call(aten.tanh.default, do.add(x_n, do.mul(r, h_n)))
    after = do.rounded(do.add(n, do.mul(z, do.sub(h, n))))
    return (after,), (r, z, n, h, h_n)


def _gru_backward(
    call: Call, parts: Parts, gradient: fx.Node, workspace: fx.Node, has_bias: bool
) -> Parts:
    """Gradients of (the product with x, that with h, h, the bias of x, that of h)."""
    r, z, n, h, h_n = parts
    do = _Arithmetic(call, workspace)
    gradient = do.wide(gradient)
    of_z = do.sigmoid_backward(do.mul(gradient, do.sub(h, n)), z)
    of_n = do.tanh_backward(do.mul(gradient, do.one_minus(z)), n)
    of_r = do.sigmoid_backward(do.mul(of_n, h_n), r)
    of_x = do.side_by_side((of_r, of_z, of_n))
    of_h = do.side_by_side((of_r, of_z, do.mul(of_n, r)))
    found = of_x, of_h, do.rounded(do.mul(gradient, z))
    return (*found, do.over_rows(of_x), do.over_rows(of_h)) if has_bias else found
