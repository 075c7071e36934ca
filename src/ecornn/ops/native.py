"""Second derivatives for kernels that autograd records by itself but only once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ecornn.ops.recurrence import recurrence
from ecornn.spec import weight_layout


class _Covered(torch.autograd.Function):
    """Outputs of a native kernel, unchanged. A first derivative goes to the native kernel; where
    a derivative of the derivative will be taken (create_graph), it goes to the definition."""

    @staticmethod
    def forward(
        ctx: Any, definition: Callable[..., tuple[Tensor, ...]], n: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.definition = definition
        ctx.save_for_backward(*tensors[n:])
        ctx.outputs = n
        ctx.set_materialize_grads(False)
        # detached: fresh outputs of this function, which may be changed in place as torch.nn's can
        return tuple(t.detach() for t in tensors[:n])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        inputs = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return (None, None, *grads, *(None,) * len(inputs))
        # aliases, so that each input gets its own share alone even where one is computed from
        # another or given twice
        aliases = [x.view_as(x) for x in inputs]
        outputs = ctx.definition(*aliases)
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None]
        wanted = [x for x in aliases if x.requires_grad]
        found = iter(
            torch.autograd.grad(
                [o for o, _ in pairs],
                wanted,
                [g for _, g in pairs],
                create_graph=True,
                allow_unused=True,
            )
        )
        shares = [next(found) if x.requires_grad else None for x in aliases]
        return (None, None, *(None,) * ctx.outputs, *shares)


def differentiable_again(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    definition: Callable[..., tuple[Tensor, ...]],
) -> tuple[Tensor, ...]:
    """The same outputs, which can be differentiated more than once: `definition` computes them
    from `inputs` by operators that can."""
    covered: tuple[Tensor, ...] = _Covered.apply(definition, len(outputs), *outputs, *inputs)
    return covered


#: oneDNN's LSTM layer in autograd's graph, and the inputs it has gradients for, in order.
_ONEDNN = "MkldnnRnnLayerBackward0"
_ONEDNN_INPUTS = ("input", "weight0", "weight1", "weight2", "weight3", "hx_", "cx_")


def onednn_differentiable_again(output: Tensor, layers: int) -> bool:
    """Let the `layers` oneDNN nodes behind `output` be differentiated more than once; False if they
    are not found as this knows them.

    A hook on the node costs less than half of a function around the call, which for a single small
    step with gradients is the difference between 5 % more than torch.nn's time and 10 %.
    """
    found = _onednn_nodes(output, layers)
    if len(found) != layers or not hasattr(type(found[0]), "_saved_weight0"):
        return False
    for node in found:
        node.register_hook(_onednn_from_definition)
    return True


#: cuDNN's whole stack in autograd's graph; its inputs are the input, the weights, h_0 and c_0.
_CUDNN = "CudnnRnnBackward0"


def cudnn_differentiable_again(
    output: Tensor, weights: int, definition: Callable[..., tuple[Tensor, ...]]
) -> bool:
    """Let the cuDNN call behind `output` be differentiated more than once, by a hook as above;
    False if it is not found as this knows it. `definition` computes the call's outputs from the
    input, h_0, c_0 where there is one, and the weights. It must not hold any of them: the node
    would keep them beyond its backward pass."""
    node: Any = output.grad_fn
    if node is None or node.name() != _CUDNN or not hasattr(type(node), "_saved_weight"):
        return False
    # h_0 and c_0 have their places even where there is no c_0 or neither wants a gradient
    if len(node.next_functions) != weights + 3:
        return False
    node.register_hook(partial(_cudnn_from_definition, definition))
    return True


def _cudnn_from_definition(
    definition: Callable[..., tuple[Tensor, ...]],
    d_inputs: Sequence[Tensor | None],
    d_outputs: Sequence[Tensor | None],
) -> Any:
    if not torch.is_grad_enabled():
        return None
    node: Any = torch._C._current_autograd_node()  # asked for and not kept, as below
    saved = (node._saved_input, *node._saved_weight, node._saved_hx, node._saved_cx)
    aliases = [None if value is None else value.view_as(value) for value in saved]
    x, *weights, h0, c0 = aliases
    outputs = definition(x, h0, *(() if c0 is None else (c0,)), *weights)
    return _differentiated(outputs, d_outputs, aliases, d_inputs)


def _onednn_nodes(output: Tensor, most: int) -> list[Any]:
    """The nearest `most` nodes; what lies behind them is not looked at."""
    if most == 1 and output.grad_fn is not None and output.grad_fn.name() == _ONEDNN:
        return [output.grad_fn]
    found: list[Any] = []
    waiting = deque([output.grad_fn])
    seen = set(waiting)
    while waiting and len(found) < most:
        node: Any = waiting.popleft()
        if node.name() == _ONEDNN:
            found.append(node)
        for further, _ in node.next_functions:
            if further is not None and further not in seen:
                seen.add(further)
                waiting.append(further)
    return found


def _onednn_from_definition(
    d_inputs: Sequence[Tensor | None], d_outputs: Sequence[Tensor | None]
) -> Any:
    """The gradients again, by operators that can be differentiated, where that will be done."""
    if not torch.is_grad_enabled():
        return None
    # asked for and not kept: a hook that held its own node would never be freed
    node: Any = torch._C._current_autograd_node()
    # aliases, as above
    inputs = [getattr(node, f"_saved_{name}") for name in _ONEDNN_INPUTS]
    aliases = [x.view_as(x) for x in inputs]
    x, w_ih, w_hh, b_ih, b_hh, h0, c0 = aliases
    reverse, biased = node._saved_reverse, node._saved_has_biases
    outputs = recurrence(
        x.flip(0) if reverse else x,
        h0.unsqueeze(0),
        c0.unsqueeze(0),
        [w_ih, w_hh, b_ih, b_hh] if biased else [w_ih, w_hh],
        *(None, None, None, None),
        *("lstm", weight_layout("lstm", bias=biased, projection=False, layer_norm=False)),
        *("zero", "zeros", False, "reference", "states"),
    )
    output = outputs[0].flip(0) if reverse else outputs[0]
    return _differentiated((output, outputs[1][0], outputs[2][0]), d_outputs, aliases, d_inputs)


def _differentiated(
    outputs: Sequence[Tensor],
    d_outputs: Sequence[Tensor | None],
    inputs: Sequence[Tensor | None],
    d_inputs: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Gradients in place of `d_inputs`, which can be differentiated again."""
    pairs = zip(outputs, d_outputs, strict=False)  # a node has more outputs than a layer
    arrived = [(o, d) for o, d in pairs if d is not None]
    # cuDNN gives all weights gradients where one of them wants one
    is_wanted = [
        x is not None and x.requires_grad and d is not None
        for x, d in zip(inputs, d_inputs, strict=True)
    ]
    wanted = [x for x, is_one in zip(inputs, is_wanted, strict=True) if is_one and x is not None]
    found = iter(
        torch.autograd.grad(
            [o for o, _ in arrived], wanted, [d for _, d in arrived], create_graph=True
        )
    )
    return tuple(next(found) if is_one else None for is_one in is_wanted)
