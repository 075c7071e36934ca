"""Which kept results take another form (`forms.py`): what was decided is encoded, verified again,
or left as it is."""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import torch
from torch import Tensor, fx

from ecornn.echo.encode import encode, why_no_bits
from ecornn.echo.forms import BF16, BITS, FP8, NARROW, Form
from ecornn.echo.graph import FAILURES, number_of_the_call
from ecornn.echo.options import Options
from ecornn.echo.pipeline import Decision
from ecornn.echo.plan.fused import REDUCTIONS
from ecornn.echo.report import GraphReport
from ecornn.echo.rewrite import Modules, duplicate
from ecornn.echo.verify import differences
from ecornn.errors import InvalidInput
from ecornn.sizes import size_text

aten = torch.ops.aten
STEP = "other forms of what is kept"

#: Maps of fewer bytes stay as they are: statistics and such, of which there is little to save and
#: whose rounding would be that of a whole row.
LEAST_MAP_BYTES = 64 * 2**10
LOSSY = {"bf16": BF16, "fp8": FP8}
WIDE = {"bf16": (torch.float32,), "fp8": (torch.float32, torch.bfloat16, torch.float16)}
#: The oldest that converts to numbers of eight bits in compiled code.
FP8_CAPABILITY = (8, 9)

#: Operators of which the second result tells places along a dimension, by where that is given, or
#: (None) in a plane.
_INDICES: dict[Any, int | None] = {
    aten.max.dim: 1,
    aten.min.dim: 1,
    aten.sort.default: 1,
    aten.topk.default: 2,
    aten.max_pool2d_with_indices.default: None,
    aten.adaptive_max_pool2d.default: None,
}


def in_other_forms(
    joint: fx.GraphModule, decision: Decision, told: GraphReport, options: Options
) -> Modules:
    """The two passes, or those as they were and the reason in the report."""
    passes, (forward, backward) = decision.passes, decision.modules
    told.forms = tell_bits(decision)
    if options.masks != "bits" and options.maps == "exact":
        return decision.modules
    if passes is None:
        told.refused.append((STEP, "the graph was left to torch"))
        return decision.modules
    before = differences(joint, passes, decision.modules)
    encoded = duplicate(forward), duplicate(backward)

    def choose(node: fx.Node) -> Form | str:
        return chosen_form(node, options)

    try:
        found = encode(encoded, passes.forward_outputs, choose)
        wrong = [one for one in differences(joint, passes, encoded) if one not in before]
    except FAILURES as error:
        told.refused.append((STEP, f"{type(error).__name__}: {error}"))
        return decision.modules
    if wrong:
        told.refused.append((STEP, f"not the same computation: {wrong[0]}"))
        return decision.modules
    told.forms += tell(found.encoded)
    told.refused += [(STEP, why) for why in tell_left(found.left)]
    return encoded


def chosen_form(node: fx.Node, options: Options) -> Form | str:
    """Or why it stays as it is; "" where nothing else was asked for."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return ""
    if options.masks == "bits" and (bound := places_told_apart(node)) is not None:
        return next((form for most, form in NARROW.items() if bound <= most), "")
    if options.masks == "bits" and value.dtype is torch.bool:
        return why_no_bits(value) or BITS
    if options.maps != "exact" and value.dtype in WIDE[options.maps]:
        return why_no_map(node) or LOSSY[options.maps]
    return ""


def why_no_map(node: fx.Node) -> str:
    """Why a result in wide numbers is not one to round; "" if it is."""
    value: Tensor = node.meta["val"]
    made: Any = node.target
    of_several = made is operator.getitem
    if of_several:
        made = node.args[0].target  # type: ignore[union-attr]
    packet = getattr(getattr(made, "overloadpacket", None), "__name__", "")
    # beside its result an operator returns statistics
    if (of_several and node.args[1] != 0) or packet in REDUCTIONS:
        return "a statistic"
    if _bytes(value) < LEAST_MAP_BYTES:
        return f"smaller than {size_text(LEAST_MAP_BYTES)}"
    return "" if _is_dense(value) else "its numbers do not lie side by side"


def _bytes(value: Tensor) -> int:
    return int(number_of_the_call(value.numel())) * value.itemsize


def _is_dense(value: Tensor) -> bool:
    """In some order of its dimensions: then another form of it has its strides."""
    pairs = zip(value.stride(), value.shape, strict=True)
    known = sorted((number_of_the_call(stride), number_of_the_call(size)) for stride, size in pairs)
    entries = 1
    for stride, size in known:
        if size != 1 and stride != entries:
            return False
        entries *= size
    return True


def places_told_apart(node: fx.Node) -> int | None:
    """How many numbers, from zero on, an index can be; None where that is not known."""
    node = _of_which_it_is_a_view(node)
    if node.target is not operator.getitem or node.args[1] != 1:
        return None
    of: Any = node.args[0]
    if of.target not in _INDICES:
        return None
    at, size = _INDICES[of.target], of.args[0].meta["val"].shape
    if at is None:
        sizes = size[-2:]
    else:
        dim = of.args[at] if len(of.args) > at else of.kwargs.get("dim", -1)
        sizes = (size[dim],) if size else ()
    if not sizes or any(not isinstance(one, int) for one in sizes):
        return None
    found = 1
    for one in sizes:
        found *= one
    return found


def _of_which_it_is_a_view(node: fx.Node) -> fx.Node:
    """A view of the same numbers: torch's partitioner may keep it in the place of what it is of."""
    while getattr(node.target, "is_view", False):
        of: Any = node.args[0]
        if of.meta["val"].dtype is not node.meta["val"].dtype:
            break
        node = of
    return node


def tell(found: list[tuple[fx.Node, Form]]) -> list[str]:
    """In sentences, for `explain()`."""
    counts, saved = Counter[str](), Counter[str]()
    for node, form in found:
        value: Tensor = node.meta["val"]
        with value.fake_mode, torch.no_grad():  # type: ignore[attr-defined]
            after = sum(map(_bytes, form.there(value)))
        counts[form.suffix] += 1
        saved[form.suffix] += _bytes(value) - after
    return [
        f"kept as {suffix}: {count} results, {size_text(saved[suffix])} less"
        + (", rounded: gradients are not eager mode's" if suffix in LOSSY else ", without loss")
        for suffix, count in counts.items()
    ]


def tell_bits(decision: Decision) -> list[str]:
    """Of masks whose bits the plan keeps, in a sentence."""
    joint = decision.chosen.joint
    if joint is None or not joint.bits:
        return []
    arriving = decision.modules[1].graph.find_nodes(op="placeholder")
    kept = [node for node in arriving if node.name in joint.bits]
    size = sum(_bytes(node.meta["val"]) for node in kept)
    return [f"masks of which the plan keeps bits: {len(kept)}, {size_text(size)}"] if kept else []


def tell_left(left: list[tuple[fx.Node, str]]) -> list[str]:
    """What stays as it is, by reason."""
    counts, sizes = Counter[str](), Counter[str]()
    for node, why in left:
        counts[why] += 1
        sizes[why] += _bytes(node.meta["val"])
    return [
        f"{count} results of {size_text(sizes[why])} stay as they are: {why}"
        for why, count in counts.items()
    ]


def check_device(options: Options, codegen: str, device: torch.device) -> None:
    """Numbers of eight bits cannot be compiled for every GPU."""
    if options.maps != "fp8" or codegen != "inductor" or device.type != "cuda":
        return
    if torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise InvalidInput(
            "maps", f"'fp8' on {name}", "a GPU of capability 8.9 or newer", "ask for 'bf16'"
        )
