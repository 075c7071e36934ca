"""Scores of a cross entropy in rows that begin at multiples of a cache line, for code that is
compiled for CUDA.

A vocabulary has any number of words. Rows of scores that follow each other without a gap then begin
anywhere, and products that read or write them are slow: a training step of a language model of
33,278 words took 20 ms instead of 15 where inductor was told to leave them so. Inductor pads
products where its measurements say so, in one pass and perhaps not in the other. The gradient that
it writes has aligned rows in any case; if the scores do not, it cannot take their place, and both
are held at once. Here scores always have a few classes more, which nobody reads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from ecornn.echo.graph import NotUnderstood, number_of_the_call
from ecornn.echo.nodes import calls_like
from ecornn.echo.report import GraphReport

aten = torch.ops.aten

#: Where inductor begins the rows of what it allocates.
LINE_BYTES = 128
#: Fewer classes than this it leaves as they are.
FEWEST_CLASSES = 1024
#: The matrix is copied at each call, which is as much work as the product of some hundred rows.
FEWEST_ROWS = 1024

_PRODUCTS = {aten.mm.default: 1, aten.addmm.default: 2}  # and where their last matrix is
_PAD, _CAST = aten.constant_pad_nd.default, torch.ops.prims.convert_element_type.default
_SAME_MEMORY = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


class AlignScores(CustomGraphPass):
    """What inductor calls with the joint graph first of all: what it would have called, then this.
    It pickles passes as a part of its cache's key."""

    def __init__(self, others: Any, told: GraphReport | None, key: str) -> None:
        several = isinstance(others, (list, tuple))
        self._others = tuple(others) if several else () if others is None else (others,)
        self._told, self._key = told, key

    def __call__(self, graph: fx.Graph) -> None:
        for other in self._others:
            other(graph)
        assert graph.owning_module is not None
        changed = with_aligned_scores(graph.owning_module)
        if self._told is not None:
            self._told.aligned_scores = changed

    def uuid(self) -> Any:
        """None, which is of passes that cannot be told from each other, if one of them is so."""
        uuids = [getattr(other, "uuid", lambda: None)() for other in self._others]
        return None if None in uuids else (self._key, *uuids)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (None, None, self._key)


def with_aligned_scores(joint: fx.GraphModule, device: str = "cuda") -> int:
    """Change a graph; how many products were replaced."""
    replaced = 0
    for target in _PRODUCTS:
        for product in joint.graph.find_nodes(op="call_function", target=target):
            replaced += _pads(product, device) and _replace(joint, product)
    if replaced:
        joint.graph.lint()
        joint.recompile()
    return replaced


def _pads(product: fx.Node, device: str) -> bool:
    value, at = product.meta.get("val"), _PRODUCTS[product.target]  # type: ignore[index]
    if not isinstance(value, Tensor) or value.device.type != device or product.kwargs:
        return False
    rows: Any
    classes: Any
    rows, classes = value.shape
    if not isinstance(classes, int) or classes < FEWEST_CLASSES or len(product.args) != at + 1:
        return False
    if classes * value.element_size() % LINE_BYTES == 0:
        return False
    bias: Any = product.args[0]
    if at == 2 and bias.meta["val"].shape != (classes,):
        return False
    try:
        if number_of_the_call(rows) < FEWEST_ROWS:
            return False
    except NotUnderstood:
        return False
    return _are_scores(product)


def _are_scores(product: fx.Node) -> bool:
    """Is the logarithm of a softmax made of it, and are they nobody's but the graph's?"""
    same = [product]
    for node in same:
        same += [user for user in node.users if user.target in _SAME_MEMORY]
    read = [user for node in same for user in node.users if user not in same]
    if any(user.op == "output" for user in read):
        return False
    for node in read:  # under autocast they are read in float32
        if node.target in (*_SAME_MEMORY, _CAST):
            read += node.users
    # by its name: see `single_sums`
    return str(aten._log_softmax.default) in {str(one.meta.get("original_aten")) for one in read}


def _replace(joint: fx.GraphModule, product: fx.Node) -> bool:
    value: Tensor = product.meta["val"]
    classes, line = value.shape[1], LINE_BYTES // value.element_size()
    more = -classes % line
    forms = _forms_of(product, value.new_empty(value.shape[0], classes + more)[:, :classes])
    if forms is None:
        return False
    with joint.graph.inserting_before(product):
        call = calls_like(joint, product)
        *bias, rows, matrix = product.args
        wide_bias, wide = ([call(_PAD, one, [0, more]) for one in of] for of in (bias, [matrix]))
        padded = call(product.target, *wide_bias, rows, *wide)
        scores = call(aten.slice.Tensor, padded, 1, 0, classes)
    product.replace_all_uses_with(scores)
    joint.graph.erase_node(product)
    for node, form in forms.items():
        node.meta["val"] = form
        node.meta.pop("tensor_meta", None)
    return True


def _forms_of(product: fx.Node, scores: Tensor) -> dict[fx.Node, Tensor] | None:
    """Of everything that is the scores' memory in another shape; None if there is something that
    rows with gaps cannot be."""
    forms = {product: scores}

    def form(node: fx.Node) -> Any:
        return forms.get(node, node.meta["val"])

    for node in (waiting := [product]):
        for user in node.users:
            if user.target in _SAME_MEMORY:
                _, shape = fx.node.map_arg(user.args, form)
                try:
                    forms[user] = aten.view.default(forms[node], shape)
                except (RuntimeError, ValueError):
                    return None
                waiting.append(user)
    del forms[product]
    return forms
