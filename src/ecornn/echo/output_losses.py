"""Output layers whose scores go to a cross entropy and nowhere else, as the one operator that never
has all scores (`ops/linear_cross_entropy.py`), for code that is compiled.

Of models with many classes, such as words, scores are the largest feature map by far, and what
torch makes of them on the way back is as large. It happens before torch differentiates the graph:
what is replaced are calls of functions of `torch.nn.functional`, as the model has them.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses import FakeTensor

from ecornn.echo.graph import NotUnderstood, number_of_the_call
from ecornn.echo.traced import copied
from ecornn.ops.linear_cross_entropy import (
    REDUCTIONS,
    linear_cross_entropy,
    scratch_of,
    sums_in,
)

#: Scores of fewer bytes are left as they are: there is little to save.
FEWEST_BYTES = 64 * 2**20
#: And those that are not so many times what the operator takes instead.
LEAST_GAIN = 2
#: Where it is done: on a CPU inductor's own code is the quicker one.
DEVICES: tuple[str, ...] = ("cuda",)
#: Other tensors, such as those that are divided over GPUs, are left alone.
PLAIN = (Tensor, FakeTensor)

_SIGNATURE = inspect.signature(F.cross_entropy)
_LINEAR = (torch._C._nn.linear, F.linear)
#: Calls that leave rows in their order and classes last, if the last size says so.
_ROWS = ("flatten", "view", "reshape", "contiguous")
_CASTS = ("float", "to")
#: Two dimensions are exchanged: for (B, V, T), which is torch's other form of scores.
_EXCHANGES = {"transpose": ((1, 2), (2, 1), (-1, -2), (-2, -1)), "permute": ((0, 2, 1),)}
#: Calls that may stand between the layer and the loss, to where it is moved: they write nothing.
#: Whoever goes by what writes misses some: arguments `inplace` and `out`, operators of one's own.
_HARMLESS = (
    *_ROWS,
    *_CASTS,
    *_EXCHANGES,
    "long",
    "size",
    "numel",
    "dim",
    "t",
    "unsqueeze",
    "squeeze",
)
_MODES = (torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast)
_HARMLESS_FUNCTIONS = (operator.getitem, operator.mul, torch.flatten, torch.reshape)


@dataclass(frozen=True)
class Output:
    """A cross entropy and the layer that its scores come from, with the calls in between."""

    loss: fx.Node
    layer: fx.Node
    between: tuple[fx.Node, ...]
    target: fx.Node
    options: dict[str, Any]

    @property
    def layer_inputs(self) -> tuple[Any, ...]:
        """Input, weight and bias."""
        names = ("input", "weight", "bias")
        given = dict(zip(names, self.layer.args, strict=False)) | dict(self.layer.kwargs)
        return tuple(given.get(name) for name in names)

    def told(self) -> str:
        classes = _value(self.layer).shape[-1]
        names = f"{self.layer.name} and {self.loss.name}"
        return f"{names} are one operator, which has {classes:,} scores of some rows at once"


def with_output_losses(module: fx.GraphModule) -> tuple[fx.GraphModule, list[str]]:
    """A graph as torch.compile has traced it, changed if there is something to change, and what
    was. The given one stays as it is."""
    transformed = any("increment_nesting" in str(node.target) for node in module.graph.nodes)
    if transformed or not any(True for _ in _outputs(module)):
        return module, []  # transforms of torch.func do not take the operator
    changed = copied(module)
    said = []
    for output in list(_outputs(changed)):
        said.append(output.told())
        _replace(changed.graph, output)
    changed.graph.lint()
    changed.recompile()
    return changed, said


def _outputs(module: fx.GraphModule) -> Iterator[Output]:
    for node in module.graph.find_nodes(op="call_function", target=F.cross_entropy):
        found = _output(node)
        if found is not None and _is_large(found) and _undisturbed(found):
            yield found


def _output(loss: fx.Node) -> Output | None:
    try:
        given = _SIGNATURE.bind(*loss.args, **loss.kwargs)
    except TypeError:
        return None
    given.apply_defaults()
    asked = given.arguments
    if any(asked[name] is not None for name in ("weight", "size_average", "reduce")):
        return None
    names = ("ignore_index", "reduction", "label_smoothing")
    options = {name: asked[name] for name in names}
    if any(isinstance(value, fx.Node) for value in options.values()):
        return None
    target = asked["target"]
    if options["reduction"] not in REDUCTIONS or not isinstance(target, fx.Node):
        return None
    if not isinstance(_value(target), Tensor) or _value(target).dtype != torch.int64:
        return None  # parts of classes
    traced = _layer_of(asked["input"], loss)
    return None if traced is None else Output(loss, *traced, target, options)


def _layer_of(scores: Any, reader: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]] | None:
    """The layer that scores come from, through calls that leave rows in order; of scores (B, V, T)
    the last call is the one that makes them so."""
    between: list[fx.Node] = []
    while isinstance(scores, fx.Node) and list(scores.users) == [reader]:
        if scores.op == "call_function" and scores.target in _LINEAR:
            exchanged = bool(between) and _are_exchanged(between[0])
            two_dimensional = _value(between[0] if between else scores).dim() == 2
            return (scores, tuple(between)) if exchanged or two_dimensional else None
        exchanges = not between and _are_exchanged(scores)
        if scores.op != "call_method" or not (exchanges or _keeps_rows(scores)):
            return None
        between.append(scores)
        reader, scores = scores, scores.args[0]
    return None


def _are_exchanged(node: Any) -> bool:
    if not isinstance(node, fx.Node) or node.op != "call_method" or node.kwargs:
        return False
    dims = node.args[1:]
    if len(dims) == 1 and isinstance(dims[0], (list, tuple)):
        dims = tuple(dims[0])
    return dims in _EXCHANGES.get(str(node.target), ()) and _value(node).dim() == 3


def _keeps_rows(node: fx.Node) -> bool:
    before, after = _value(node.args[0]), _value(node)
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return False
    if node.target in _CASTS:
        # float32 is what the operator computes in; wider numbers it does not have
        wide = after.dtype in (before.dtype, sums_in(before.dtype))
        return wide and before.device == after.device and before.shape == after.shape
    classes: Any = before.shape[-1]
    # a view may also be one of the same bits as other numbers
    same = isinstance(classes, int) and before.dtype == after.dtype
    return node.target in _ROWS and same and after.shape[-1:] == (classes,)


def _is_large(output: Output) -> bool:
    scores, loss = _value(output.layer), _value(output.loss)
    if type(scores) not in PLAIN or scores.device.type not in DEVICES:
        return False
    _, weight, bias = (_value(one) for one in output.layer_inputs)
    if type(weight) not in PLAIN or weight.dim() != 2:
        return False
    if bias is not None and bias.shape != weight.shape[:1]:
        return False
    classes: Any = scores.shape[-1]
    trained = scores.requires_grad and loss.requires_grad
    if not trained or scores.dim() < 2 or not isinstance(classes, int):
        return False
    try:
        elements = number_of_the_call(scores.numel())
    except NotUnderstood:
        return False
    count = elements * scores.element_size()
    taken = scratch_of(elements // classes, weight, scores.dtype)
    return bool(count >= FEWEST_BYTES and count >= LEAST_GAIN * taken)


def _undisturbed(output: Output) -> bool:
    """May the layer be moved to where the loss is? Casts and modes are no matter: in which numbers
    scores are is said, and that gradients are wanted known."""
    node = output.layer.next
    while node is not output.loss:
        harmless = node.op == "call_method" and node.target in _HARMLESS
        if not harmless and node.target not in _HARMLESS_FUNCTIONS and node.target not in _MODES:
            return False
        node = node.next
    return True


def _replace(graph: fx.Graph, output: Output) -> None:
    with graph.inserting_before(output.loss):
        options = {**output.options, "dtype": _value(output.layer).dtype}
        loss = graph.call_function(
            linear_cross_entropy, (*output.layer_inputs, output.target), options
        )
        loss.meta = dict(output.loss.meta)
        dtype = _value(output.loss).dtype
        cast = graph.call_method("to", (loss, dtype))
        cast.meta = dict(output.loss.meta)
    output.loss.replace_all_uses_with(cast)
    for node in (output.loss, *output.between, output.layer):
        graph.erase_node(node)


def _value(node: Any) -> Any:
    """What torch.compile has traced it with."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None
